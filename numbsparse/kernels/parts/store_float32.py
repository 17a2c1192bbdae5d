"""float32 sums to y, as `store` has it for 16 bits; summed again where a split made NaN of them.

Which rows and columns a lane has is free in what multiplies, so they are neighbours here. Four
along a row, or two along a feature, make products 1.5 to 1.7 or 1.1 times as fast with blocks of 32
and 64, and 1.06 to 1.08 times with smaller ones (H200).
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.parts.repair import nan_in, nan_in_sums, repairing_lines
from numbsparse.kernels.parts.store import (
    FEATURES,
    PACK,
    PIXELS,
    ROWS,
    Sums,
    storer,
)
from numbsparse.kernels.parts.store_pixels import storer_by_pixels
from numbsparse.kernels.ptx import (
    as_uint32,
    redux_or,
    shfl_xor,
    store_2xu32,
    store_4xf32,
    sync_warp,
)


@cache
def finishing(of: Sums, order: str, row_of: Any, neighbours: bool, gated: bool = False) -> Any:
    """finish(sums, columns, row, y, dense): of 16 bits as `store.storer`; of float32 as
    `storer_of_pairs`, and what is NaN of an exact matrix is summed again; of images as
    `store_pixels`."""
    exact = of.kind == "highest" and order != PIXELS
    repair = repairing_pairs(of, row_of, gated)
    if order == PIXELS:
        store = storer_by_pixels(of, row_of)
    elif of.kind in PACK:
        store = storer(of, order)
    else:
        store = storer_of_pairs(of, order, row_of, neighbours)

    @cuda.jit(device=True)
    def finish(sums, columns, row, y, dense):
        store(sums, columns, row, y)
        if exact:
            repair(sums, columns, row, y, dense)

    return finish


@cache
def storer_of_pairs(of: Sums, order: str, row_of: Any, neighbours: bool) -> Any:
    """store(sums, columns, row, y), as `store.storer`: a lane has the rows row_of(tile, half).

    Of every strip it has two neighbouring columns; and if `neighbours`, its rows of two tiles are
    four neighbours.
    """
    COLUMNS, TILES, B, STRIPS, NEXT = of.COLUMNS, of.TILES, of.B, of.B // 8, of.B // 2
    PAIRS, FOURS = order == ROWS, order == FEATURES and neighbours

    @cuda.jit(device=True)
    def store(sums, columns, row, y):
        values, row_stride, column_stride, batch, features = y
        for c in range(COLUMNS):
            column = columns[c]
            for m in range(TILES):
                for s in range(STRIPS):
                    for e in range(4):
                        i = ((c * TILES + m) * STRIPS + s) * 4 + e
                        n, k = row + row_of(m, e // 2), column_of_pair(column, s, e, B)
                        at = n * row_stride + k * column_stride
                        if n < batch and column >= 0 and k < features:
                            if FOURS:
                                if m % 2 == 0 and e < 2:
                                    low, high = sums[i + NEXT], sums[i + NEXT + 2]
                                    store_4xf32(values, at, sums[i], sums[i + 2], low, high)
                            elif not PAIRS:
                                values[at] = sums[i]
                            elif e % 2 == 0:
                                low, high = as_uint32(sums[i]), as_uint32(sums[i + 1])
                                store_2xu32(values, at, low, high)

    return store


@cache
def repairing_pairs(of: Sums, row_of: Any, gated: bool = False) -> Any:
    """repair(sums, columns, row, y, dense): y where `storer_of_pairs` stored NaN."""
    COUNT, TILES, STRIPS, B = of.TILES * of.STRIPS * 4, of.TILES, of.B // 8, of.B
    repair_one = repairing_lines(gated)

    @cuda.jit(device=True)
    def repair(sums, columns, row, y, dense):
        for i in range(COUNT if nan_in(sums) else 0):
            column, m = columns[i // (4 * STRIPS * TILES)], i // (4 * STRIPS) % TILES
            n, k = row + row_of(m, i % 4 // 2), column_of_pair(column, i // 4 % STRIPS, i, B)
            if n < y[3] and column >= 0 and k < y[4]:
                repair_one(y, n, k, B, dense)

    return repair


@cuda.jit(device=True)
def column_of_pair(column, strip, e, B):
    return column * int64(B) + strip * 8 + uint32(cuda.threadIdx.x) % 4 * 2 + e % 2


@cache
def storer_of_float32(order: str, row_in: Any, neighbours: bool) -> Any:
    """store(sums, row, column, y): 16 rows by 32 columns, from a row and a column on.

    Lane 4 g + q has columns 8 q to 8 q + 7 of rows row_in(0, g) and row_in(1, g): sums[n, 2 u + e]
    is column 8 q + 4 e + n of the u-th. `neighbours` says whether the two rows are neighbours.
    """
    PAIRS = order == FEATURES and neighbours

    @cuda.jit(device=True)
    def by_rows(sums, row, column, y):
        """Two lanes write four each, first one's and then the other's: whole sectors of 32
        bytes."""
        values, stride, _, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        g, q, odd = lane // 4, lane % 4, lane % 2
        one, other = cuda.local.array(4, float32), cuda.local.array(4, float32)
        k = column + q // 2 * 16 + 4 * odd
        for u in range(2):
            n = row + row_in(u, g)
            for e in range(4):
                low, high = sums[e, 2 * u], sums[e, 2 * u + 1]
                got = shfl_xor(low if odd else high, 1)
                one[e], other[e] = got if odd else low, high if odd else got
            at = n * stride + k
            if n < batch and k < features:
                store_4xf32(values, at, one[0], one[1], one[2], one[3])
            if n < batch and k + 8 < features:
                store_4xf32(values, at + 8, other[0], other[1], other[2], other[3])

    @cuda.jit(device=True)
    def by_items(sums, row, column, y):
        """Or two rows at once, where they are neighbours in memory."""
        values, row_stride, column_stride, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for u in range(1 if PAIRS else 2):
            n = row + row_in(u, lane // 4)
            for e in range(8):
                k = column + 8 * (lane % 4) + e
                if n < batch and k < features:
                    if PAIRS:
                        low, high = sums[e % 4, e // 4], sums[e % 4, e // 4 + 2]
                        store_2xu32(values, k * column_stride + n, as_uint32(low), as_uint32(high))
                    else:
                        values[n * row_stride + k * column_stride] = sums[e % 4, 2 * u + e // 4]

    return by_rows if order == ROWS else by_items


@cache
def finishing_strips(
    of: Sums, order: str, row_in: Any, neighbours: bool, B: int, gated: bool
) -> Any:
    """finish(sums, columns, row, y, dense): 16 rows by one or two strips, each of whose 32 columns
    `storer_of_float32` stores; what is NaN of exact ones is summed again.

    B : of blocks of w, of which a strip is a part
    """
    N, COLUMNS, STRIPS, exact = of.B, of.COLUMNS, of.COLUMNS * of.B // 32, of.kind == "highest"
    store, repair = storer_of_float32(order, row_in, neighbours), repairing_lines(gated)

    @cuda.jit(device=True)
    def finish(sums, columns, row, y, dense):
        for s in range(STRIPS):
            column = columns[s * 32 // N]
            if column >= 0:
                store(sums[s], int64(row), column * int64(N) + s * 32 % N, y)
        if exact and redux_or(uint32(nan_in_sums(sums))) != 0:
            sync_warp()
            for item in range(cuda.threadIdx.x % 32, 16 * N * COLUMNS, 32):
                strip = columns[COLUMNS - 1] if item >= 16 * N else columns[0]
                n, feature = int64(row) + item // N % 16, strip * int64(N) + item % N
                if strip >= 0 and n < y[3] and feature < y[4]:
                    repair(y, n, feature, B, dense)

    return finish
