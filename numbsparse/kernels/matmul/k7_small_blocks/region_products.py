"""What a warp does with a stage: the sums of its slots += a few rows of x and dy.

A slot is 16 features of x, two pieces of 8 that may be anywhere, by B of dy. 16-bit values are
loaded by `ldmatrix`, which transposes what is stored in rows of the batch; a lane keeps the address
that it reads in a register for each slot. `region_products_tf32` is the same of float32.
"""

from functools import cache
from typing import Any

from numba import cuda, uint32

from numbsparse.kernels.matmul.k7_small_blocks.region_plan import PLACE, PLACE_BITS, Sums
from numbsparse.kernels.matmul.k7_small_blocks.region_products_tf32 import products_tf32
from numbsparse.kernels.parts.fragments import adding
from numbsparse.kernels.parts.shifted import IN_BOXES, loads_in_boxes, place_in_boxes
from numbsparse.kernels.ptx import (
    ldmatrix_x4,
    ldmatrix_x4_if,
    ldmatrix_x4_trans,
    ldmatrix_x4_trans_if,
)

X_PLACE = 0x7FFF
PIECES = 8  # of 16 bytes in 128
PARTS = (0.3, 0.55, 0.75, 1)  # of the slots, that gates may leave


@cache
def products(sums: Sums) -> tuple[Any, Any]:
    """place(code, lane) : what a lane keeps in a register of a slot's code in the plan
    add(shared, start, code, places, first, used, acc) : acc[p] += the products of slot p, with
        the rows of the stage that begins at byte `start`. The warp has `used` slots; `places` are
        those of `places_tf32` of all warps, its own from slot `first` on.
    """
    if sums.region.BOX:
        return place_in_boxes(sums), products_16_bit(sums)
    if sums.region.ITEM == 2:
        return places_16_bit(sums), products_16_bit(sums)
    return as_it_is, products_tf32(sums)


@cuda.jit(device=True)
def as_it_is(code, lane):
    return code


@cache
def places_16_bit(sums: Sums) -> Any:
    """Where a lane reads for a slot, in 16 bytes: x below 15 bits, a new column, dy above 16 bits.

    It gives a row of an 8 x 8 matrix: of x 8 rows of the batch for each of two pieces of 8
    features, then 8 rows more; of dy 16 rows for each of two pieces, or 32 rows for one.
    """
    B, DEPTH = sums.B, sums.region.DEPTH
    x_transposed, dy_transposed = sums.x_transposed, sums.dy_transposed

    @cuda.jit(device=True)
    def place(code, lane):
        x_rows = lane // 16
        x_piece = code >> (lane // 8 % 2 * PLACE_BITS) & uint32(PLACE)
        dy_rows, across = lane // 8 % 2, lane // 16
        if B == 8:
            dy_rows, across = lane // 8 % uint32(DEPTH // 8), uint32(0)
        dy_piece = (code >> uint32(2 * PLACE_BITS) & uint32(PLACE)) + across
        new = code >> uint32(3 * PLACE_BITS)
        x_at = place_within(x_piece, x_rows, lane % 8, DEPTH, x_transposed)
        dy_at = place_within(dy_piece, dy_rows, lane % 8, DEPTH, dy_transposed)
        return uint32(x_at | new << uint32(15) | dy_at << uint32(16))

    return place


@cuda.jit(device=True)
def place_within(piece, rows, r, depth, transposed):
    """Where line r of 8 x 8 values is: 8 features and the `rows`-th 8 rows of the batch.

    Transposed, lines have 32 rows of the batch, and their pieces change places by twos.
    """
    if transposed:
        return (piece * PIECES + r) * (depth // 8) + (rows ^ r // 2 % (depth // 8))
    return (piece // PIECES * depth + 8 * rows + r) * PIECES + (piece ^ r) % PIECES


@cache
def loads_16_bit(transposed: bool) -> tuple[Any, Any, Any]:
    """(load, load_if, below): the four matrices of a lane's place; the place 16 rows down."""
    BELOW = 16 * 16 * PIECES

    @cuda.jit(device=True)
    def below_rows(at):
        return at + BELOW

    @cuda.jit(device=True)
    def below_columns(at):
        """Two pieces on, in a line whose pieces are swizzled."""
        return at + 32 - cuda.threadIdx.x % 8 // 4 * 64

    if transposed:
        return ldmatrix_x4, ldmatrix_x4_if, below_columns
    return ldmatrix_x4_trans, ldmatrix_x4_trans_if, below_rows


@cache
def loads_of_x(transposed: bool) -> tuple[Any, Any]:
    """(load, load_below)(shared, stage, code, places): x of a slot, and of 16 rows down."""
    load_at, _, below = loads_16_bit(transposed)

    @cuda.jit(device=True)
    def x_at(stage, code):
        return uint32(stage + (code & uint32(X_PLACE)) * 16)

    @cuda.jit(device=True)
    def load(shared, stage, code, places):
        return load_at(shared, x_at(stage, code))

    @cuda.jit(device=True)
    def load_below(shared, stage, code, places):
        return load_at(shared, below(x_at(stage, code)))

    return load, load_below


def products_16_bit(sums: Sums) -> Any:
    """For all slots, also those that are not used; of gates, for a part of them that is enough.

    With a branch for each slot all of them took 1.4 times as long at B = 16 (H200).
    """
    SLOTS = sums.region.SLOTS
    parts = {round(part * SLOTS) for part in PARTS} - {0} if sums.gated else {SLOTS}
    return products_of_enough(sums, tuple(sorted(parts)))


@cache
def products_of_enough(sums: Sums, sizes: tuple[int, ...]) -> Any:
    """For as many slots as are enough."""
    *fewer, most = sizes
    if not fewer:
        return products_of_slots(sums, most)
    add_most, FEWER = products_of_slots(sums, most), fewer[-1]
    add_fewer = products_of_enough(sums, tuple(fewer))

    @cuda.jit(device=True)
    def add_products(shared, stage, code, places, first, used, acc):
        if used > FEWER:
            add_most(shared, stage, code, places, first, used, acc)
        else:
            add_fewer(shared, stage, code, places, first, used, acc)

    return add_products


@cache
def products_of_slots(sums: Sums, SLOTS: int) -> Any:
    """Of the first slots. code says where a lane reads."""
    B, DEPTH, add = sums.B, sums.region.DEPTH, adding(sums.arithmetic)
    NEW, DY_PLACE, DY_SHIFT = 0x8000, 0xFFFF0, 12
    load_x, load_x_below = loads_of_x(sums.x_transposed)
    if sums.region.BOX:
        load_x, load_x_below = loads_in_boxes
        NEW, DY_PLACE, DY_SHIFT = IN_BOXES
    _, load_dy_if, below_dy = loads_16_bit(sums.dy_transposed)

    @cuda.jit(device=True)
    def add_products(shared, stage, code, places, first, used, acc):
        b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = uint32(0)
        a = load_x(shared, stage, code[0], places)
        for p in range(SLOTS):
            new = uint32(code[p] & uint32(NEW))
            at = uint32(stage + (code[p] >> uint32(DY_SHIFT) & uint32(DY_PLACE)))
            b0, b1, b2, b3 = load_dy_if(shared, at, new, b0, b1, b2, b3)
            if B == 16 and DEPTH == 32:
                b4, b5, b6, b7 = load_dy_if(shared, below_dy(at), new, b4, b5, b6, b7)
            if DEPTH == 32:
                e = load_x_below(shared, stage, code[p], places)
            add(a, b0, b1, acc[p, 0])
            if B == 16:
                add(a, b2, b3, acc[p, 1])
            if p + 1 < SLOTS:
                a = load_x(shared, stage, code[p + 1], places)
            if DEPTH == 32 and B == 16:
                add(e, b4, b5, acc[p, 0])
                add(e, b6, b7, acc[p, 1])
            elif DEPTH == 32:
                add(e, b2, b3, acc[p, 0])

    return add_products
