"""Where a lane of k7's weight-gradient reads in boxes that taps share: see `pixels.Shared`.

Rows of a tile are anywhere in a box, and a tap shifts them by lines, whose pieces are swizzled: by
the line that is read, which a lane knows for each slot and row alone. In bytes that takes an
addition and two operations of bits.
"""

from functools import cache
from typing import Any

from numba import cuda, int64, uint32

from numbsparse.kernels.ptx import ldmatrix_x4_trans

BOX_BITS, LINE = 16, 128  # of a place in a code; bytes of a line
X_PLACE = 0x3FFF0  # bytes of what a lane keeps of a slot
IN_BOXES = 1, X_PLACE, 14  # the bit of a new column; bytes of dy, and how far they are above those


@cache
def place_in_boxes(sums: Any) -> Any:
    """place(code, lane): as `places_16_bit`. Of x the row of the batch is not known yet."""
    B, DEPTH, LINES = sums.B, sums.region.DEPTH, sums.region.LINES

    @cuda.jit(device=True)
    def place(code, lane):
        x_at = uint32(code >> int64(lane // 8 % 2 * BOX_BITS)) & uint32(0x3FFF)
        dy_piece = uint32(code >> int64(2 * BOX_BITS)) & uint32(0xFFFF)
        rows, across = lane // 8 % 2, lane // 16
        if B == 8:
            rows, across = lane // 8 % uint32(DEPTH // 8), uint32(0)
        dy_piece = uint32(dy_piece + across)
        line = uint32(dy_piece // 8 * LINES + 8 * rows + lane % 8)
        dy_at = line * uint32(8) + (dy_piece ^ lane) % 8
        new = uint32(code >> int64(3 * BOX_BITS))
        return uint32(x_at << uint32(4) | new | dy_at << uint32(18))

    return place


@cuda.jit(device=True)
def load_from(shared, stage, code, row):
    at = uint32(row + (code & uint32(X_PLACE)))
    swizzled = uint32(at ^ (at >> uint32(3) & uint32(LINE - 16)))
    return ldmatrix_x4_trans(shared, uint32(stage + swizzled))


@cuda.jit(device=True)
def load_in_box(shared, stage, code, rows):
    """x of a slot, from rows that are `rows_of_lane`."""
    return load_from(shared, stage, code, rows[0])


@cuda.jit(device=True)
def load_below_in_box(shared, stage, code, rows):
    """The same 16 rows down."""
    return load_from(shared, stage, code, rows[1])


loads_in_boxes = load_in_box, load_below_in_box


@cuda.jit(device=True)
def rows_of_lane(within, lane, rows):
    """rows = where a lane's row of a box begins, and its row 16 down, in bytes."""
    for s in range(2):
        rows[s] = uint32(within[lane // 16 * 8 + lane % 8 + 16 * s])
