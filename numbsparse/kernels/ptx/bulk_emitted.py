"""Barriers that count bytes, and the copy engine between shared memory and arrays; 9.0."""

from __future__ import annotations

from numba import types
from numba.cuda.core.errors import TypingError
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import (
    GLOBAL,
    SHARED,
    Item,
    address,
    check_array,
    i32,
    i64,
    on_items,
    on_registers,
    order,
    u32,
)

_WAIT = (
    "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
    "@!done bra AGAIN; }"
)
_COPY = "cp.async.bulk.tensor.{}d.shared::cluster.global.mbarrier::complete_tx::bytes"
_LOAD_2D = _COPY.format(2) + " [$0], [$1, {$2, $3}], [$4];"
_LOAD_3D = _COPY.format(3) + " [$0], [$1, {$2, $3, $4}], [$5];"
_LOAD_5D = _COPY.format(5) + " [$0], [$1, {$2, $3, $4, $5, $6}], [$7];"
_MULTICAST = "{ .reg .b16 ranks; cvt.u16.u32 ranks, "
_LOAD_2D_MULTICAST = (
    f"{_MULTICAST} $5; {_COPY.format(2)}.multicast::cluster [$0], [$1, {{$2, $3}}], [$4], ranks; }}"
)
_STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group "
_STORE_2D = _STORE.format(2) + "[$1, {$2, $3}], [$0];"
_STORE_5D = _STORE.format(5) + "[$1, {$2, $3, $4, $5, $6}], [$0];"
_LOAD_3D_MULTICAST = (
    f"{_MULTICAST} $6; {_COPY.format(3)}.multicast::cluster [$0], [$1, {{$2, $3, $4}}], [$5], "
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
def cp_async_arrive(typing, bars, i):
    return _on_barrier("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", bars, i)


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
    return on_items("fence_tensor_map", text, [_map(tensor_map)])


@intrinsic
def prefetch_tensor_map(typing, tensor_map):
    return on_items("prefetch_tensor_map", "prefetch.tensormap [$0];", [_map(tensor_map)])


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
    items = [Item(shared, i), Item(source, j, GLOBAL), u32, Item(bars, k, dtype=types.uint64)]
    return on_items("bulk_load", _BULK, items)


@intrinsic
def first_multiple(typing, shared, nbytes):
    check_array("first_multiple", shared, nbytes)

    def build(context, builder, signature, args):
        start = address(context, builder, shared, args[0], i64(0), SHARED)
        gap = builder.urem(builder.neg(start), args[1])
        return builder.udiv(gap, i32(shared.dtype.bitwidth // 8))

    return u32(shared, u32), build


def _load(text, shared, i, tensor_map, bars, j, *numbers, axes=3):
    where, ranks = [types.int32] * axes, [u32] * (len(numbers) - axes)
    bar = Item(bars, j, dtype=types.uint64)
    return on_items("tma_load", text, [Item(shared, i), _map(tensor_map), *where, bar, *ranks])


def _store(text, shared, i, tensor_map, axes):
    where = [types.int32] * axes
    return on_items("tma_store", text, [Item(shared, i), _map(tensor_map), *where])


def _map(tensor_map):
    return Item(tensor_map, None, GLOBAL, types.int64)


def _on_barrier(text, bars, i, *operand):
    name = text.replace("{ .reg .pred done; AGAIN: ", "").split(".shared")[0]
    if not all(isinstance(n, types.Integer) for n in operand):
        raise TypingError(f"{name} takes an integer, got {operand[0]}")
    return on_items(name, text, [Item(bars, i, dtype=types.uint64), *(u32 for _ in operand)])
