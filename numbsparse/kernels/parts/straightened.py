"""Tiles made of features that were loaded from 16 bytes on, before they begin: see `skewed`."""

from functools import cache
from typing import Any

from numba import cuda, uint32, uint64

from numbsparse.kernels.parts.skewed import places_of
from numbsparse.kernels.parts.tiles import WIDTH, Form


@cache
def word_of(form: Form) -> Any:
    """Where word `word` of row `row` of a swizzled tile is."""
    SHARE, IN_ROW = WIDTH // form.row, form.row // 4

    @cuda.jit(device=True)
    def place(row, word):
        piece = (row * IN_ROW + word // 4) ^ (row // SHARE % (8 // SHARE))
        return uint32(4 * piece + word % 4)

    return place


@cache
def straightening(form: Form, features: int, by: str) -> Any:
    """straighten(shared, start, tile, pitch, many): a tile of so many features, and of `many` rows
    of the batch or more; what is behind them is 0."""
    at_word = word_of(form)
    _, BOX, FURTHER, _ = places_of(form.run, WIDTH, by)
    EIGHTS, FOURS = features // 8, features // 4

    @cuda.jit(device=True)
    def of_16_bit(shared, start, tile, pitch, many):
        lane = uint32(cuda.threadIdx.x) % 32
        word, half = lane % 16, lane // 16
        there = uint32(0)  # of the two values of a word those that are
        if 2 * word < many:
            there = uint32(0xFFFFFFFF) if 2 * word + 1 < many else uint32(0xFFFF)
        skew = uint32(half * pitch) % 8
        for r in range(4):
            number = uint32(2 * r + half)
            shift, at = uint32(16 * (skew % 2)), uint32(start + number * BOX + skew // 2 + word)
            for k in range(EIGHTS):
                low, high = shared[at + k * FURTHER], shared[at + k * FURTHER + 1]
                value = uint32((uint64(high) << uint64(32) | uint64(low)) >> uint64(shift))
                shared[tile + at_word(8 * k + number, word)] = value & there
            skew = uint32(skew + 2 * pitch) % 8

    @cuda.jit(device=True)
    def of_float32(shared, start, tile, pitch, many):
        lane = uint32(cuda.threadIdx.x) % 32
        there = uint32(0xFFFFFFFF) if lane < many else uint32(0)
        skew = uint32(0)
        for r in range(4):
            at = uint32(start + r * BOX + skew + lane)
            for k in range(FOURS):
                value = shared[at + k * FURTHER]
                shared[tile + at_word(uint32(4 * k + r), lane)] = value & there
            skew = uint32(skew + pitch) % 4

    return of_16_bit if form.is_16_bit else of_float32
