"""What the blocks of a whole grid share: counters, and what another of them wrote."""

from __future__ import annotations

from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import GLOBAL, Item, on_items, order, u32


@intrinsic
def load_acquire(typing, array, j):
    _check_words("load_acquire", array)
    text = "ld.acquire.gpu.global.u32 $0, [$1];"
    return on_items("load_acquire", text, [Item(array, j, GLOBAL)], [u32])


@intrinsic
def load_acquire_system(typing, array, j):
    text = "ld.acquire.sys.global.u32 $0, [$1];"
    items = [Item(array, j, GLOBAL, types.int32)]
    return on_items("load_acquire_system", text, items, [types.int32])


@intrinsic
def store_release_system(typing, array, j, n):
    text = "st.release.sys.global.u32 [$0], $1;"
    items = [Item(array, j, GLOBAL, types.int32), types.int32]
    return on_items("store_release_system", text, items)


@intrinsic
def add_release(typing, array, j, n):
    _check_words("add_release", array, n)
    text = "red.release.gpu.global.add.u32 [$0], $1;"
    return on_items("add_release", text, [Item(array, j, GLOBAL), u32])


@intrinsic
def add_acq_rel(typing, array, j, n):
    text = "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;"
    counter = Item(array, j, GLOBAL, types.int32)
    return on_items("add_acq_rel", text, [counter, types.int32], [types.int32])


@intrinsic
def fence_proxy_async_global(typing):
    return types.void(), order("fence.proxy.async.global;")


def _check_words(name, array, n=types.uint32):
    words = getattr(array, "dtype", None) in (types.int32, types.uint32)
    if not words or not isinstance(n, types.Integer):
        raise TypingError(f"{name} takes an array of 32-bit integers, got {array}, {n}")
