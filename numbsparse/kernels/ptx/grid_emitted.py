"""What the blocks of a whole grid share: counters, and what another of them wrote."""

from numba import types

from numbsparse.kernels.ptx.assembly import GLOBAL, Item, Whole, instruction, ordering, u32

_WORD, _COUNTER = Item(GLOBAL, (types.int32, u32)), Item(GLOBAL, (types.int32,))

load_acquire = instruction("ld.acquire.gpu.global.u32 $0, [$1];", _WORD, results=(u32,))
load_acquire_system = instruction(
    "ld.acquire.sys.global.u32 $0, [$1];", _COUNTER, results=(types.int32,)
)
store_release_system = instruction(
    "st.release.sys.global.u32 [$0], $1;", _COUNTER, Whole(types.int32)
)
add_release = instruction("red.release.gpu.global.add.u32 [$0], $1;", _WORD, Whole(u32))
add_acq_rel = instruction(
    "atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;",
    *(_COUNTER, Whole(types.int32)),
    results=(types.int32,),
)
fence_proxy_async_global = ordering("fence.proxy.async.global;")
