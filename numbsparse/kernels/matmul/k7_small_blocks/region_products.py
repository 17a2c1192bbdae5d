"""What a warp does with a stage: the sums of its slots += a few rows of x and dy."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint32

from numbsparse.kernels.matmul.k7_small_blocks.region import Region, Turned
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import PLACE_BITS
from numbsparse.kernels.matmul.k7_small_blocks.strip_products import MMA
from numbsparse.kernels.ptx import (
    ldmatrix_x4,
    ldmatrix_x4_if,
    ldmatrix_x4_trans,
    ldmatrix_x4_trans_if,
)

LINE = 8  # pieces of a line of 128 bytes, and lines of a piece


@cache
def places_of_lane(B: int, region: Region, turned: Turned) -> Any:
    """Where a lane reads for a slot, in 16 bytes: x below 15 bits, a new column, dy above 16 bits.

    It gives a row of an 8 x 8 matrix: of x 8 rows of the batch for each of two pieces of 8
    features, then 8 rows more; of dy 16 rows for each of two pieces, or 32 rows for one.
    """
    DEPTH, PLACE = region.DEPTH, (1 << PLACE_BITS) - 1
    x_within, dy_within = within(region, turned.x), within(region, turned.dy)

    @cuda.jit(device=True)
    def place(code, lane):
        x_rows = lane // 16
        x_piece = code >> (lane // 8 % 2 * PLACE_BITS) & uint32(PLACE)
        dy_rows, across = lane // 8 % 2, lane // 16
        if B == 8:
            dy_rows, across = lane // 8 % uint32(DEPTH // 8), uint32(0)
        dy_piece = (code >> uint32(2 * PLACE_BITS) & uint32(PLACE)) + across
        new = code >> uint32(3 * PLACE_BITS)
        x_at = x_within(x_piece, x_rows, lane % 8)
        dy_at = dy_within(dy_piece, dy_rows, lane % 8)
        return uint32(x_at | new << uint32(15) | dy_at << uint32(16))

    return place


@cache
def within(region: Region, turned: bool) -> Any:
    """Where line r of 8 x 8 values stands: 8 features and the `rows`-th 8 rows of the batch."""
    DEPTH = region.DEPTH

    @cuda.jit(device=True)
    def in_rows(piece, rows, r):
        """Turned over by `ldmatrix`; the pieces of a line are swizzled."""
        return (piece // LINE * DEPTH + 8 * rows + r) * LINE + (piece ^ r) % LINE

    @cuda.jit(device=True)
    def in_columns(piece, rows, r):
        """As they lie: lines of 32 rows of the batch, swizzled by twos."""
        return (piece * LINE + r) * (DEPTH // 8) + (rows ^ r // 2 % (DEPTH // 8))

    return in_columns if turned else in_rows


@cache
def loads(turned: bool) -> tuple[Any, Any, Any]:
    """(load, load_if, below): the four matrices of a lane's place; the place 16 rows down."""
    BELOW = 16 * 16 * LINE

    @cuda.jit(device=True)
    def below_rows(at):
        return at + BELOW

    @cuda.jit(device=True)
    def below_columns(at):
        """Two pieces on, in a line whose pieces are swizzled."""
        return at + 32 - cuda.threadIdx.x % 8 // 4 * 64

    if turned:
        return ldmatrix_x4, ldmatrix_x4_if, below_columns
    return ldmatrix_x4_trans, ldmatrix_x4_trans_if, below_rows


@cache
def products(B: int, name: str, region: Region, turned: Turned) -> Any:
    """acc += x.T @ dy of the stage that begins at byte `stage`: 16 features of x by B of dy a slot.

    acc holds B / 2 sums of a slot in a lane; code says where it reads, see `places_of_lane`.
    """
    SLOTS, DEPTH, SUMS = region.SLOTS, region.DEPTH, B // 2
    X_PLACE, NEW, DY_PLACE = 0x7FFF, 0x8000, 0xFFFF0
    mma = MMA[name]
    (load_x, _, below_x), (_, load_dy_if, below_dy) = loads(turned.x), loads(turned.dy)

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
        a0, a1, a2, a3 = load_x(shared, x_at(stage, code[0]))
        for p in range(SLOTS):
            new = uint32(code[p] & uint32(NEW))
            at = uint32(stage + (code[p] >> uint32(12) & uint32(DY_PLACE)))
            b0, b1, b2, b3 = load_dy_if(shared, at, new, b0, b1, b2, b3)
            if B == 16 and DEPTH == 32:
                b4, b5, b6, b7 = load_dy_if(shared, below_dy(at), new, b4, b5, b6, b7)
            if DEPTH == 32:
                e0, e1, e2, e3 = load_x(shared, below_x(x_at(stage, code[p])))
            add(acc, p * SUMS, a0, a1, a2, a3, b0, b1)
            if B == 16:
                add(acc, p * SUMS + 4, a0, a1, a2, a3, b2, b3)
            if p + 1 < SLOTS:
                a0, a1, a2, a3 = load_x(shared, x_at(stage, code[p + 1]))
            if DEPTH == 32 and B == 16:
                add(acc, p * SUMS, e0, e1, e2, e3, b4, b5)
                add(acc, p * SUMS + 4, e0, e1, e2, e3, b6, b7)
            elif DEPTH == 32:
                add(acc, p * SUMS, e0, e1, e2, e3, b2, b3)

    return add_products
