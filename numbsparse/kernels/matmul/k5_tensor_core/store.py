"""From the sums of a warp, (TA, TB, 4), to y."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint16, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.parts.fragments import MMA, PACK, column_of, row_of
from numbsparse.kernels.parts.fragments_tf32 import coordinates
from numbsparse.kernels.parts.store import ROWS
from numbsparse.kernels.parts.store_float32 import storer_of_float32
from numbsparse.kernels.ptx import store_4xf32
from numbsparse.kernels.views import span


def stored(y: DeviceArray) -> tuple[DeviceArray, bool, bool]:
    """y as one axis, whether that is of y.T, and whether several values may be stored at once.

    16-bit values go by pairs, float32 by fours, if memory allows.
    """
    transposed = not y.is_contiguous
    y = y.T if transposed else y
    least = BYTES if y.itemsize == 4 else 4
    wide = y.shape[1] * y.itemsize % least == 0 and y.address % least == 0
    y = span(y)
    if wide and y.itemsize == 2:
        y = DeviceArray(y.address, (y.size // 2,), np.uint32, None, y.owner)
    return y, transposed, wide


def store(arithmetic: str, TA: int, TB: int, transposed: bool, wide: bool) -> Any:
    """store_tile(acc, y, top, left, rows, columns), as `stored` gives y."""
    if arithmetic in MMA:
        return store_16(arithmetic, TA, TB, wide)
    return store_float32(TA, TB, transposed, wide)


@cache
def store_16(dtype: str, TA: int, TB: int, wide: bool, whole: bool = False) -> Any:
    """y[top + ., left + .] = acc, where that is before the edges; y is of one axis.

    Two neighbours at once where `wide`: then y is of uint32, a pair each. No edges: `whole`.
    """
    pack = PACK[dtype]

    @cuda.jit(device=True)
    def store_tile(acc, y, top, left, rows, columns):
        lane = uint32(cuda.threadIdx.x) % 32
        for m in range(TA):
            for n in range(TB):
                for h in range(2):
                    row = top + 16 * m + row_of(lane, 2 * h)
                    column = left + 8 * n + column_of(lane, 0)
                    pair = pack(acc[m, n, 2 * h], acc[m, n, 2 * h + 1])
                    at = row * columns + column
                    if whole or (row < rows and column < columns):
                        if wide:
                            y[uint64(at >> 1)] = pair
                        else:
                            y[uint64(at)] = uint16(pair & uint32(0xFFFF))
                            if whole or column + 1 < columns:
                                y[uint64(at + 1)] = uint16(pair >> uint32(16))

    return store_tile


@cache
def store_float32(TA: int, TB: int, transposed: bool, wide: bool, whole: bool = False) -> Any:
    """y[top + ., left + .] = acc, where that is before the edges; transposed, y[left + ., top + .].

    y is of one axis. Four neighbours at once where `wide` and a lane holds four. No edges: `whole`.
    """
    row_in, column_in = coordinates(2 * TA), coordinates(TB)
    if wide and not transposed and not whole and TB == 4:
        return store_rows(TA, row_in)
    down = wide and transposed and TA % 2 == 0
    across = wide and not transposed and TB % 4 == 0

    @cuda.jit(device=True)
    def store_tile(acc, y, top, left, rows, columns):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    row = top + row_in(2 * m + i // 2, g)
                    column = left + column_in(n, 2 * q + i % 2)
                    at = column * rows + row if transposed else row * columns + column
                    if whole or (row < rows and column < columns):
                        if across:
                            if n % 4 == 0:
                                a, b, c = acc[m, n + 1, i], acc[m, n + 2, i], acc[m, n + 3, i]
                                store_4xf32(y, at, acc[m, n, i], a, b, c)
                        elif down:
                            if m % 2 == 0 and i < 2:
                                a, b, c = acc[m, n, i + 2], acc[m + 1, n, i], acc[m + 1, n, i + 2]
                                store_4xf32(y, at, acc[m, n, i], a, b, c)
                        else:
                            y[uint64(at)] = acc[m, n, i]

    return store_tile


def store_rows(TA: int, row_in: Any) -> Any:
    """`store` of 32 columns: a lane holds eight neighbours of a row.

    With more columns their exchange between lanes costs more than it saves.
    """
    store_16_rows = storer_of_float32(ROWS, row_in, False)

    @cuda.jit(device=True)
    def store_tile(acc, y, top, left, rows, columns):
        for m in range(TA):
            row, into = top + row_in(2 * m, 0), (y, columns, 1, rows, columns)
            store_16_rows(acc[m], row, left, into)

    return store_tile
