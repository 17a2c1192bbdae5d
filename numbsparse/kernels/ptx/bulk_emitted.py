"""Barriers that count bytes, and the copy engine between shared memory and arrays; 9.0."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import (
    GLOBAL,
    SHARED,
    address,
    check_array,
    emit,
    i32,
    on_registers,
    order,
    u32,
)

_WAIT = (
    "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
    "@!done bra AGAIN; }"
)
_COPY = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"
_LOAD_2D = _COPY.format(2) + " [$0], [$1, {$3, $4}], [$2];"
_LOAD_3D = _COPY.format(3) + " [$0], [$1, {$3, $4, $5}], [$2];"
_LOAD_5D = _COPY.format(5) + " [$0], [$1, {$3, $4, $5, $6, $7}], [$2];"
_MULTICAST = "{ .reg .b16 ranks; cvt.u16.u32 ranks, "
_LOAD_2D_MULTICAST = (
    f"{_MULTICAST} $5; {_COPY.format(2)}.multicast::cluster [$0], [$1, {{$3, $4}}], [$2], ranks; }}"
)
_STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group "
_STORE_2D = _STORE.format(2) + "[$1, {$2, $3}], [$0];"
_STORE_5D = _STORE.format(5) + "[$1, {$2, $3, $4, $5, $6}], [$0];"
_LOAD_3D_MULTICAST = (
    f"{_MULTICAST} $6; {_COPY.format(3)}.multicast::cluster [$0], [$1, {{$3, $4, $5}}], [$2], "
    "ranks; }"
)
_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
_ELECT = "{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 $0, 1, 0, one; }"


@intrinsic
def mbarrier_init(typing, bars, i, count):
    return _on_barrier("mbarrier.init.shared::cta.b64 [$0], $1;", bars, i, count)


@intrinsic
def mbarrier_expect(typing, bars, i, nbytes):
    return _on_barrier("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", bars, i, nbytes)


@intrinsic
def mbarrier_arrive(typing, bars, i):
    return _on_barrier("mbarrier.arrive.shared::cta.b64 _, [$0];", bars, i)


@intrinsic
def mbarrier_wait(typing, bars, i, parity):
    return _on_barrier(_WAIT, bars, i, parity)


@intrinsic
def fence_mbarrier_init(typing):
    return types.void(), order("fence.mbarrier_init.release.cluster;")


@intrinsic
def fence_proxy_async(typing):
    return types.void(), order("fence.proxy.async.shared::cta;")


@intrinsic
def elect(typing):
    return on_registers(_ELECT, [u32], [], [], ordered=True)


@intrinsic
def wait_for_earlier_kernels(typing):
    return types.void(), order("griddepcontrol.wait;")


@intrinsic
def let_next_kernel_start(typing):
    return types.void(), order("griddepcontrol.launch_dependents;")


@intrinsic
def fence_tensor_map(typing, tensor_map):
    text = "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;"
    return _on_map("fence_tensor_map", text, tensor_map)


@intrinsic
def prefetch_tensor_map(typing, tensor_map):
    return _on_map("prefetch_tensor_map", "prefetch.tensormap [$0];", tensor_map)


@intrinsic
def tma_load_2d(typing, shared, i, tensor_map, column, row, bars, j):
    return _load(_LOAD_2D, shared, i, tensor_map, bars, j, column, row, axes=2)


@intrinsic
def tma_load_3d(typing, shared, i, tensor_map, column, row, layer, bars, j):
    return _load(_LOAD_3D, shared, i, tensor_map, bars, j, column, row, layer)


@intrinsic
def tma_load_2d_multicast(typing, shared, i, tensor_map, column, row, bars, j, ranks):
    return _load(_LOAD_2D_MULTICAST, shared, i, tensor_map, bars, j, column, row, ranks, axes=2)


@intrinsic
def tma_load_5d(typing, shared, i, tensor_map, column, row, layer, block, image, bars, j):
    return _load(_LOAD_5D, shared, i, tensor_map, bars, j, column, row, layer, block, image, axes=5)


@intrinsic
def tma_load_3d_multicast(typing, shared, i, tensor_map, column, row, layer, bars, j, ranks):
    return _load(_LOAD_3D_MULTICAST, shared, i, tensor_map, bars, j, column, row, layer, ranks)


@intrinsic
def tma_store_2d(typing, shared, i, tensor_map, column, row):
    return _store(_STORE_2D, shared, i, tensor_map, axes=2)


@intrinsic
def tma_store_5d(typing, shared, i, tensor_map, column, row, layer, block, image):
    return _store(_STORE_5D, shared, i, tensor_map, axes=5)


@intrinsic
def bulk_commit(typing):
    return types.void(), order("cp.async.bulk.commit_group;")


@intrinsic
def bulk_wait_read(typing):
    return types.void(), order("cp.async.bulk.wait_group.read 0;")


@intrinsic
def bulk_load(typing, shared, i, source, j, nbytes, bars, k):
    check_array("bulk_load", shared, i)
    check_array("bulk_load", source, j)
    check_array("bulk_load", bars, k, types.uint64)

    def build(context, builder, signature, args):
        target = address(context, builder, shared, args[0], args[1], SHARED)
        origin = address(context, builder, source, args[2], args[3], GLOBAL)
        bar = address(context, builder, bars, args[5], args[6], SHARED)
        emit(builder, _BULK, [], [target, origin, args[4], bar], memory=True)
        return context.get_dummy_value()

    place = types.int64
    return types.void(shared, place, source, place, u32, bars, place), build


@intrinsic
def first_multiple(typing, shared, nbytes):
    check_array("first_multiple", shared, nbytes)

    def build(context, builder, signature, args):
        start = address(context, builder, shared, args[0], ir.Constant(_i64, 0), SHARED)
        gap = builder.urem(builder.neg(start), args[1])
        return builder.udiv(gap, i32(shared.dtype.bitwidth // 8))

    return u32(shared, u32), build


_i64 = ir.IntType(64)


def _load(text, shared, i, tensor_map, bars, j, *numbers, axes=3):
    check_array("tma_load", shared, i)
    check_array("tma_load", tensor_map, types.int64, types.int64)
    check_array("tma_load", bars, j, types.uint64)

    def build(context, builder, signature, args):
        target = address(context, builder, shared, args[0], args[1], SHARED)
        origin = address(context, builder, tensor_map, args[2], ir.Constant(_i64, 0), GLOBAL)
        bar_at = 3 + axes
        bar = address(context, builder, bars, args[bar_at], args[bar_at + 1], SHARED)
        rest = [*args[3:bar_at], *args[bar_at + 2 :]]
        emit(builder, text, [], [target, origin, bar, *rest], memory=True)
        return context.get_dummy_value()

    where = (types.int32,) * axes
    ranks = (u32,) * (len(numbers) - axes)
    return types.void(shared, types.int64, tensor_map, *where, bars, types.int64, *ranks), build


def _store(text, shared, i, tensor_map, axes):
    check_array("tma_store", shared, i)
    check_array("tma_store", tensor_map, types.int64, types.int64)

    def build(context, builder, signature, args):
        origin = address(context, builder, shared, args[0], args[1], SHARED)
        target = address(context, builder, tensor_map, args[2], ir.Constant(_i64, 0), GLOBAL)
        emit(builder, text, [], [origin, target, *args[3:]], memory=True)
        return context.get_dummy_value()

    return types.void(shared, types.int64, tensor_map, *(types.int32,) * axes), build


def _on_map(name, text, tensor_map):
    check_array(name, tensor_map, types.int64, types.int64)

    def build(context, builder, signature, args):
        where = address(context, builder, tensor_map, args[0], ir.Constant(_i64, 0), GLOBAL)
        emit(builder, text, [], [where], memory=True)
        return context.get_dummy_value()

    return types.void(tensor_map), build


def _on_barrier(text, bars, i, *operand):
    name = text.replace("{ .reg .pred done; AGAIN: ", "").split(".shared")[0]
    check_array(name, bars, i, types.uint64)
    if not all(isinstance(n, types.Integer) for n in operand):
        raise TypingError(f"{name} takes an integer, got {operand[0]}")

    def build(context, builder, signature, args):
        bar = address(context, builder, bars, args[0], args[1], SHARED)
        emit(builder, text, [], [bar, *args[2:]], memory=True)
        return context.get_dummy_value()

    return types.void(bars, types.int64, *(u32 for _ in operand)), build
