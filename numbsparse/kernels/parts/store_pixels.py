"""From a warp's accumulators to pixels of images: rows of y are pixels, or squares of them.

Where each row goes is read from memory, and before the sums are there: loads wait for the stores
before them, so that to store a tile of 64 rows took eight of their latencies. Images of few
features, 64 rows of which take less than that, have 0.5 to 0.8 of the time since (H200).
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.parts.store import Sums, four_strips
from numbsparse.kernels.parts.words import PACK
from numbsparse.kernels.ptx import as_uint32, shfl_idx, store_2xu32, store_4xu32

RESIDUE_AT = 28  # see `place_in_square`


@cache
def looking(of_images: bool, COLUMNS: int, SLICE: int, SPLIT: int) -> tuple[Any, Any]:
    """look(plan, i, y, warp): what says where the i-th tile goes, or of a split sum a slice of it:
    of 64 rows two to a lane, and the block column of a lane's strip.
    placed(row, y, known): the row and the y that are stored to, then."""

    @cuda.jit(device=True)
    def nothing(plan, i, y, warp):
        return ()

    @cuda.jit(device=True)
    def as_it_is(row, y, known):
        return row, y

    @cuda.jit(device=True)
    def look(plan, i, y, warp):
        row, lane = plan.tiles[i, 1] * plan.rows, uint32(cuda.threadIdx.x) % 32
        own = row + lane + (uint32(cuda.blockIdx.x) % SPLIT * SLICE if SPLIT > 1 else uint32(0))
        column = plan.lines[plan.tiles[i, 0], warp * COLUMNS + lane % 4 // (4 // COLUMNS)]
        last = min(y[3], row + plan.rows)
        return *square_of(y[2], own, last), *square_of(y[2], own + 32, last), column

    @cuda.jit(device=True)
    def placed(row, y, known):
        return 0, (y[0], y[1], known, y[3], y[4])

    return (look, placed) if of_images else (nothing, as_it_is)


@cuda.jit(device=True)
def square_of(places, n, batch):
    """Of a row of y, which is a pixel of images or a square of them: the first one, and a bit for
    each that is inside of its image. `places` (rows, 2) has them."""
    if n < batch:
        return places[n, 0], places[n, 1]
    return int32(0), int32(0)


@cuda.jit(device=True)
def looked_up(known, row):
    """`square_of` a row of the tile, for each lane its own."""
    lane, second = uint32(row) % 32, row >= 32
    pixel, inside = shfl_idx(known[0], lane), shfl_idx(known[1], lane)
    behind, inside_behind = shfl_idx(known[2], lane), shfl_idx(known[3], lane)
    return int64(behind if second else pixel), inside_behind if second else inside


@cuda.jit(device=True)
def place_in_square(column, inside, B):
    """Whether a block column is inside, and where it begins in the square.

    A block column is the number of its pixel among those of a square, from bit RESIDUE_AT on, and
    how many blocks it is behind the first pixel; negative where there is none.
    """
    there = column >= 0 and inside >> (column >> RESIDUE_AT) & 1 == 1
    return there, int64(column & ((1 << RESIDUE_AT) - 1)) * B


@cache
def storer_by_pixels(of: Sums, row_of: Any) -> Any:
    """store(sums, columns, row, y): as `store.storer` by rows, or of float32 as
    `store_float32.storer_of_pairs`; y is (values, features of a pixel, what was looked up)."""
    return four_strips_by_pixels(of) if of.kind in PACK else pairs_by_pixels(of, row_of)


def four_strips_by_pixels(of: Sums) -> Any:
    TILES, APART, B, four, A_COLUMN = of.TILES, of.APART, of.B, four_strips(of), of.B // 8

    @cuda.jit(device=True)
    def store(sums, columns, row, y):
        values, features, known, _, _ = y
        lane = uint32(cuda.threadIdx.x) % 32
        for tile in range(TILES):
            for half in range(2):
                pixel, inside = looked_up(known, row + APART * tile + 8 * half + lane // 4)
                a, b, c, d = four(sums, tile, 0, half)
                there, k = place_in_square(known[4], inside, B)
                if there:
                    at = pixel * features + k + lane % A_COLUMN * 8
                    store_4xu32(values, at, a, b, c, d)

    return store


def pairs_by_pixels(of: Sums, row_of: Any) -> Any:
    COLUMNS, TILES, STRIPS, B = of.COLUMNS, of.TILES, of.B // 8, of.B

    @cuda.jit(device=True)
    def store(sums, columns, row, y):
        values, features, known, _, _ = y
        own, column = uint32(cuda.threadIdx.x) % 4 * 2, cuda.local.array(COLUMNS, int32)
        for c in range(COLUMNS):
            column[c] = shfl_idx(known[4], uint32(c * 4 // COLUMNS))
        for m in range(TILES):
            for half in range(2):
                pixel, inside = looked_up(known, row + row_of(m, half))
                for c in range(COLUMNS):
                    there, k = place_in_square(column[c], inside, B)
                    for s in range(STRIPS):
                        i = ((c * TILES + m) * STRIPS + s) * 4 + 2 * half
                        low, high = as_uint32(sums[i]), as_uint32(sums[i + 1])
                        if there:
                            store_2xu32(values, pixel * features + k + s * 8 + own, low, high)

    return store
