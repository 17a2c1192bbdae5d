"""How a warp goes through the bits of lines, 32 inputs at a time, and from one kept to the next."""

from __future__ import annotations

from numba import cuda, int32, uint32

from numbsparse.kernels.ptx import redux_or, shfl_idx


@cuda.jit(device=True)
def mask_of(words, line, lines, at):
    """Which of so many lines keep the input 32 at + lane: bit i for line + i."""
    mask, lane = uint32(0), uint32(cuda.threadIdx.x % 32)
    for i in range(min(lines, words.shape[0] - line)):
        bit = uint32(words[line + i, at] >> lane) & uint32(1)
        mask = uint32(mask | uint32(bit << uint32(i)))
    return mask


@cuda.jit(device=True)
def kept_of(masks):
    """Which of 32 inputs a line keeps, of the masks that the lanes have."""
    return redux_or(uint32(uint32(1) << uint32(cuda.threadIdx.x % 32) if masks != 0 else 0))


@cuda.jit(device=True)
def next_kept(kept, masks):
    """(the first of the kept inputs, its mask, the others)."""
    bit = lowest(kept)
    return bit, shfl_idx(masks, uint32(bit)), uint32(kept & uint32(kept - uint32(1)))


@cuda.jit(device=True)
def lowest(word):
    """The number of the lowest bit of a word that is set."""
    return int32(cuda.popc(uint32(~word & uint32(word - uint32(1)))))
