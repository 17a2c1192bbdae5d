"""The sums of a strip to y from the registers of each warp, 16 bytes along y's gapless axis; those
that a split of float32 made NaN are computed anew by the lane that wrote them."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint16, uint32

from numbsparse.kernels.matmul.k6_hopper.store import ANY, FEATURES, ROWS
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import Strip
from numbsparse.kernels.parts.swizzle import rows_of
from numbsparse.kernels.ptx import (
    as_uint32,
    movmatrix_trans,
    pack_bfloat2,
    pack_half2,
    shfl_xor,
    store_2xu32,
    store_4xf32,
    store_4xu32,
)

PAIR = {"float16": pack_half2, "bfloat16": pack_bfloat2}


@cache
def storer(
    strip: Strip, arithmetic: str, transposed: bool, x_transposed: bool, y_order: str
) -> Any:
    """store(acc, of_strip, warp, row, into): a warp's sums; `into` is the columns of each strip,
    y, its (row stride, column stride, batch, features), and of float32 what is multiplied."""
    if strip.ITEM == 2:
        return storer_of_16_bit(strip, arithmetic, y_order)
    return storer_of_float32(strip, arithmetic == "highest", transposed, x_transposed, y_order)


@cache
def storer_of_float32(
    strip: Strip, exact: bool, transposed: bool, x_transposed: bool, y_order: str
) -> Any:
    B, SUMS, COLUMNS, TM = strip.B, strip.ROWS, strip.COLUMNS, strip.ROWS // 16
    SQUARES = B // 8
    PAIRS, FOURS = y_order == ROWS, y_order == FEATURES and x_transposed
    row_of, mend = rows_of(4, strip.WIDTH, x_transposed).row_of, mend_sum(B, transposed)
    NEXT = 4 * SQUARES  # sums to those of the next 16 rows

    @cuda.jit(device=True)
    def store(acc, group, warp, top, into):
        lines, y, sizes = into[:3]
        row_stride, column_stride, batch, features = sizes
        lane = uint32(cuda.threadIdx.x) % 32
        found = 0
        for j in range(COLUMNS):
            line = int64(lines[group, warp * COLUMNS + j])
            for m in range(TM):
                for n in range(SQUARES):
                    for e in range(4):
                        i = ((j * TM + m) * SQUARES + n) * 4 + e
                        row = top + row_of(m, e // 2)
                        column = line * B + n * 8 + lane % 4 * 2 + e % 2
                        at = row * row_stride + column * column_stride
                        if row < batch and line >= 0 and column < features:
                            if FOURS:
                                if m % 2 == 0 and e < 2:
                                    c, d = acc[i + NEXT], acc[i + NEXT + 2]
                                    store_4xf32(y, at, acc[i], acc[i + 2], c, d)
                            elif not PAIRS:
                                y[at] = acc[i]
                            elif e % 2 == 0:
                                store_2xu32(y, at, as_uint32(acc[i]), as_uint32(acc[i + 1]))
                            if acc[i] != acc[i]:
                                found = 1
        if exact and found:
            for i in range(SUMS):
                line = lines[group, warp * COLUMNS + i // (4 * SQUARES * TM)]
                row = top + row_of(i // (4 * SQUARES) % TM, i % 4 // 2)
                within = i // 4 % SQUARES * 8 + lane % 4 * 2 + i % 2
                if row < batch and line >= 0 and line * int64(B) + within < features:
                    at = row * row_stride + (line * int64(B) + within) * column_stride
                    if y[at] != y[at]:
                        y[at] = mend(into[3], row, line, within)

    return store


@cache
def mend_sum(B: int, transposed: bool) -> Any:
    """A plain sum, where a split made NaN of an infinity: rare, so simple."""

    @cuda.jit(device=True)
    def mend(source, row, line, within):
        x, x_sizes, values, indptr, indices, blocks = source
        row_stride, column_stride, features = x_sizes
        total = float32(0)
        for entry in range(indptr[line], indptr[line + 1]):
            c, block = indices[entry] * int64(B), blocks[entry]
            for k in range(min(B, features - c)):
                w = values[block, within, k] if transposed else values[block, k, within]
                total += x[row * row_stride + (c + k) * column_stride] * w
        return total

    return mend


@cache
def storer_of_16_bit(strip: Strip, name: str, y_order: str) -> Any:
    """A warp's sums, 16 rows at a time."""
    TM, COLUMNS = strip.ROWS // 16, strip.COLUMNS
    store_16_rows = {ROWS: store_rows, FEATURES: store_features, ANY: store_items}[y_order]
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
    pack = PAIR[name]

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
    """Both halves of two pieces at once, transposed: each lane of four gets 8 rows of a column."""
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
