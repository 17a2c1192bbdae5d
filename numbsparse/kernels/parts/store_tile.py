"""From the sums of a warp, (TA, TB, 4), to rows of y, wherever these are.

Sums are those of `fragments.products`, which says in `coordinates` what a lane has.
"""

from functools import cache
from typing import Any

from numba import cuda, int64, uint16, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.parts.fragments import MMA, coordinates
from numbsparse.kernels.parts.words import PACK
from numbsparse.kernels.ptx import store_4xf32


def stored(y: DeviceArray) -> tuple[DeviceArray, bool, bool]:
    """y as one axis, whether that is of y.T, and whether several values may be stored at once.

    16-bit values go by pairs, as uint32, and float32 by fours, if memory allows: a product is 1.3
    and 1.09 times as fast then (k5 on an H200).
    """
    transposed = not y.is_contiguous
    y = y.T if transposed else y
    least = BYTES if y.itemsize == 4 else 4
    wide = y.shape[-1] * y.itemsize % least == 0 and y.address % least == 0
    flat = y.span
    if wide and y.itemsize == 2:
        flat = flat.view("uint32")
    return flat, transposed, wide


@cache
def rows_from(arithmetic: str, TA: int) -> Any:
    """row_at((top, rows), u, g): line g of unit u, below row `top`; -1 from `rows` on."""
    row_in = coordinates(arithmetic, 2 * TA)

    @cuda.jit(device=True)
    def row_at(where, u, g):
        row = where[0] + row_in(u, g)
        return row if row < where[1] else int64(-1)

    return row_at


@cache
def store_tile(arithmetic: str, TA: int, TB: int, wide: bool, row_at: Any) -> Any:
    """store(acc, y, where, left, columns): y[row, left + .] = acc, of `columns` columns.

    row_at(where, u, g) is the row of line g of unit u, below 0 where there is none. y is of one
    axis; `wide`, as `stored` gives it, and no row ends within what is stored at once.
    """
    if wide and arithmetic not in MMA and TB % 4 == 0:
        return store_fours(TA, TB, row_at)
    store_two = storing_two(arithmetic, TB, wide)

    @cuda.jit(device=True)
    def store(acc, y, where, left, columns):
        for m in range(TA):
            for h in range(2):
                row = row_at(where, 2 * m + h, uint32(cuda.threadIdx.x) % 32 // 4)
                if row >= 0:
                    for n in range(TB):
                        store_two(acc[m, n, 2 * h], acc[m, n, 2 * h + 1], n, y, row, left, columns)

    return store


@cache
def storing_two(arithmetic: str, TB: int, wide: bool) -> Any:
    """store(a, b, n, y, row, left, columns): both sums of a lane in a row of the n-th 8 columns."""
    column_in = coordinates(arithmetic, TB)
    pack: Any = PACK.get(arithmetic)

    @cuda.jit(device=True)
    def store_pair(a, b, n, y, row, left, columns):
        first, pair = left + uint32(cuda.threadIdx.x) % 4 * 2, pack(a, b)
        column, at = first + 8 * n, row * columns + first
        if column < columns:
            if wide:
                y[uint64((at >> 1) + 4 * n)] = pair
            else:
                at += 8 * n
                y[uint64(at)] = uint16(pair & uint32(0xFFFF))
                if column + 1 < columns:
                    y[uint64(at + 1)] = uint16(pair >> uint32(16))

    @cuda.jit(device=True)
    def store_values(a, b, n, y, row, left, columns):
        q = uint32(cuda.threadIdx.x) % 4
        for i in range(2):
            column = left + column_in(n, 2 * q + i)
            if column < columns:
                y[uint64(row * columns + column)] = b if i else a

    return store_pair if pack else store_values


def store_fours(TA: int, TB: int, row_at: Any) -> Any:
    """`store_tile` of float32, of whose columns a lane holds four neighbours."""
    column_in = coordinates("highest", TB)

    @cuda.jit(device=True)
    def store(acc, y, where, left, columns):
        lane = uint32(cuda.threadIdx.x) % 32
        for m in range(TA):
            for h in range(2):
                row = row_at(where, 2 * m + h, lane // 4)
                for i in range(2 * h, 2 * h + 2):
                    for n in range(0, TB, 4):
                        column = left + column_in(n, lane % 4 * 2 + i % 2)
                        if row >= 0 and column < columns:
                            a, b, c = acc[m, n + 1, i], acc[m, n + 2, i], acc[m, n + 3, i]
                            store_4xf32(y, row * columns + column, acc[m, n, i], a, b, c)

    return store
