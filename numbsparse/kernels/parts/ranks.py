"""Which entries of a list are left, and how many of them are before each: by a block of threads.

A warp marks 32 neighbours at once, as the bits of a word; ranks are counts of bits. Those that are
left make groups anew, of up to `most`, one or two: ranks[0] are of what is left, ranks[most - 1] of
what begins a group.
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


@cuda.jit(device=True)
def begins_group(ranks, firsts, line, entry, most):
    """Whether an entry is left and begins a group, of those of a line, whose first group there was
    before is firsts[line]."""
    before = ranks[0, entry]
    if ranks[0, entry + 1] == before:
        return False
    return (before - ranks[0, firsts[line] * most]) % most == 0


@cuda.jit(device=True)
def group_of(ranks, entry, most):
    """(the group that has an entry that is left, where in it)"""
    before, after = ranks[most - 1, entry], ranks[most - 1, entry + 1]
    return after - 1, 1 - (after - before)
