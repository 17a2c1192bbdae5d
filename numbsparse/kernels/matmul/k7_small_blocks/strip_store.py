"""The sums of a strip to y from the registers of each warp: 16 bytes along y's gapless axis."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint16, uint32

from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import Strip
from numbsparse.kernels.parts.store import ANY, FEATURES, ROWS
from numbsparse.kernels.ptx import (
    movmatrix_trans,
    pack_bfloat2,
    pack_half2,
    shfl_xor,
    store_4xu32,
)


@cache
def storer(name: str, strip: Strip, y_lies: str) -> Any:
    """A warp's sums, 16 rows at a time."""
    TM, COLUMNS = strip.ROWS // 16, strip.COLUMNS
    store_16_rows = {ROWS: store_rows, FEATURES: store_features, ANY: store_items}[y_lies]
    store_16 = store_16_rows(strip, name)

    @cuda.jit(device=True)
    def store(acc, of_strip, warp, row, into):
        lines, y, sizes = into
        row_stride, column_stride, batch, features = sizes
        place = (y, row_stride, column_stride, batch, features)
        for m in range(TM):
            store_16(acc, m, lines, of_strip, warp * COLUMNS, row + 16 * m, place)

    return store


# A warp has 16 rows at a time, in pieces of 16 x 8. In the packed pairs of a piece's upper or lower
# half, lane 4 r + q holds columns 2 q and 2 q + 1 of row r.


@cache
def packed(strip: Strip, name: str) -> Any:
    """The pair of a lane in a piece: half 0 is the upper one."""
    PIECES, TM, N = strip.B // 8, strip.ROWS // 16, strip.B // 2
    pack = pack_half2 if name == "float16" else pack_bfloat2

    @cuda.jit(device=True)
    def pair(sums, m, piece, half):
        i = (piece // PIECES * TM + m) * N + piece % PIECES * 4 + 2 * half
        return pack(sums[i], sums[i + 1])

    return pair


@cache
def column_of(strip: Strip) -> Any:
    PIECES, B = strip.B // 8, strip.B

    @cuda.jit(device=True)
    def column(lines, group, first, piece):
        """The first output feature of a piece; negative where there is none."""
        return lines[group, first + piece // PIECES] * B + piece % PIECES * 8

    return column


@cache
def store_rows(strip: Strip, name: str) -> Any:
    """Four pieces at once: each lane of four gets 8 columns of one of them."""
    COUNT = strip.COLUMNS * strip.B // 8
    pair, column = packed(strip, name), column_of(strip)

    @cuda.jit(device=True)
    def store(sums, m, lines, group, first, row, y):
        values, stride, _, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for half in range(2):
            for s in range(0, COUNT, 4):
                a, b, c, d = transposed(
                    pair(sums, m, s, half),
                    pair(sums, m, s + 1, half),
                    pair(sums, m, s + 2, half),
                    pair(sums, m, s + 3, half),
                )
                k, n = column(lines, group, first, s + lane % 4), row + 8 * half + lane // 4
                if n < batch and k >= 0 and k < features:
                    store_4xu32(values, n * stride + k, a, b, c, d)

    return store


@cache
def store_features(strip: Strip, name: str) -> Any:
    """Both halves of two pieces at once, turned: each lane of four gets 8 rows of a column."""
    COUNT = strip.COLUMNS * strip.B // 8
    pair, column = packed(strip, name), column_of(strip)

    @cuda.jit(device=True)
    def store(sums, m, lines, group, first, row, y):
        values, _, stride, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for s in range(0, COUNT, 2):
            a, b, c, d = transposed(
                movmatrix_trans(pair(sums, m, s, 0)),
                movmatrix_trans(pair(sums, m, s, 1)),
                movmatrix_trans(pair(sums, m, s + 1, 0)),
                movmatrix_trans(pair(sums, m, s + 1, 1)),
            )
            k = column(lines, group, first, s + lane % 4 // 2)
            n, inside = row + lane % 2 * 8, k >= 0
            k += lane // 4
            if n < batch and inside and k < features:
                store_4xu32(values, k * stride + n, a, b, c, d)

    return store


@cache
def store_items(strip: Strip, name: str) -> Any:
    """Item by item, wherever y has them."""
    COUNT = strip.COLUMNS * strip.B // 8
    pair, column = packed(strip, name), column_of(strip)

    @cuda.jit(device=True)
    def store(sums, m, lines, group, first, row, y):
        values, row_stride, column_stride, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for half in range(2):
            n = row + 8 * half + lane // 4
            for s in range(COUNT):
                two = pair(sums, m, s, half)
                k = column(lines, group, first, s)
                inside = n < batch and k >= 0
                k += lane % 4 * 2
                for i in range(2):
                    if inside and k + i < features:
                        at = n * row_stride + (k + i) * column_stride
                        values[at] = uint16(two >> (16 * i) & 0xFFFF)

    return store


@cuda.jit(device=True)
def transposed(a, b, c, d):
    """Of four lanes that hold a row of a 4 x 4 matrix each, each gets a column."""
    lane = uint32(cuda.threadIdx.x)
    a, b = exchanged(a, b, lane % 2, 1)
    c, d = exchanged(c, d, lane % 2, 1)
    a, c = exchanged(a, c, lane % 4 // 2, 2)
    b, d = exchanged(b, d, lane % 4 // 2, 2)
    return a, b, c, d


@cuda.jit(device=True)
def exchanged(low, high, upper, mask):
    other = shfl_xor(low if upper else high, mask)
    return (other, high) if upper else (low, other)
