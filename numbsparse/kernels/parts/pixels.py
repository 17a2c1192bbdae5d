"""Rows that are never made: what outputs of a convolution see, loaded where the pixels are.

Row o of a matrix would have, tap after tap, the features of the pixel that output o sees. A tile of
its rows is a box of outputs that follow each other in memory. The pixels that a tap sees from there
are such a box again, elsewhere in the images: the copy engine loads it as it would load rows of the
matrix, with zeros beyond the images.

Rows of y are pixels too, or squares of them. Where each row goes is read from memory, and before
the sums are there: loads wait for the stores before them, so that to store a tile of 64 rows took
eight of their latencies. Images of few features, 64 rows of which take less than that, have 0.5 to
0.8 of the time since (H200).
"""

from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint32

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.aligned import of_bits
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.store import FEATURES, PACK, Output, Sums, four_strips
from numbsparse.kernels.parts.strip import Strip
from numbsparse.kernels.parts.swizzle import load_boxes_for
from numbsparse.kernels.ptx import as_uint32, shfl_idx, store_2xu32, store_4xu32, tma_load_5d
from numbsparse.layout import Index

IMAGES = "images"  # beside the orders of a matrix: see `store`
BITS, WIDTHS = 7, 512  # of an offset along an axis, and at most so many groups of a tap
MIDDLE, MOST = 1 << BITS - 1, (1 << BITS) - 1
RESIDUE_AT = 28  # see `place_in_square`
# How many pixels take as long to load as a line of a box begins (H200: of 256 features and 56 x 56
# images, in blocks of 16, tiles of 8 x 8 took 65 us, of 1 x 56, an eighth more of them, 57).
A_LINE = 1.2
UNEVEN = 1.1  # what is saved, at least, where sums may have to be repaired: see `k6_strips`

Three = tuple[int, int, int]
Four = tuple[int, int, int, int]


class Shared(NamedTuple):
    """A box that several taps see: its features, how many pixels there is room for, and by how many
    of these blocks of w are counted; and its size."""

    width: int
    room: int
    shifts: int
    box: Three = (1, 1, 1)


class Images(NamedTuple):
    """Pixels as the matrix of what outputs see through taps; `width` is that of a tap.

    Where boxes, larger than tiles, are `shared`, `taps` are those, and w has block rows for each of
    the first `shifts` pixels of one.
    """

    pixels: DeviceArray  # (batch * pixels, features), aligned
    batch: int
    sizes: Three
    outputs: Three
    taps: tuple[Four, ...]  # whether they see every second pixel; of what they see, offsets
    width: int
    shared: Shared | None = None

    def seen(self, tile: Four) -> Four:
        """The pixels of a box, of a tile of outputs."""
        return (tile[0], *self.shared.box) if self.shared else tile

    def within(self, index: Index, tile: Four, rows: int) -> Any:
        """Where the rows of a tile begin in a box that is shared, in bytes."""
        if not self.shared:
            return ()
        how = rows, tile, self.seen(tile), self.pixels.itemsize * self.shared.width
        return planned(index, rows_in_boxes, *how)[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch * prod(self.outputs), len(self.taps) * self.width

    def tops(self, index: Index, tile: Four) -> Any:
        """See `tops_of`."""
        return planned(index, tops_of, self.batch, self.outputs, tile)[0]

    def boxes(self, tile: Four, features: int) -> tuple[Any, ...]:
        """What a tensor map takes for boxes of a tile's pixels, with so many of their features."""
        x, (_, y, z) = self.pixels, self.sizes
        row = x.strides[0] if x.shape[0] > 1 else x.shape[1] * x.itemsize
        strides = tuple(row * n for n in (prod(self.sizes), y * z, z, 1))
        shape = self.batch, *self.sizes, x.shape[1]
        whole = DeviceArray(x.address, shape, x.dtype, (*strides, x.itemsize), x.owner)
        steps = 1, *3 * (1 + self.taps[0][0],), 1
        return whole, (*self.seen(tile), features), steps


class PixelRows(NamedTuple):
    """Pixels of a result as a matrix, tile after tile: a row is a pixel, or a square of them."""

    pixels: DeviceArray  # (batch * pixels, features), whole blocks, which are written
    tile: Four
    places: Any  # (rows, 2): of each its first pixel; which of the square are in the image
    offsets: tuple[int, ...]  # of the pixels of a square, from the first one

    @property
    def shape(self) -> tuple[int, int]:
        return self.places.shape[0], len(self.offsets) * self.pixels.shape[1]

    @property
    def dtype(self) -> Any:
        return self.pixels.dtype

    @property
    def itemsize(self) -> int:
        return self.pixels.itemsize

    def output(self) -> Output:
        (rows, width), features = self.shape, self.pixels.shape[1]
        return Output(of_bits(self.pixels.span), features, self.places, rows, width)


def has_room(sizes: Three, features: int, B: int) -> bool:
    """Whether `places_in_squares` has, of such images; features are whole blocks."""
    return features % B == 0 and 2 * prod(sizes) * features // B < 1 << RESIDUE_AT


def places_in_squares(lines: np.ndarray, offsets: tuple[int, ...], n_lines: int) -> np.ndarray:
    """Of block columns (pixel of a square, block), of n_lines, what `storer_by_pixels` takes."""
    a_pixel = n_lines // len(offsets)
    residue, block = np.divmod(lines, a_pixel)
    of_pixel = np.array(offsets)[np.minimum(residue, len(offsets) - 1)] * a_pixel
    return residue << RESIDUE_AT | of_pixel + block


@lru_cache
def tile_that_fits(
    batch: int,
    outputs: Three,
    rows: int,
    a_tile: float,
    uneven: float = 1.0,
    spread: Three = (0, 0, 0),
) -> Four:
    """The box of up to `rows` outputs of which images take least.

    A tile costs as much as loading `a_tile` of its pixels, and each line of them A_LINE; images
    that are not made of whole tiles cost `uneven` times as much. Boxes that taps share are larger
    by `spread`.

    >>> tile_that_fits(16, (1, 56, 56), 64, 64), tile_that_fits(16, (1, 56, 56), 64, 32)
    ((1, 1, 8, 8), (1, 1, 1, 56))
    """
    depth, height, width = outputs
    boxes = [
        (z, y, x)
        for z in range(1, min(depth, rows) + 1)
        for y in range(1, min(height, rows // z) + 1)
        for x in range(1, min(width, rows // (z * y)) + 1)
    ]
    tiles = [(min(batch, rows // prod(box)), *box) for box in boxes]

    def cost(tile: Four) -> Any:
        whole = is_whole(tile, outputs)
        counts = (-(-n // t) for n, t in zip((batch, *outputs), tile, strict=True))
        *lines, across = (t + s for t, s in zip(tile[1:], spread, strict=True))
        of_tile = a_tile + tile[0] * prod(lines) * (across + A_LINE)
        return (
            prod(counts) * of_tile * (1 if whole else uneven),
            not whole,
            [-n for n in tile[::-1]],
        )

    return min(tiles, key=cost)


def is_whole(tile: Four, outputs: Three) -> bool:
    """Whether images are made of such boxes."""
    return all(n % t == 0 for n, t in zip(outputs, tile[1:], strict=True))


def tops_of(index: Index, batch: int, outputs: Three, tile: Four) -> tuple[np.ndarray]:
    """((tiles, 4): x, y, z, image of the first output of each,)."""
    counts = batch, *outputs
    tops = np.indices([-(-n // t) for n, t in zip(counts, tile, strict=True)]).reshape(4, -1).T
    return ((tops * tile)[:, ::-1].astype(np.int32),)


def rows_in_boxes(index: Index, rows: int, tile: Four, box: Four, nbytes: int) -> tuple[np.ndarray]:
    """(rows,): the byte where each row of a tile begins in a box, of lines of `nbytes`."""
    places = np.ravel_multi_index(np.indices(tile).reshape(4, -1), box) * nbytes
    return (np.resize(places, rows).astype(np.int32),)


def boxes_of(groups: np.ndarray, taps: tuple[Four, ...], a_tap: int) -> np.ndarray:
    """Each group of the matrix, of `a_tap` in a tap: which of them, and what the tap sees.

    Offsets have BITS each, from the last axis on, over the number below WIDTHS; -1 stays. What is
    beyond the last tap means nothing.
    """
    tap, of_tap = np.divmod(np.maximum(groups, 0), a_tap)
    by = np.array(taps, np.int64)[np.minimum(tap, len(taps) - 1)] + (0, MIDDLE, MIDDLE, MIDDLE)
    places = [WIDTHS << BITS * k for k in range(4)]
    return np.where(groups < 0, -1, of_tap + by[..., ::-1] @ places).astype(np.int32)


def fits(offsets: tuple[Three, ...], a_tap: int) -> bool:
    """Whether `boxes_of` has room for them."""
    far = (n for offset in offsets for n in offset if not -MIDDLE <= n < MIDDLE)
    return a_tap <= WIDTHS and next(far, None) is None


@cache
def finding(of_images: bool) -> Any:
    """top(tops, rows, tile) -> what loads a tile: of a matrix its first row, of `rows` each; of
    images see `tops_of`."""

    @cuda.jit(device=True)
    def top(tops, rows, tile):
        return int32(tile * rows)

    @cuda.jit(device=True)
    def top_of_pixels(tops, rows, tile):
        return tops[tile, 0], tops[tile, 1], tops[tile, 2], tops[tile, 3]

    return top_of_pixels if of_images else top


@cache
def load_pixels(features: int) -> Any:
    """load(shared, to, x_map, box, top, bars, stage): of a tile, what the tap of a box sees."""

    @cuda.jit(device=True)
    def load(shared, to, x_map, box, top, bars, stage):
        double = box // (WIDTHS << 3 * BITS)
        x = int32((top[0] << double) + (box // WIDTHS & MOST) - MIDDLE)
        y = int32((top[1] << double) + (box // (WIDTHS << BITS) & MOST) - MIDDLE)
        z = int32((top[2] << double) + (box // (WIDTHS << 2 * BITS) & MOST) - MIDDLE)
        c = int32(box % WIDTHS * features)
        tma_load_5d(shared, to, x_map, c, x, y, z, top[3], bars, stage)

    return load


def loading(strip: Strip, x_order: str) -> Any:
    """load(shared, to, x_map, group, top, bars, stage): a group of the rows that begin there."""
    if x_order == IMAGES:
        return load_pixels(strip.WIDTH)
    transposed, WIDTH, ROWS = x_order == FEATURES, strip.WIDTH, strip.ROWS
    high = strip.BOX_ROWS(transposed)
    boxes = ROWS // high, high, strip.GROUP_BYTES * high // ROWS
    load_boxes = load_boxes_for(transposed, *boxes, strip.CLUSTER)

    @cuda.jit(device=True)
    def load(shared, to, x_map, group, row, bars, stage):
        load_boxes(shared, to, x_map, int32(group * WIDTH), row, ROWS, bars, stage)

    return load


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
