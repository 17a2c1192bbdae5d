"""Tiles of swizzled lines: loaded by the copy engine, and read as the registers of an mma.

A tile is lines of 32, 64 or 128 bytes, whose pieces of 16 bytes are exchanged by the address of the
line (`ptx.tiles.swizzled`), so that neither a line nor a column of pieces hits a bank twice. A line
holds neighbouring features of a row of the batch; or, where the operand is transposed
(feature-major), neighbouring rows of the batch for one feature.

Of boxes of pixels that taps share, rows of a tile are anywhere, and a tap shifts them by lines,
whose pieces are swizzled by the line that is read, which a lane knows for each slot and row alone.
In bytes that takes an addition and two operations of bits.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.ptx import (
    ldmatrix_x4,
    ldmatrix_x4_trans,
    load_4xu32,
    tma_load_2d,
    tma_load_2d_multicast,
    tma_load_3d,
    tma_load_3d_multicast,
)
from numbsparse.kernels.ptx.tiles import swizzled

PERIOD = 1024  # bytes after which the exchanges repeat
PIECE = 8  # features that stay together: those of an 8 x 8 matrix
LINE = 128  # bytes of a transposed tile's line
# Of a region's slots in boxes that taps share (`pixels.Shared`): bits of a place in a code; bytes
# of what a lane keeps; the bit of a new column, bytes of dy, and how far they are above those.
BOX_BITS, X_PLACE = 16, 0x3FFF0
IN_BOXES = 1, X_PLACE, 14

place_of_byte = cuda.jit(device=True)(swizzled)


def box_of(rows: int, features: int, transposed: bool) -> tuple[int, int]:
    """The box of `rows` by `features` of x; transposed, of x (features, batch)."""
    return (features, rows) if transposed else (rows, features)


@cache
def load_for(transposed: bool, cluster: int = 1) -> Any:
    """Request the box of such a map that begins at a feature and a row, for all of a cluster."""
    RANKS = (1 << cluster) - 1

    @cuda.jit(device=True)
    def load(shared, to, x_map, feature, row, bars, stage):
        column, line = (row, feature) if transposed else (feature, row)
        if cluster == 1:
            tma_load_2d(shared, to, x_map, column, line, bars, stage)
        else:
            tma_load_2d_multicast(shared, to, x_map, column, line, bars, stage, RANKS)

    return load


@cache
def load_boxes_for(transposed: bool, MOST: int, ROWS: int, SIZE: int, cluster: int = 1) -> Any:
    """load(shared, to, x_map, feature, row, rows, bars, stage): the boxes of ROWS rows each, SIZE
    items of shared memory, in which `rows` rows begin; of MOST."""
    load_box = load_for(transposed, cluster)

    @cuda.jit(device=True)
    def load(shared, to, x_map, feature, row, rows, bars, stage):
        for b in range(MOST):
            if b == 0 or b * ROWS < rows:
                load_box(shared, to + b * SIZE, x_map, feature, int32(row + b * ROWS), bars, stage)

    return load


@cache
def load_block_for(cluster: int) -> Any:
    """tma_load_3d, for all of a cluster."""
    if cluster == 1:
        return tma_load_3d
    RANKS = (1 << cluster) - 1

    @cuda.jit(device=True)
    def load(shared, to, w_map, column, row, layer, bars, stage):
        tma_load_3d_multicast(shared, to, w_map, column, row, layer, bars, stage, RANKS)

    return load


@cuda.jit(device=True)
def feature_of(g, half):
    """Which of 16 lines of 32 or 64 bytes is row g + 8 half of an mma, or column g of 8 of two.

    Half a warp is served together, or a quarter: the lines of g = 0 to 3, and of 4 to 7, fill all
    banks. Of an even g and the next the lines are neighbours.
    """
    return g // 2 * 4 + (half ^ g // 2 % 2) * 2 + g % 2


@cuda.jit(device=True)
def feature_of_eight(g):
    """Which of 8 lines is column g, where there are no others."""
    return feature_of(g % 4, g // 4)


class Rows(NamedTuple):
    """How the rows of groups of features become the first operand of an mma, 16 rows at a time.

    begin(start, within) -> lines : where a lane reads in the groups that begin at a byte; of boxes
        the byte where its row of every 16 begins is known
    find(lines, place) -> at : where it reads a piece of 8 features; of 16-bit values two of them,
        whose places are in the halves of a word. A place is counted in bytes of a row.
    load(shared, at, m, x) : x[m % 2] = the registers of the m-th 16 rows
    row_of(m, half) -> row : which row that is, the upper one of a lane and the lower one
    """

    begin: Any
    find: Any
    load: Any
    row_of: Any


@cache
def rows_of(item: int, width: int, transposed: bool, in_boxes: int = 0) -> Rows:
    """For groups of `width` features of `item` bytes; transposed, in boxes of 128 bytes of rows;
    or of rows that are anywhere in boxes of pixels, of so many bytes, before a line of zeros."""
    if in_boxes:
        return _in_boxes(item, width, in_boxes)
    if item == 2:
        return _transposed_16_bit(width) if transposed else _rows_16_bit(width)
    return _transposed_tf32(width) if transposed else _rows_tf32()


@cuda.jit(device=True)
def lane_of_warp():
    return uint32(cuda.threadIdx.x) % 32


@cuda.jit(device=True)
def row_of_16(m, half):
    return lane_of_warp() // 4 + 16 * m + 8 * half


def _rows(bytes_of_line: int, find: Any) -> Rows:
    """A lane names a line of an 8 x 8 matrix of words: 16 rows, then the next piece of each."""
    BYTES = bytes_of_line

    @cuda.jit(device=True)
    def begin(start, within):
        return uint32(start + cuda.threadIdx.x % 16 * BYTES)

    @cuda.jit(device=True)
    def load(shared, at, m, x):
        v = ldmatrix_x4(shared, at + m * (16 * BYTES))
        x[m % 2, 0], x[m % 2, 1], x[m % 2, 2], x[m % 2, 3] = v

    return Rows(begin, find, load, row_of_16)


def _rows_16_bit(width: int) -> Rows:
    ALIKE = LINE // (2 * width)  # lines whose pieces are exchanged alike

    @cuda.jit(device=True)
    def find(lines, place):
        lane = lane_of_warp()
        half = place >> lane // 16 * 16 & uint32(0xFFFF)
        return uint32(lines + (half ^ lane % 8 // ALIKE * 16))

    return _rows(2 * width, find)


def _in_boxes(item: int, width: int, ZEROS: int) -> Rows:
    SOME = item == 2

    @cuda.jit(device=True)
    def begin(start, within):
        return start, within

    @cuda.jit(device=True)
    def find(lines, place):
        upper = lane_of_warp() // 16 * 16
        half = place + upper if item == 4 else place >> upper & uint32(0xFFFF)
        return lines[0], uint32(half), lines[1]

    @cuda.jit(device=True)
    def load(shared, at, m, x):
        start, half, within = at
        row = uint32(0) if SOME and half == ZEROS else within[m]
        v = ldmatrix_x4(shared, uint32(start + place_of_byte(half + row, item * width)))
        x[m % 2, 0], x[m % 2, 1], x[m % 2, 2], x[m % 2, 3] = v

    return Rows(begin, find, load, row_of_16)


def _rows_tf32() -> Rows:
    """`ldmatrix` loads four neighbours of a row into the four lanes that hold it: lane 4 g + q gets
    the q-th and the (q + 4)-th of a piece."""

    @cuda.jit(device=True)
    def find(lines, place):
        lane = lane_of_warp()
        half, exchange = lane // 16 * 16, lane % 8 * 16
        return uint32(lines + (place + half ^ exchange))

    return _rows(LINE, find)


def further(item: int, width: int) -> Any:
    """A place counts the bytes of a piece in a row; transposed, a piece is 8 lines."""
    BYTES = PIECE * item
    WITHIN, FURTHER = BYTES * (width // PIECE - 1), PIECE * LINE // BYTES - 1

    @cuda.jit(device=True)
    def at_lines(lines, place):
        return uint32(lines + place + (place & uint32(WITHIN)) * FURTHER)

    return at_lines


def _transposed_16_bit(width: int) -> Rows:
    """A lane names a feature of the upper 8 rows of 16, of the lower, then of the second piece;
    `ldmatrix` transposes."""
    at_lines = further(2, width)

    @cuda.jit(device=True)
    def begin(start, within):
        return uint32(start + cuda.threadIdx.x % PIECE * LINE)

    @cuda.jit(device=True)
    def find(lines, place):
        half = place >> lane_of_warp() // 16 * 16 & uint32(0xFFFF)
        return at_lines(lines, half)

    @cuda.jit(device=True)
    def load(shared, at, m, x):
        lane = lane_of_warp()
        piece = uint32((lane // 8 % 2 ^ lane % 8) * 16)
        v = ldmatrix_x4_trans(shared, at + (piece ^ uint32(32 * m)))
        x[m % 2, 0], x[m % 2, 1], x[m % 2, 2], x[m % 2, 3] = v

    return Rows(begin, find, load, row_of_16)


def _transposed_tf32(width: int) -> Rows:
    """`ldmatrix` transposes no 32-bit values. A lane reads four rows of a feature at once, so its
    rows are four and four neighbours of 32."""
    at_lines, BOX = further(4, width), width * LINE

    @cuda.jit(device=True)
    def four_of(g):
        """Which four rows of 32 a lane has: such that no two of eight lanes share a bank."""
        return g % 2 * 4 + g // 2

    @cuda.jit(device=True)
    def begin(start, within):
        return uint32(start + cuda.threadIdx.x % 4 * LINE)

    @cuda.jit(device=True)
    def load(shared, at, m, x):
        if m % 2 == 0:  # of 32 rows at once
            lane, box = lane_of_warp(), at + m // 2 * BOX
            piece = uint32((four_of(lane // 4) ^ lane % 4) * 16)
            a = load_4xu32(shared, box + piece)
            b = load_4xu32(shared, box + 4 * LINE + (piece ^ uint32(4 * 16)))  # four features on
            for u in range(2):
                x[u, 0], x[u, 1], x[u, 2], x[u, 3] = a[2 * u], a[2 * u + 1], b[2 * u], b[2 * u + 1]

    @cuda.jit(device=True)
    def row_of(m, half):
        return 32 * (m // 2) + 4 * four_of(lane_of_warp() // 4) + 2 * (m % 2) + half

    return Rows(begin, at_lines, load, row_of)


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
