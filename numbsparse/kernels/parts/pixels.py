"""Rows that are never made: what outputs of a convolution see, loaded where the pixels are.

Row o of a matrix would have, tap after tap, the features of the pixel that output o sees. A tile of
its rows is a box of outputs that follow each other in memory. The pixels that a tap sees from there
are such a box again, elsewhere in the images: the copy engine loads it as it would load rows of the
matrix, with zeros beyond the images.
"""

from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.aligned import of_bits
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.store import FEATURES, Output
from numbsparse.kernels.parts.store_pixels import RESIDUE_AT
from numbsparse.kernels.parts.strip import Strip
from numbsparse.kernels.parts.swizzle import load_boxes_for
from numbsparse.kernels.ptx import tma_load_5d
from numbsparse.layout import Index

IMAGES = "images"  # beside the orders of a matrix: see `store`
BITS, WIDTHS = 7, 512  # of an offset along an axis, and at most so many groups of a tap
MIDDLE, MOST = 1 << BITS - 1, (1 << BITS) - 1
# How many pixels take as long to load as a line of a box begins (H200: of 256 features and 56 x 56
# images, in blocks of 16, tiles of 8 x 8 took 65 us, of 1 x 56, an eighth more of them, 57).
A_LINE = 1.2
# Rows that lanes read at once: in one line of a box no two share banks. Tiles of 4 x 8 took 0.66 to
# 0.83 of the time of tap by tap, once 1.09; of 4 x 7 and 2 x 14 1.09 to 1.25, once 0.78; at a
# stride of 2, where boxes are of pixels of one parity, 1.0 to 1.2 (H200).
AT_ONCE = 8
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

    def within(self, index: Index, tile: Four, rows: int, spread: bool = False) -> Any:
        """Where the rows of a tile begin in a box that is shared, in bytes; in `spread_rows`."""
        if not self.shared:
            return ()
        how = rows, tile, self.seen(tile), self.pixels.itemsize * self.shared.width, spread
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
    """Of block columns (pixel of a square, block), n_lines of all, what `store_pixels` takes."""
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


def rows_in_boxes(
    index: Index, rows: int, tile: Four, box: Four, nbytes: int, spread: bool
) -> tuple[np.ndarray]:
    """(rows,): the byte where each row of a tile begins in a box, of lines of `nbytes`."""
    order = spread_rows(tile, box) if spread else np.arange(prod(tile))
    return (np.resize(lines_in_box(tile, box)[order] * nbytes, rows).astype(np.int32),)


def lines_in_box(tile: Four, box: Four) -> np.ndarray:
    """(rows of a tile,): the line of a box where each begins."""
    return np.asarray(np.ravel_multi_index(np.indices(tile).reshape(4, -1), box))


def spread_rows(tile: Four, box: Four) -> np.ndarray:
    """The rows of a tile in an order in which those that lanes read at once share no banks, as far
    as there are such; taps shift the lines of all of them alike.

    Lines share banks whose numbers are the same modulo AT_ONCE. Of 7 x 7 rows in a box of 9 x 9
    each eight would otherwise be read in two turns.
    """
    lines, order = lines_in_box(tile, box) % AT_ONCE, list[int]()
    alike = [np.flatnonzero(lines == k).tolist() for k in range(AT_ONCE)]
    while len(order) < lines.size:
        alike.sort(key=len, reverse=True)
        order += [rows.pop(0) for rows in alike[: AT_ONCE - len(order) % AT_ONCE] if rows]
    return np.array(order)


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
