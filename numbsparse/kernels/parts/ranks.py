"""Which entries of a list are left, and how many of them are before each: by a block of threads.

A warp marks 32 neighbours at once, as the bits of a word; ranks are counts of bits.
"""

from numba import cuda, int32, uint32

from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.ptx import redux_or


@cuda.jit(device=True)
def mark(masks, entry, is_left):
    """Bit entry % 32 of masks[entry // 32]; the lanes of a warp have neighbouring entries."""
    bits = redux_or(uint32(uint32(1 if is_left else 0) << uint32(entry % 32)))
    if entry % 32 == 0:
        masks[entry // 32] = bits


@cuda.jit(device=True)
def rank(masks, ranks, n):
    """ranks[i] = how many bits are set before entry i, i <= n; there is a mask beyond the last."""
    for entry in range(int32(cuda.threadIdx.x), n + 1, int32(cuda.blockDim.x)):
        whole = entry // 32
        total = bits_below(masks[whole], entry % 32)
        for word in range(whole):
            total += int32(cuda.popc(masks[word]))
        ranks[entry] = total
