"""Factors that lie feature-major, for the products of `single_slots`.

A line of a stage is a feature, DEPTH rows of the batch long: 64 or 32 bytes, their pieces of 16
bytes swizzled. Lane 4 g + q has the terms that it has of a factor in rows, 2 q and 2 q + 1 of every
8, so that the other factor may lie either way; here they are neighbours. Where both factors lie so,
it has 4 q to 4 q + 3 of every 16, read at once. Which features it has, `feature_of` chooses: half a
warp is served together, or a quarter, and its lanes meet in no bank.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int64, uint32

from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.parts.fragments_tf32 import round_to_tf32, split_exact
from numbsparse.kernels.ptx import as_float32, load_2xu32, load_4xu32
from numbsparse.kernels.ptx.tiles import swizzled

EIGHT = 32  # bytes of 8 terms: two pieces

place_of_byte = cuda.jit(device=True)(swizzled)


@cuda.jit(device=True)
def feature_of(g, half):
    """Which of 16 features is row g + 8 half of an mma, or column g of its half-th 8 columns.

    The lines of g = 0 to 3, and of 4 to 7, fill all banks, whether they are of 32 or of 64 bytes.
    Of an even g and the next the features are neighbours.
    """
    return g // 2 * 4 + (half ^ g // 2 % 2) * 2 + g % 2


@cuda.jit(device=True)
def feature_of_eight(g):
    """Which of 8 features is column g, where there are no others."""
    return feature_of(g % 4, g // 4)


@cache
def lanes_of(region: Region, B: int, fours: bool) -> tuple[Any, Any]:
    """(x_lane, y_lane): where a lane begins, in bytes from the start of a piece of 8 features of x,
    and of the B of dy."""
    LINE, RUN = 4 * region.DEPTH, 16 if fours else 8

    @cuda.jit(device=True)
    def byte_of(feature, q):
        return uint32(place_of_byte(feature * LINE + q * RUN, LINE))

    @cuda.jit(device=True)
    def x_lane(g, q):
        return byte_of(feature_of(g % 4, 0), q)

    @cuda.jit(device=True)
    def y_lane(g, q):
        return byte_of(feature_of(g, 0) if B == 16 else feature_of_eight(g), q)

    return x_lane, y_lane


@cache
def turned_loads(region: Region, exact: bool, B: int, fours: bool) -> tuple[Any, Any]:
    """(load_x, load_dy), as `single_slots.loads` has them of rows."""
    STEPS, TILES, LINE = region.DEPTH // 8, B // 8, 4 * region.DEPTH
    VALUES = 2 * STEPS  # of a lane and a feature
    OTHER = swizzled(2 * LINE, LINE)  # from the feature of one half to that of the other
    split = split_exact if exact else round_to_tf32

    @cuda.jit(device=True)
    def load(shared, start, at, half, values):
        """Two terms of each step. The other half and the next 8 terms are other pieces: xors."""
        if fours:
            run = load_4xu32(shared, int64(uint32(start + (at ^ uint32(OTHER * half)))))
            for i in range(4):
                values[i] = run[i]
        else:
            for s in range(STEPS):
                place = uint32(start + (at ^ uint32(OTHER * half ^ EIGHT * s)))
                run = load_2xu32(shared, int64(place))
                values[2 * s], values[2 * s + 1] = run

    @cuda.jit(device=True)
    def load_x(shared, start, at, hi, lo):
        values = cuda.local.array(VALUES, uint32)
        for half in range(2):
            load(shared, start, at, half, values)
            for i in range(VALUES):
                s, j = i // 2, i % 2 * 2 + half
                hi[s, j], lo[s, j] = split(as_float32(values[i]))

    @cuda.jit(device=True)
    def load_dy(shared, start, at, hi, lo):
        values = cuda.local.array(VALUES, uint32)
        for t in range(TILES):
            load(shared, start, at, t, values)
            for i in range(VALUES):
                s, j = i // 2, i % 2
                hi[s, t, j], lo[s, t, j] = split(as_float32(values[i]))

    return load_x, load_dy
