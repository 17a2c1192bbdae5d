"""float32 sums to y, as `store` has it for 16 bits; summed again where a split made NaN of them.

A lane has two neighbours of a row, and four lanes a sector of 32 bytes. Which rows it has is free
in what multiplies, so of feature-major x they are neighbours too.
"""

from functools import cache
from typing import Any

from numba import cuda, int64, uint32, uint64

from numbsparse.kernels.parts.repair import nan_in, repairing_lines
from numbsparse.kernels.parts.store import (
    FEATURES,
    LINES,
    PIXELS,
    ROWS,
    Sums,
    exchanged,
    storer,
    transposed,
)
from numbsparse.kernels.parts.store_pixels import storer_by_pixels
from numbsparse.kernels.parts.words import PACK
from numbsparse.kernels.ptx import as_uint32, store_2xu32, store_4xf32, sync_warp


@cache
def finishing(
    of: Sums, order: str, row_of: Any, neighbours: bool, gated: bool = False, size: int = 0
) -> Any:
    """finish(sums, columns, row, y, dense): of 16 bits as `store.storer`; of float32 as
    `storer_of_pairs`, and what is NaN of an exact matrix is summed again; of images as
    `store_pixels`.

    size : of blocks of w, where block columns of `of` are parts of theirs
    """
    exact, BY_OTHERS = of.kind == "highest" and order != PIXELS, order == LINES
    repair = repairing_pairs(of, row_of, gated, size or of.B)
    if order == PIXELS:
        store = storer_by_pixels(of, row_of)
    elif of.kind in PACK:
        store = storer(of, order)
    elif order == LINES:
        store = storer_of_lines(of, row_of)
    else:
        store = storer_of_pairs(of, order, row_of, neighbours)

    @cuda.jit(device=True)
    def finish(sums, columns, row, y, dense):
        store(sums, columns, row, y)
        if exact and BY_OTHERS:  # lanes have stored what they exchanged
            sync_warp()
        if exact:
            repair(sums, columns, row, y, dense)

    return finish


@cache
def storer_of_pairs(of: Sums, order: str, row_of: Any, neighbours: bool) -> Any:
    """store(sums, columns, row, y), as `store.storer`: a lane has the rows row_of(tile, half).

    Of every strip it has two neighbouring columns; and if `neighbours`, its two rows are that, or
    those of two tiles are four neighbours.
    """
    COLUMNS, TILES, B, STRIPS, NEXT = of.COLUMNS, of.TILES, of.B, of.B // 8, of.B // 2
    PAIRS, TWOS = order == ROWS, order == FEATURES and neighbours
    FOURS = TWOS and TILES > 1

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
                            elif TWOS:
                                if e < 2:
                                    low, high = as_uint32(sums[i]), as_uint32(sums[i + 2])
                                    store_2xu32(values, at, low, high)
                            elif not PAIRS:
                                values[at] = sums[i]
                            elif e % 2 == 0:
                                low, high = as_uint32(sums[i]), as_uint32(sums[i + 1])
                                store_2xu32(values, at, low, high)

    return store


@cache
def storer_of_lines(of: Sums, row_of: Any) -> Any:
    """The same to lines that begin anywhere: lanes exchange columns for rows, so that a warp stores
    neighbours of few columns, one value each.

    Where a lane has rows of two tiles it gets one of these four in four columns, else one of two in
    two.
    """
    COLUMNS, TILES, B, STRIPS, NEXT = of.COLUMNS, of.TILES, of.B, of.B // 8, of.B // 2
    FOURS, STEP = TILES % 2 == 0, 1 + (TILES + 1) % 2

    @cuda.jit(device=True)
    def store(sums, columns, row, y):
        values, row_stride, column_stride, batch, features = y
        q = uint32(cuda.threadIdx.x) % 4
        tile, first = (q // 2, uint32(0)) if FOURS else (uint32(0), 2 * (q & uint32(2)))
        for c in range(COLUMNS):
            for m in range(0, TILES, STEP):
                n = int64(row) + row_of(m + tile, q % 2)
                k = int64(columns[c]) * B + first
                left = features - k if columns[c] >= 0 and n < batch else int64(0)
                at = n * row_stride + k * column_stride
                for s in range(STRIPS):
                    for e in range(2):
                        i = ((c * TILES + m) * STRIPS + s) * 4 + e
                        if FOURS:
                            low, high = sums[i + NEXT], sums[i + NEXT + 2]
                            found = transposed(sums[i], sums[i + 2], low, high)
                        else:
                            found = exchanged(sums[i], sums[i + 2], q % 2, 1)
                        for j in range(len(found)):
                            if 8 * s + e + 2 * j < left:
                                values[uint64(at + (2 * j) * column_stride)] = found[j]
                        at += column_stride if e == 0 else 7 * column_stride

    return store


@cache
def repairing_pairs(of: Sums, row_of: Any, gated: bool, size: int) -> Any:
    """repair(sums, columns, row, y, dense): y where `storer_of_pairs` stored NaN."""
    COUNT, TILES, STRIPS, B = of.TILES * of.STRIPS * 4, of.TILES, of.B // 8, of.B
    repair_one, LAST, A_COLUMN = repairing_lines(gated), of.COLUMNS - 1, 4 * STRIPS * TILES

    @cuda.jit(device=True)
    def repair(sums, columns, row, y, dense):
        for i in range(COUNT if nan_in(sums) else 0):
            column = columns[0] if i < A_COLUMN else columns[LAST]
            if LAST > 1:  # of two they stay in registers
                column = columns[i // A_COLUMN]
            m = i // (4 * STRIPS) % TILES
            n, k = row + row_of(m, i % 4 // 2), column_of_pair(column, i // 4 % STRIPS, i, B)
            if n < y[3] and column >= 0 and k < y[4]:
                repair_one(y, n, k, size, dense)

    return repair


@cuda.jit(device=True)
def column_of_pair(column, strip, e, B):
    return column * int64(B) + strip * 8 + uint32(cuda.threadIdx.x) % 4 * 2 + e % 2
