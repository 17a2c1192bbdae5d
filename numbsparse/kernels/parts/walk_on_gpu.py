"""How a warp goes through the bits of lines, 32 inputs at a time, and from one kept to the next."""

from numba import cuda, int32, uint32

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
