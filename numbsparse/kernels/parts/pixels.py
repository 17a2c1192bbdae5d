"""Rows that are never made: what outputs of a convolution see, loaded where the pixels are.

Row o of a matrix would have, tap after tap, the features of the pixel that output o sees. A tile of
its rows is a box of outputs that follow each other in memory. The pixels that a tap sees from there
are such a box again, elsewhere in the images: the copy engine loads it as it would load rows of the
matrix, with zeros beyond the images.
"""

from functools import cache, lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.store import FEATURES
from numbsparse.kernels.parts.swizzle import load_for
from numbsparse.kernels.ptx import tma_load_5d
from numbsparse.layout import Index

IMAGES = "images"  # beside the orders of a matrix: see `store`
BITS, WIDTHS = 7, 512  # of an offset along an axis, and at most so many groups of a tap
MIDDLE, MOST = 1 << BITS - 1, (1 << BITS) - 1

Three = tuple[int, int, int]
Four = tuple[int, int, int, int]


class Images(NamedTuple):
    """Pixels as the matrix of what outputs see through taps; `width` is that of a tap."""

    pixels: DeviceArray  # (batch * pixels, features), aligned
    batch: int
    sizes: Three
    outputs: Three
    taps: tuple[Four, ...]  # whether they see every second pixel; of what they see, offsets
    width: int

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
        return whole, (*tile, features), x.itemsize * features, steps


def tile_in_a_row(batch: int, outputs: Three, rows: int) -> Four:
    """The largest box of up to `rows` outputs that follow each other: whole axes, from the last.

    >>> tile_in_a_row(2, (1, 14, 14), 64), tile_in_a_row(8, (1, 4, 4), 64)
    ((1, 1, 4, 14), (4, 1, 4, 4))
    """
    tile, whole = [1, 1, 1, 1], True
    for axis, count in reversed(list(enumerate((batch, *outputs)))):
        tile[axis] = min(count, rows // prod(tile)) if whole else 1
        whole = whole and tile[axis] == count
    return tile[0], tile[1], tile[2], tile[3]


@lru_cache
def tile_that_fits(batch: int, outputs: Three, rows: int) -> Four:
    """The largest box of up to `rows` outputs of which images are made.

    >>> tile_that_fits(8, (1, 7, 7), 32), tile_that_fits(1, (1, 12, 12), 32)
    ((4, 1, 1, 7), (1, 1, 2, 12))
    """
    sides = ([k for k in range(1, min(n, rows) + 1) if n % k == 0] for n in outputs)
    boxes = (box for box in product(*sides) if prod(box) <= rows)
    tiles = [(min(batch, rows // prod(box)), box[0], box[1], box[2]) for box in boxes]
    return max(tiles, key=lambda tile: (prod(tile), tile[::-1]))


def tops_of(index: Index, batch: int, outputs: Three, tile: Four) -> tuple[np.ndarray]:
    """((tiles, 6),): of each that is a row the first output and the one after; x, y, z, image."""
    counts = batch, *outputs
    tops = np.indices([-(-n // t) for n, t in zip(counts, tile, strict=True)]).reshape(4, -1).T
    tops = tops * tile
    sizes = np.minimum(np.subtract(counts, tops), tile).prod(1)
    first = np.ravel_multi_index(tuple(tops.T), counts)
    return (np.column_stack([first, first + sizes, tops[:, ::-1]]).astype(np.int32),)


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


class Finding(NamedTuple):
    """Where tiles are: of a matrix by their number, of `rows` each; of images by `tops_of`.

    bounds(tops, rows, tile) -> (first, end) : rows of y
    top(tops, rows, tile) -> what loads them
    """

    bounds: Any
    top: Any


@cache
def finding(of_images: bool) -> Finding:
    @cuda.jit(device=True)
    def bounds(tops, rows, tile):
        return tile * rows, tile * rows + rows

    @cuda.jit(device=True)
    def top(tops, rows, tile):
        return int32(tile * rows)

    @cuda.jit(device=True)
    def bounds_of_pixels(tops, rows, tile):
        return tops[tile, 0], tops[tile, 1]

    @cuda.jit(device=True)
    def top_of_pixels(tops, rows, tile):
        return tops[tile, 2], tops[tile, 3], tops[tile, 4], tops[tile, 5]

    return Finding(bounds_of_pixels, top_of_pixels) if of_images else Finding(bounds, top)


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


def loading(strip: Any, x_order: str) -> Any:
    """load(shared, to, x_map, group, top, bars, stage): a group of the rows that begin there."""
    if x_order == IMAGES:
        return load_pixels(strip.WIDTH)
    transposed, WIDTH = x_order == FEATURES, strip.WIDTH
    load_box, BOX_ROWS = load_for(transposed, strip.CLUSTER), strip.BOX_ROWS(transposed)
    BOXES, BOX_BYTES = strip.ROWS // BOX_ROWS, strip.GROUP_BYTES * BOX_ROWS // strip.ROWS

    @cuda.jit(device=True)
    def load(shared, to, x_map, group, row, bars, stage):
        feature = int32(group * WIDTH)
        for b in range(BOXES):
            box, first_row = to + b * BOX_BYTES, int32(row + b * BOX_ROWS)
            load_box(shared, box, x_map, feature, first_row, bars, stage)

    return load
