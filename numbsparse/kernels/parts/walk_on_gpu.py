"""Bits of words: how a warp goes through those of lines, and a block of threads counts its own.

A warp looks at 32 inputs of lines at a time, and goes from one kept to the next.

Or a block of threads has a list of entries, some of which are left. A warp marks 32 neighbours at
once, as the bits of a word; ranks, how many are left before each, are counts of bits. Those that
are left make groups anew, of up to `most`, one or two: ranks[0] are of what is left, and
ranks[most - 1] of what begins a group.
"""

from numba import cuda, int32, uint32

from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.ptx import redux_or, shfl_idx


@cuda.jit(device=True)
def kept_by(words, line, lines, at):
    """(which of `lines` lines keep the input 32 at + lane: bit i for line + i; which of these 32
    inputs any of them keeps).

    `lines` is a literal: with a number known at run time alone, all inputs were taken for kept in
    the first launch of a process (H200).
    """
    mask, kept, lane = uint32(0), uint32(0), uint32(cuda.threadIdx.x) % uint32(32)
    for i in range(lines):
        if line + i < words.shape[0]:
            word = uint32(words[line + i, at])
            kept = uint32(kept | word)
            mask = uint32(mask | uint32(uint32(uint32(word >> lane) & uint32(1)) << uint32(i)))
    return mask, kept


@cuda.jit(device=True)
def next_kept(kept, masks):
    """(the first of the kept inputs, its mask, the others)."""
    bit = lowest(kept)
    return bit, shfl_idx(masks, uint32(bit)), uint32(kept & uint32(kept - uint32(1)))


@cuda.jit(device=True)
def lanes_where(is_so):
    """A bit for each lane of the warp in which it is so."""
    return redux_or(uint32(uint32(1 if is_so else 0) << uint32(cuda.threadIdx.x % 32)))


@cuda.jit(device=True)
def highest(word):
    """The number of the highest bit of a word that is set, or 0."""
    for shift in (1, 2, 4, 8, 16):
        word = uint32(word | word >> uint32(shift))
    return max(int32(cuda.popc(word)) - 1, 0)


@cuda.jit(device=True)
def lowest(word):
    """The number of the lowest bit of a word that is set."""
    return int32(cuda.popc(uint32(~word & uint32(word - uint32(1)))))


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
    """Whether an entry is left and begins a group. Lines have groups of their own: before, those of
    this one began with group firsts[line]."""
    before = ranks[0, entry]
    if ranks[0, entry + 1] == before:
        return False
    return (before - ranks[0, firsts[line] * most]) % most == 0


@cuda.jit(device=True)
def group_of(ranks, entry, most):
    """(the group that has an entry that is left, where in it)"""
    before, after = ranks[most - 1, entry], ranks[most - 1, entry + 1]
    return after - 1, 1 - (after - before)
