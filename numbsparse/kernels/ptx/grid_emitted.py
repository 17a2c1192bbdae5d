"""What the blocks of a whole grid share: counters, and what another of them wrote."""

from __future__ import annotations

from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import GLOBAL, address, check_array, emit, i32, order, u32


@intrinsic
def load_acquire(typing, array, j):
    check_array("load_acquire", array, j)
    if array.dtype not in (types.int32, types.uint32):
        raise TypingError(f"load_acquire takes an array of 32-bit integers, got {array}")

    def build(context, builder, signature, args):
        where = address(context, builder, array, args[0], args[1], GLOBAL)
        (value,) = emit(builder, "ld.acquire.gpu.global.u32 $0, [$1];", [i32], [where], memory=True)
        return value

    return u32(array, types.int64), build


@intrinsic
def load_acquire_system(typing, array, j):
    check_array("load_acquire_system", array, j, types.int32)

    def build(context, builder, signature, args):
        where = address(context, builder, array, args[0], args[1], GLOBAL)
        (value,) = emit(builder, "ld.acquire.sys.global.u32 $0, [$1];", [i32], [where], memory=True)
        return value

    return types.int32(array, types.int64), build


@intrinsic
def store_release_system(typing, array, j, n):
    check_array("store_release_system", array, j, types.int32)

    def build(context, builder, signature, args):
        where = address(context, builder, array, args[0], args[1], GLOBAL)
        emit(builder, "st.release.sys.global.u32 [$0], $1;", [], [where, args[2]], memory=True)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int32), build


@intrinsic
def add_release(typing, array, j, n):
    check_array("add_release", array, j)
    if array.dtype not in (types.int32, types.uint32) or not isinstance(n, types.Integer):
        raise TypingError(f"add_release takes an array of 32-bit integers, got {array}, {n}")

    def build(context, builder, signature, args):
        where = address(context, builder, array, args[0], args[1], GLOBAL)
        emit(builder, "red.release.gpu.global.add.u32 [$0], $1;", [], [where, args[2]], memory=True)
        return context.get_dummy_value()

    return types.void(array, types.int64, u32), build


@intrinsic
def add_acq_rel(typing, array, j, n):
    check_array("add_acq_rel", array, j, types.int32)

    def build(context, builder, signature, args):
        where = address(context, builder, array, args[0], args[1], GLOBAL)
        text = "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
        (value,) = emit(builder, text, [i32], [where, args[2]], memory=True)
        return value

    return types.int32(array, types.int64, types.int32), build


@intrinsic
def fence_proxy_async_global(typing):
    return types.void(), order("fence.proxy.async.global;")
