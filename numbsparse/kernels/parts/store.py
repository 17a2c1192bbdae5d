"""From a warp's accumulators to y in one of three orders: along rows, along features, by items.

16-bit sums are those of mma and wgmma: 16 rows by strips of 8 columns, of which lane 4 g + q has
columns 2 q and 2 q + 1 of rows g, the upper half, and g + 8. They are rounded and stored in pieces
of 16 bytes, straight from the registers of lanes that exchange them. A product of blocks of 8 and
16 is 1.3 to 1.7 times as fast so as with stores one by one (H200).

`store_boxes` has the copy engine store them, or lanes where features begin anywhere;
`store_float32` is the same of float32, and `store_pixels` of images.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int64, uint16, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.aligned import of_bits
from numbsparse.kernels.parts.words import PACK
from numbsparse.kernels.ptx import movmatrix_trans, shfl_xor, store_4xu32

BYTES = 16  # of a piece
ROWS, FEATURES, ANY = "rows", "features", "any"  # along which y takes whole pieces
LINES = "lines"  # feature-major, but its lines begin anywhere
SLABS = "slabs"  # feature-major, all of its values without gaps, its lines as long as a tile
AT_ONCE = 8  # of such lines: a lane has a value of each while it writes them
PIXELS = "pixels"  # of images: see `store_pixels`
KINDS = {"float16": "f16", "bfloat16": "bf16"}  # of sums that are rounded to


def order_of(y: DeviceArray, piece: int = BYTES, lines: bool = False) -> str:
    """Along what y takes whole pieces of `piece` bytes: its rows, its features, or neither; with
    `lines` LINES where the batch is contiguous all the same."""
    for order, view in ((ROWS, y), (FEATURES, y.T)):
        many, width = view.shape
        contiguous = view.strides[1] == y.itemsize or width == 1
        places = width * y.itemsize, view.address, view.strides[0] if many > 1 else 0
        if contiguous and all(place % piece == 0 for place in places):
            return order
    return LINES if lines and y.batch_is_contiguous else ANY


def by_boxes(order: str) -> bool:
    """Whether y takes several values at once in this order, and the copy engine may write it."""
    return order not in (ANY, LINES, SLABS)


class Output(NamedTuple):
    """y, as one argument of a kernel."""

    values: Any  # along one axis; of 16 bits as uint16
    row_stride: int
    column_stride: int
    batch: int
    features: int


def output_of(y: DeviceArray) -> Output:
    return Output(of_bits(y.span), *(stride // y.itemsize for stride in y.strides), *y.shape)


class Sums(NamedTuple):
    """The sums of a lane: one after another [block column, tile of rows, strip, 4]."""

    kind: str  # "f16" or "bf16", or the precision of float32
    B: int
    COLUMNS: int  # block columns
    TILES: int  # of 16 rows each, in a block column
    APART: int  # rows from a tile to the next: 64 of wgmma, 16 of mma

    @property
    def STRIPS(self) -> int:
        """Of a tile in all block columns."""
        return self.COLUMNS * self.B // 8

    @property
    def WIDTH(self) -> int:
        """Columns of a panel, which the copy engine writes at once."""
        return min(self.B, 64)

    @property
    def PANEL_BYTES(self) -> int:
        return 2 * 16 * self.WIDTH


@cache
def packed(of: Sums) -> Any:
    """The pair of a lane in a strip of a tile, as 16-bit values: half 0 is the upper one."""
    STRIPS, TILES, pack = of.B // 8, of.TILES, PACK[of.kind]

    @cuda.jit(device=True)
    def pair(sums, tile, strip, half):
        i = ((strip // STRIPS * TILES + tile) * STRIPS + strip % STRIPS) * 4 + 2 * half
        return pack(sums[i], sums[i + 1])

    return pair


@cache
def storer(of: Sums, order: str) -> Any:
    """store(sums, columns, row, y): a warp's rows, `row` the first one's number.

    columns : (COLUMNS,), block columns of y, negative where there is none
    y : `Output`
    """
    TILES, APART = of.TILES, of.APART
    if order == LINES and APART == 16 and TILES % 2 == 0:
        return _storer_by_lines(of)
    by_order = {ROWS: _tile_by_rows, FEATURES: _tile_by_features}
    store_tile = by_order.get(order, _tile_by_items)(of)

    @cuda.jit(device=True)
    def store(sums, columns, row, y):
        for tile in range(TILES):
            store_tile(sums, tile, columns, row + APART * tile, y)

    return store


@cuda.jit(device=True)
def column_of(columns, strip, B):
    """The first column of a strip; negative where there is none."""
    return columns[strip // (B // 8)] * B + strip % (B // 8) * 8


@cache
def four_strips(of: Sums) -> Any:
    """four(sums, tile, s, half) -> the words of 8 columns of strip s + lane % 4."""
    pair = packed(of)

    @cuda.jit(device=True)
    def four(sums, tile, s, half):
        return transposed(
            pair(sums, tile, s, half),
            pair(sums, tile, s + 1, half),
            pair(sums, tile, s + 2, half),
            pair(sums, tile, s + 3, half),
        )

    return four


def _tile_by_rows(of: Sums) -> Any:
    """Four strips at once: each lane of four gets 8 columns of one of them."""
    STRIPS, B, four = of.STRIPS, of.B, four_strips(of)

    @cuda.jit(device=True)
    def store(sums, tile, columns, row, y):
        values, stride, _, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for half in range(2):
            for s in range(0, STRIPS, 4):
                a, b, c, d = four(sums, tile, s, half)
                k, n = column_of(columns, s + lane % 4, B), row + 8 * half + lane // 4
                if n < batch and k >= 0 and k < features:
                    store_4xu32(values, n * stride + k, a, b, c, d)

    return store


def _tile_by_features(of: Sums) -> Any:
    """Both halves of two strips at once, transposed: each lane of four gets 8 rows of a column."""
    STRIPS, B, pair = of.STRIPS, of.B, packed(of)

    @cuda.jit(device=True)
    def store(sums, tile, columns, row, y):
        values, _, stride, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for s in range(0, STRIPS, 2):
            a, b, c, d = transposed(
                movmatrix_trans(pair(sums, tile, s, 0)),
                movmatrix_trans(pair(sums, tile, s, 1)),
                movmatrix_trans(pair(sums, tile, s + 1, 0)),
                movmatrix_trans(pair(sums, tile, s + 1, 1)),
            )
            k = column_of(columns, s + lane % 4 // 2, B)
            n, inside = row + lane % 2 * 8, k >= 0
            k += lane // 4
            if n < batch and inside and k < features:
                store_4xu32(values, k * stride + n, a, b, c, d)

    return store


def _storer_by_lines(of: Sums) -> Any:
    """32 rows of 8 columns at once: lanes exchange columns for rows, until a warp stores neighbours
    of a column, one value each. Rows begin anywhere: of a lane's own rows, 8 of a column at once,
    twice as many sectors of memory would be written in part."""
    TILES, STRIPS, B, pair = of.TILES, of.STRIPS, of.B, packed(of)

    @cuda.jit(device=True)
    def store(sums, columns, row, y):
        values, _, stride, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        for m in range(0, TILES, 2):
            n = int64(row) + 16 * m + 8 * (lane % 4) + lane // 4
            for s in range(STRIPS):
                upper, below = pair(sums, m, s, 0), pair(sums, m, s, 1)
                more, last = pair(sums, m + 1, s, 0), pair(sums, m + 1, s, 1)
                twos = transposed(upper, below, more, last)
                k = int64(column_of(columns, s, B))
                left = features - k if k >= 0 and n < batch else int64(0)
                at = k * stride + n
                for j in range(4):
                    for e in range(2):
                        if 2 * j + e < left:
                            values[uint64(at)] = uint16(twos[j] >> uint32(16 * e) & uint32(0xFFFF))
                        at += stride

    return store


def _tile_by_items(of: Sums) -> Any:
    """Places are added up: with a product and comparisons for each k6 has 2,712 instructions, not
    1,872."""
    COLUMNS, B, STRIPS, pair = of.COLUMNS, of.B, of.B // 8, packed(of)

    @cuda.jit(device=True)
    def store(sums, tile, columns, row, y):
        values, row_stride, column_stride, batch, features = y
        lane = uint32(cuda.threadIdx.x) % 32
        n, own, below = int64(row + lane // 4), int64(lane % 4 * 2), 8 * row_stride
        for c in range(COLUMNS):
            first = int64(columns[c]) * B + own
            left = features - first if first >= 0 else int64(0)  # columns from this lane's first
            at = n * row_stride + first * column_stride
            for s in range(STRIPS):
                upper = pair(sums, tile, c * STRIPS + s, 0)
                lower = pair(sums, tile, c * STRIPS + s, 1)
                for i in range(2):
                    if 8 * s + i < left:
                        if n < batch:
                            values[uint64(at)] = uint16(upper >> (16 * i) & 0xFFFF)
                        if n + 8 < batch:
                            values[uint64(at + below)] = uint16(lower >> (16 * i) & 0xFFFF)
                    at += column_stride if i == 0 else 7 * column_stride

    return store


@cuda.jit(device=True)
def transposed(a, b, c, d):
    """Of four lanes that hold a row of a 4 x 4 matrix each, each gets a column."""
    lane = uint32(cuda.threadIdx.x)
    a, b = exchanged(a, b, lane % 2, 1)
    c, d = exchanged(c, d, lane % 2, 1)
    a, c = exchanged(a, c, lane % 4 // 2, 2)
    b, d = exchanged(b, d, lane % 4 // 2, 2)
    return a, b, c, d


@cuda.jit(device=True)
def exchanged(low, high, upper, mask):
    """One of two values against one of the lane whose number differs in `mask`."""
    other = shfl_xor(low if upper else high, mask)
    return (other, high) if upper else (low, other)
