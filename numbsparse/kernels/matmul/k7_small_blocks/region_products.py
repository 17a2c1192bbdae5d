"""What a warp does with a stage: the sums of its slots += a few rows of x and dy."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint32

from numbsparse.kernels.matmul.k7_small_blocks.card import MMA
from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import PLACE_BITS
from numbsparse.kernels.ptx import ldmatrix_x4_trans, ldmatrix_x4_trans_if

LINE = 8  # pieces, 128 bytes: what a group has of a row of the batch


@cache
def places_of_lane(B: int, region: Region) -> Any:
    """Where a lane reads for a slot, in pieces: x below 15 bits, a new column, dy above 16 bits.

    It gives a row of an 8 x 8 matrix that is turned over: of x 8 rows of the batch for each of two
    pieces, then 8 rows more; of dy 16 rows for each of two pieces, or 32 rows for one.
    """
    DEPTH, PLACE = region.DEPTH, (1 << PLACE_BITS) - 1

    @cuda.jit(device=True)
    def within(piece, row):
        """The pieces of a line are swizzled."""
        return (piece // LINE * DEPTH + row) * LINE + (piece ^ row) % LINE

    @cuda.jit(device=True)
    def place(code, lane):
        x_row = lane % 8 + lane // 16 * 8
        x_piece = code >> (lane // 8 % 2 * PLACE_BITS) & uint32(PLACE)
        dy_row, across = (lane % 16, lane // 16) if B == 16 else (lane % DEPTH, uint32(0))
        dy_piece = (code >> uint32(2 * PLACE_BITS) & uint32(PLACE)) + across
        new = code >> uint32(3 * PLACE_BITS)
        x_at, dy_at = within(x_piece, x_row), within(dy_piece, dy_row)
        return uint32(x_at | new << uint32(15) | dy_at << uint32(16))

    return place


@cache
def products(B: int, name: str, region: Region) -> Any:
    """acc += x.T @ dy of the stage that begins at byte `stage`: 16 features of x by B of dy a slot.

    acc holds B / 2 sums of a slot in a lane; code says where it reads, see `places_of_lane`.
    """
    SLOTS, DEPTH, SUMS = region.SLOTS, region.DEPTH, B // 2
    BELOW = 16 * 16 * LINE  # 16 rows down
    X_PLACE, NEW, DY_PLACE = 0x7FFF, 0x8000, 0xFFFF0
    mma = MMA[name]

    @cuda.jit(device=True)
    def add(acc, i, a0, a1, a2, a3, b0, b1):
        acc[i], acc[i + 1], acc[i + 2], acc[i + 3] = mma(
            a0, a1, a2, a3, b0, b1, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]
        )

    @cuda.jit(device=True)
    def x_at(stage, code):
        return uint32(stage + (code & uint32(X_PLACE)) * 16)

    @cuda.jit(device=True)
    def add_products(shared, code, stage, acc):
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = uint32(0)
        a0, a1, a2, a3 = ldmatrix_x4_trans(shared, x_at(stage, code[0]))
        for p in range(SLOTS):
            new = uint32(code[p] & uint32(NEW))
            at = uint32(stage + (code[p] >> uint32(12) & uint32(DY_PLACE)))
            b0, b1, b2, b3 = ldmatrix_x4_trans_if(shared, at, new, b0, b1, b2, b3)
            if B == 16 and DEPTH == 32:
                b4, b5, b6, b7 = ldmatrix_x4_trans_if(shared, at + BELOW, new, b4, b5, b6, b7)
            if DEPTH == 32:
                e0, e1, e2, e3 = ldmatrix_x4_trans(shared, x_at(stage, code[p]) + BELOW)
            add(acc, p * SUMS, a0, a1, a2, a3, b0, b1)
            if B == 16:
                add(acc, p * SUMS + 4, a0, a1, a2, a3, b2, b3)
            if p + 1 < SLOTS:
                a0, a1, a2, a3 = ldmatrix_x4_trans(shared, x_at(stage, code[p + 1]))
            if DEPTH == 32 and B == 16:
                add(acc, p * SUMS, e0, e1, e2, e3, b4, b5)
                add(acc, p * SUMS + 4, e0, e1, e2, e3, b6, b7)
            elif DEPTH == 32:
                add(acc, p * SUMS, e0, e1, e2, e3, b2, b3)

    return add_products
