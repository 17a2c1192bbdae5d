"""What the kernel of a line does for each arithmetic, behind the same few names."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import cuda, float32, uint16

from numbsparse.kernels.matmul.k5_tensor_core import halves, singles
from numbsparse.kernels.matmul.k5_tensor_core.fetches import Tile, fetch_blocks, slots_of


class Shape(NamedTuple):
    """What a kernel is made for."""

    B: int
    tile: Tile
    arithmetic: str  # "float16", "bfloat16", or the precision of float32
    turned: bool  # w, for the input-gradient
    x_turned: bool  # x is feature-major
    y_turned: bool
    wide: bool  # y can be stored several values at once
    edge: bool  # features of x end inside their last block


class Recipe(NamedTuple):
    """The parts of a kernel; a warp owns TA x TB results of 16 x 8 in each column of blocks."""

    TA: int
    TB: int
    swapped: bool  # results lie (features, batch) in registers; else (batch, features)
    item: Any  # dtype of shared memory
    piece: int  # items in 16 bytes
    slot: int  # items of a part of a block of w
    x_places: Any  # see `swizzle`
    begin_x: Any  # (line, piece) -> where a lane begins in the tile of x
    begin_w: Any  # () -> where it begins in a slot
    add_products: Any  # (ring, x_at, w_at, acc)
    fetch_w: Any  # see `fetches.fetch_blocks`
    store: Any  # (acc, y, top, left, rows, columns)


def recipe_of(shape: Shape) -> Recipe:
    return _of_halves(shape) if shape.arithmetic in halves.MMA else _of_singles(shape)


def sides_of(shape: Shape, piece: int) -> tuple[tuple[int, bool], tuple[int, bool]]:
    """Of the tile of x and of a slot of w: pieces in a line, and whether the sum runs along it."""
    along_batch, along_features = shape.tile.BM // piece, shape.tile.BK // piece
    x_side = (along_batch, False) if shape.x_turned else (along_features, True)
    return x_side, (slots_of(shape.B, shape.tile, shape.turned).WIDTH // piece, shape.turned)


def _of_halves(shape: Shape) -> Recipe:
    tile, slots = shape.tile, slots_of(shape.B, shape.tile, shape.turned)
    rows, across = tile.BM // tile.warps, tile.BN // slots.COLUMNS
    x_side, w_side = sides_of(shape, halves.PIECE)
    x_places, w_places = halves.places(x_side[0]), halves.places(w_side[0])
    # A lane holds neighbours along the columns of a result: those are to be neighbours in memory.
    swapped = shape.y_turned
    TA, TB = (across // 16, rows // 8) if swapped else (rows // 16, across // 8)
    first, second = (w_side, x_side) if swapped else (x_side, w_side)
    begin_a, begin_b, add = halves.products(shape.arithmetic, TA, TB, slots.DEPTH, *first, *second)
    begin_x, begin_in_w = (begin_b, begin_a) if swapped else (begin_a, begin_b)

    @cuda.jit(device=True)
    def add_swapped(ring, x_at, w_at, acc):
        add(ring, w_at, x_at, acc)

    @cuda.jit(device=True)
    def begin_w():
        return begin_in_w(0, 0)

    return Recipe(
        TA,
        TB,
        swapped,
        uint16,
        halves.PIECE,
        slots.size,
        x_places,
        begin_x,
        begin_w,
        add_swapped if swapped else add,
        fetch_blocks(tile, slots, shape.B, shape.turned, shape.edge, halves.PIECE, w_places),
        halves.store(shape.arithmetic, TA, TB, shape.wide),
    )


def _of_singles(shape: Shape) -> Recipe:
    tile, slots = shape.tile, slots_of(shape.B, shape.tile, shape.turned)
    TA, TB = tile.BM // tile.warps // 16, tile.BN // slots.COLUMNS // 8
    x_side, w_side = sides_of(shape, singles.PIECE)
    x_places = singles.places(*x_side, 2 * TA, slots.DEPTH)
    w_places = singles.places(*w_side, TB, slots.DEPTH)
    begin_x, begin_in_w, add = singles.products(
        shape.arithmetic, TA, TB, slots.DEPTH, *x_side, *w_side
    )

    @cuda.jit(device=True)
    def begin_w():
        return begin_in_w(0, 0)

    return Recipe(
        TA,
        TB,
        False,
        float32,
        singles.PIECE,
        slots.size,
        x_places,
        begin_x,
        begin_w,
        add,
        fetch_blocks(tile, slots, shape.B, shape.turned, shape.edge, singles.PIECE, w_places),
        singles.store(TA, TB, shape.y_turned, shape.wide),
    )
