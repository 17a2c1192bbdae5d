"""Tiles made of the boxes that features are loaded by which begin anywhere: see `skewed`."""

from functools import cache
from typing import Any

from numba import cuda, uint32, uint64

from numbsparse.kernels.parts.lanes import word_of
from numbsparse.kernels.parts.skewed import words_of
from numbsparse.kernels.parts.tiles import WIDTH, Form


@cache
def straightening(form: Form) -> Any:
    """straighten(shared, boxes, tile, pitch, many): a tile of the boxes, of `many` rows of the
    batch or more; what is behind them is 0."""
    RUN, at_word = form.run, word_of(form)
    BOX, FEATURE = words_of(RUN, WIDTH)

    @cuda.jit(device=True)
    def of_16_bit(shared, boxes, tile, pitch, many):
        lane = uint32(cuda.threadIdx.x) % 32
        word, half = lane % 16, lane // 16
        there = uint32(0)  # of the two values of a word those that are
        if 2 * word < many:
            there = uint32(0xFFFFFFFF) if 2 * word + 1 < many else uint32(0xFFFF)
        skew = uint32(0)
        for r in range(8):
            shift, at = uint32(16 * (skew % 2)), uint32(boxes + r * BOX + skew // 2 + word)
            for k in range(2):
                row = uint32(2 * k + half)
                low, high = shared[at + row * FEATURE], shared[at + row * FEATURE + 1]
                value = uint32((uint64(high) << uint64(32) | uint64(low)) >> uint64(shift))
                shared[tile + at_word(8 * row + r, word)] = value & there
            skew = uint32(skew + pitch) % 8

    @cuda.jit(device=True)
    def of_float32(shared, boxes, tile, pitch, many):
        lane = uint32(cuda.threadIdx.x) % 32
        there = uint32(0xFFFFFFFF) if lane < many else uint32(0)
        skew = uint32(0)
        for r in range(4):
            at = uint32(boxes + r * BOX + skew + lane)
            for k in range(8):
                shared[tile + at_word(uint32(4 * k + r), lane)] = shared[at + k * FEATURE] & there
            skew = uint32(skew + pitch) % 4

    return of_16_bit if form.is_16_bit else of_float32
