"""float32 on the tensor cores: the split of `parts.fragments_tf32`, from shifted rows of a box.

What a lane reads is as there: four neighbours in memory, which are four terms of a sum, or four
features. Rows of a box are found one by one, because those of a tile are not at equal distances.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.conv.k2_tensor_core.products import unrolled
from numbsparse.kernels.parts import fragments_tf32 as singles
from numbsparse.kernels.parts.banks import place, swap_for_lanes
from numbsparse.kernels.ptx import load_4xf32, store_4xf32

PIECE = singles.PIECE
RUN = 4  # terms of a sum that a lane holds of 16


@cache
def places_in_rows(PIECES: int) -> Any:
    """Where pieces of x lie for the products of lines: of two rows at a time, four pieces each."""

    @cuda.jit(device=True)
    def swap(line):
        return line % 2 * 4 if PIECES >= 8 else 0

    return place(PIECES, PIECE, swap)[0]


def places_in_columns(PIECES: int) -> Any:
    """The same for the weight-gradient: of four rows that are four apart, two pieces each."""
    return place(PIECES, PIECE, swap_for_lanes(PIECES, 4))[0]


@cache
def add_tap(precision: str, B: int, TA: int, turned: bool) -> Any:
    """(add_products, begin_w), as of halves; a lane has 2 TA rows, 8 u + its group."""
    TB, PIECES, UNITS = B // 8, B // PIECE, 2 * TA
    A_VALUES, B_VALUES = (RUN, UNITS), (RUN, TB)
    place_in, multiply = places_in_rows(PIECES), singles.chunk_products(precision, TA, TB)
    begin_w, load_w = singles.fragment(PIECES, turned, TB)

    @cuda.jit(device=True)
    def add_products(ring, x_start, w_at, base, shift, across, acc):
        ar, br = cuda.local.array(A_VALUES, float32), cuda.local.array(B_VALUES, float32)
        for k in range(B // 16):
            for u in range(UNITS):
                at = x_start + place_in(uint32(base[u] + shift), uint32(4 * k + across))
                run = load_4xf32(ring, at)
                for j in range(RUN):
                    ar[j, u] = run[j]
            load_w(ring, w_at, k, br)
            multiply(ar, br, acc)

    return add_products, begin_w


@cache
def store_tile(TA: int, TB: int, fours: bool) -> Any:
    """The sums of a warp to the rows of y named in `out_rows`; four at once with `fours`."""
    column_in = singles.coordinates(TB)

    @cuda.jit(device=True)
    def store(acc, y, out_rows, own, left, out_features):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(TA):
            for i in range(4):
                row = out_rows[own + 16 * m + 8 * (i // 2) + g]
                for n in range(TB):
                    column = left + column_in(n, 2 * q + i % 2)
                    at = row * out_features + column
                    if row >= 0 and column < out_features:
                        if fours:
                            if n % 4 == 0:
                                a, b, c = acc[m, n + 1, i], acc[m, n + 2, i], acc[m, n + 3, i]
                                store_4xf32(y, at, acc[m, n, i], a, b, c)
                        else:
                            y[at] = acc[m, n, i]

    return store


@cache
def add_shifted(precision: str, B: int, PER: int) -> Any:
    """(add_rows, begin_dy): acc[p] += what taps see of 16 rows of a box, turned, times dy."""
    HEIGHT, PIECES = min(B, 32), B // PIECE
    TA, TB = HEIGHT // 16, B // 8
    UNITS, A_VALUES, B_VALUES, ROWS = 2 * TA, (RUN, 2 * TA), (RUN, TB), RUN
    place_in, multiply = places_in_columns(PIECES), singles.chunk_products(precision, TA, TB)
    begin_dy, load_dy = singles.fragment(PIECES, False, TB)

    @cuda.jit(device=True)
    def add_tap(ring, x_start, rows, shift, piece, br, acc):
        g = uint32(cuda.threadIdx.x) % 32 // 4
        ar = cuda.local.array(A_VALUES, float32)
        for j in range(RUN):
            row = uint32(rows[j] + shift)
            if UNITS == 4:
                run = load_4xf32(ring, x_start + place_in(row, uint32(piece + g)))
                for u in range(4):
                    ar[j, u] = run[u]
            else:
                for u in range(UNITS):
                    at = place_in(row, uint32(piece + 2 * u + g // 4))
                    ar[j, u] = ring[x_start + at + g % 4]
        multiply(ar, br, acc)

    add_taps = unrolled(add_tap, PER)

    @cuda.jit(device=True)
    def add_rows(mine, ring, x_start, dy_at, bases, i, shifts, half, acc):
        q = uint32(cuda.threadIdx.x) % 4
        br = cuda.local.array(B_VALUES, float32)
        rows = cuda.local.array(ROWS, uint32)
        load_dy(ring, dy_at, i, br)
        for j in range(RUN):
            rows[j] = uint32(bases[16 * i + 4 * q + j])
        piece = uint32(half * (HEIGHT // PIECE))
        add_taps(mine, ring, x_start, rows, shifts, piece, br, acc)

    return add_rows, begin_dy
