"""How a lane reads x for strips of float32: lane 4 g + q takes 8 of 64 rows, and of every piece of
8 features the q-th and the (q + 4)-th.

Of batch-major x `ldmatrix` brings four neighbours of a row to the four lanes that hold it. Of
feature-major x, 32 rows of the batch to a line, a lane reads four of a feature at once: its rows
are then four and four neighbours, where else they are g and g + 8 of each 16.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from numbsparse.kernels.ptx import ldmatrix_x4, load_4xu32

LINE = 128  # bytes, for either order
BOX = 32 * LINE  # bytes of 32 features by 32 rows of the batch


class Rows(NamedTuple):
    """begin(start): where a lane reads in the first group.
    find(lines, place): where in that of a step, whose place counts 32 bytes for a piece.
    load(shared, at, m, x): x[m % 2] = the registers of an mma, of the m-th 16 rows.
    row_of(m, half): which row of 64 its upper row is in that mma, and its lower one.
    """

    begin: Any
    find: Any
    load: Any
    row_of: Any


@cache
def rows_of(x_turned: bool) -> Rows:
    return turned_rows() if x_turned else plain_rows()


def plain_rows() -> Rows:
    @cuda.jit(device=True)
    def begin(start):
        """A lane names a row of four values: 16 rows, then their next four."""
        return uint32(start + cuda.threadIdx.x % 16 * LINE)

    @cuda.jit(device=True)
    def find(lines, place):
        lane = uint32(cuda.threadIdx.x) % 32
        half, turn = lane // 16 * 16, lane % 8 * 16  # the pieces of a line are swizzled
        return uint32(lines + (place + half ^ turn))

    @cuda.jit(device=True)
    def load(shared, at, m, x):
        v = ldmatrix_x4(shared, at + m * (16 * LINE))
        x[m % 2, 0], x[m % 2, 1], x[m % 2, 2], x[m % 2, 3] = v

    @cuda.jit(device=True)
    def row_of(m, half):
        return uint32(cuda.threadIdx.x) % 32 // 4 + 16 * m + 8 * half

    return Rows(begin, find, load, row_of)


def turned_rows() -> Rows:
    @cuda.jit(device=True)
    def four_of(g):
        """Which four rows of 32 a lane has: such that eight lanes meet in no bank."""
        return g % 2 * 4 + g // 2

    @cuda.jit(device=True)
    def begin(start):
        return uint32(start + cuda.threadIdx.x % 4 * LINE)

    @cuda.jit(device=True)
    def find(lines, place):
        # 8 features are 8 lines here, 1024 bytes.
        return uint32(lines + place + (place & uint32(3 * 32)) * 31)

    @cuda.jit(device=True)
    def load(shared, at, m, x):
        if m % 2 == 0:  # of 32 rows at once
            lane, box = uint32(cuda.threadIdx.x) % 32, at + m // 2 * BOX
            piece = uint32((four_of(lane // 4) ^ lane % 4) * 16)
            a = load_4xu32(shared, box + piece)
            b = load_4xu32(shared, box + 4 * LINE + (piece ^ uint32(4 * 16)))  # four features on
            for u in range(2):
                x[u, 0], x[u, 1], x[u, 2], x[u, 3] = a[2 * u], a[2 * u + 1], b[2 * u], b[2 * u + 1]

    @cuda.jit(device=True)
    def row_of(m, half):
        lane = uint32(cuda.threadIdx.x) % 32
        return 32 * (m // 2) + 4 * four_of(lane // 4) + 2 * (m % 2) + half

    return Rows(begin, find, load, row_of)
