"""Barriers that count bytes, and the copy engine between shared memory and arrays; 9.0."""

from numba import types
from numba.cuda.extending import intrinsic

from numbsparse.kernels.ptx.assembly import (
    GLOBAL,
    SHARED,
    Item,
    Whole,
    address,
    check_array,
    i32,
    i64,
    instruction,
    ordering,
    u32,
)

_BARRIER, _COUNT = Item(dtypes=(types.uint64,)), Whole(u32)
_MAP = Item(GLOBAL, (types.int64,), first=True)

mbarrier_init = instruction("mbarrier.init.shared::cta.b64 [$0], $1;", _BARRIER, _COUNT)
mbarrier_expect = instruction(
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", _BARRIER, _COUNT
)
mbarrier_arrive = instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", _BARRIER)
cp_async_arrive = instruction("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", _BARRIER)
mbarrier_wait = instruction(
    "{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; "
    "@!done bra AGAIN; }",
    *(_BARRIER, _COUNT),
    name="mbarrier.try_wait",
)
fence_mbarrier_init = ordering("fence.mbarrier_init.release.cluster;")
fence_proxy_async = ordering("fence.proxy.async.shared::cta;")
elect = instruction(
    "{ .reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 $0, 1, 0, one; }",
    results=(u32,),
    ordered=True,
)
prefetch_parameters = instruction(  # a use of them that stays before a wait, and never traps
    "{ .reg .pred no; .reg .b64 all; or.b64 all, $0, $1; or.b64 all, all, $2; "
    "or.b64 all, all, $3; setp.eq.s64 no, all, 0x8000000000000000; @no trap; }",
    *4 * (Whole(types.int64),),
    name="prefetch_parameters",
    ordered=True,
)
wait_for_earlier_kernels = ordering("griddepcontrol.wait;")
let_next_kernel_start = ordering("griddepcontrol.launch_dependents;")

fence_tensor_map = instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", _MAP)
prefetch_tensor_map = instruction("prefetch.tensormap [$0];", _MAP)


def _box(axes):
    """In the text, a map and the place of a box."""
    return f"[$1, {{{', '.join(f'${2 + axis}' for axis in range(axes))}}}]"


def _load(axes, multicast=False):
    copy = f"cp.async.bulk.tensor.{axes}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    operands = Item(), _MAP, *axes * (Whole(types.int32),), _BARRIER
    if not multicast:
        text = f"{copy} [$0], {_box(axes)}, [${2 + axes}];"
        return instruction(text, *operands)
    text = (
        f"{{ .reg .b16 ranks; cvt.u16.u32 ranks, ${3 + axes}; {copy}.multicast::cluster "
        f"[$0], {_box(axes)}, [${2 + axes}], ranks; }}"
    )
    return instruction(text, *operands, _COUNT, name=copy)


def _store(axes):
    text = f"cp.async.bulk.tensor.{axes}d.global.shared::cta.bulk_group {_box(axes)}, [$0];"
    return instruction(text, Item(), _MAP, *axes * (Whole(types.int32),))


tma_load_2d, tma_load_3d, tma_load_5d = _load(2), _load(3), _load(5)
tma_load_2d_multicast, tma_load_3d_multicast = _load(2, True), _load(3, True)
tma_store_2d, tma_store_3d, tma_store_5d = _store(2), _store(3), _store(5)
bulk_commit = ordering("cp.async.bulk.commit_group;")
bulk_wait_read = ordering("cp.async.bulk.wait_group.read 0;")
bulk_load = instruction(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
    *(Item(), Item(GLOBAL), _COUNT, _BARRIER),
)


@intrinsic
def first_multiple(typing, shared, nbytes):
    check_array("first_multiple", shared, nbytes)

    def build(context, builder, signature, args):
        start = address(context, builder, shared, args[0], i64(0), SHARED)
        gap = builder.urem(builder.neg(start), args[1])
        return builder.udiv(gap, i32(shared.dtype.bitwidth // 8))

    return u32(shared, u32), build
