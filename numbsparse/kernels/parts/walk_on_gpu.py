"""How a warp goes through the bits of lines, 32 inputs at a time."""

from __future__ import annotations

from numba import cuda, int32, uint32


@cuda.jit(device=True)
def mask_of(words, line, lines, at):
    """Which of so many lines keep the input 32 at + lane: bit i for line + i."""
    mask, lane = uint32(0), uint32(cuda.threadIdx.x % 32)
    for i in range(min(lines, words.shape[0] - line)):
        bit = uint32(words[line + i, at] >> lane) & uint32(1)
        mask = uint32(mask | uint32(bit << uint32(i)))
    return mask


@cuda.jit(device=True)
def lowest(word):
    """The number of the lowest bit of a word that is set."""
    return int32(cuda.popc(uint32(~word & uint32(word - uint32(1)))))
