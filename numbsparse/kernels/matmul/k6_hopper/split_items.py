"""What a block of threads computes of a weight-gradient of float32: items of products.

A product is 64 features of x, two tiles of 32 that a strip of N columns of dy keeps, by the strip.
Each of the GROUPS warpgroups of an item has two products. These follow one another down the
strips, so that most of an item have the same strip, and share its image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.layout import Index

NT = 32  # rows of the batch in a step
TILE = 32  # features of a tile: 128 bytes of a row
TILE_BYTES = 4 * NT * TILE
HALVES = 2  # products of a warpgroup
PAIRED = 1.6  # the time of a product of 64 columns, where one of 32 takes 1
ALIGNED = 1024  # bytes: where tiles begin in shared memory
FEWER = 0.8  # items: so many fewer are worth to store blocks value by value
POOL = 224 * 1024  # bytes of shared memory for images and tiles


class Work(NamedTuple):
    """How the work of a block of threads is cut."""

    N: int  # columns of a product
    GROUPS: int  # warpgroups that multiply
    TURNERS: int  # warps that turn dy over
    STRIPS: int  # that an item may have
    ROOMS: int  # steps whose images there is room for
    STAGES: int  # steps whose tiles there is room for, at most
    # Of a lane that multiplies, and of one that turns. Three warpgroups begin with 168 each, four
    # with 128: should all together want more, some would wait for ever.
    REGISTERS: tuple[int, int]

    @property
    def THREADS(self) -> int:
        return 128 * self.GROUPS + 32 * self.TURNERS

    @property
    def PRODUCTS(self) -> int:
        """Of an item."""
        return HALVES * self.GROUPS

    @property
    def TILES(self) -> int:
        """Of x in an item."""
        return 2 * self.PRODUCTS

    @property
    def IMAGE(self) -> int:
        """Values of the image of a strip: hi and lo."""
        return 2 * NT * self.N

    @property
    def PER_LANE(self) -> int:
        """Sums of a product in a lane."""
        return self.N // 2

    @property
    def SUMS(self) -> int:
        """Of an item."""
        return self.PRODUCTS * 64 * self.N

    def stages(self, strips: Any) -> Any:
        """For how many steps the tiles of an item with so many strips have room."""
        room = POOL - self.ROOMS * strips * 4 * self.IMAGE
        return np.minimum(
            room // ((self.TILES + strips * (self.N // TILE)) * TILE_BYTES), self.STAGES
        )


def way_of(index: Index, B: int) -> tuple[Any, ...]:
    """(whether x and dy change places, work, its items): few rows of blocks make fewer items so."""

    def way(swapped: bool) -> tuple[Any, ...]:
        work = work_of(index, B, swapped)
        return swapped, work, *items(index, B, work, swapped)

    ways = way(False), way(True)
    counts = [len(tiles) for _, _, tiles, *_ in ways]
    return ways[counts[1] <= FEWER * counts[0]]


def work_of(index: Index, B: int, swapped: bool = False) -> Work:
    """Products of 64 columns where B is as large, or neighbouring columns keep the same rows."""
    N = 64
    if B == 32:
        wide, narrow = (_lines(index, B, n, swapped)[0].size for n in (64, 32))
        N = 64 if PAIRED * wide <= narrow else 32
    if SIMULATED:
        return Work(N, 1, 1, 2, 2, 2, (128, 128))
    if N == 64:
        return Work(64, 2, 4, 3, 2, 5, (216, 72))
    return Work(32, 3, 4, 4, 2, 5, (144, 80))


def _lines(
    index: Index, B: int, N: int, swapped: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(strip, tile, targets) of each tile of x that a strip keeps any of, strip by strip.

    targets (., N / 32): where the parts of 32 x 32 begin in dvalues, counted in 32; -1 for none.
    """
    parts, across = B // TILE, N // TILE
    row, column = (a.reshape(-1) for a in np.indices((parts, parts)))
    rows = (index.block_rows[:, None] * np.int64(parts) + row).reshape(-1)
    columns = (index.block_columns[:, None] * np.int64(parts) + column).reshape(-1)
    block = np.arange(index.block_rows.size)[:, None]
    target = (block * (B * B // TILE) + row * B + column).reshape(-1)
    if swapped:
        rows, columns = columns, rows
    strip, part = np.divmod(columns, across)
    width = int(rows.max(initial=0)) + 1
    lines, of = np.unique(strip * width + rows, return_inverse=True)
    targets = np.full((lines.size, across), -1, np.int64)
    targets[of.reshape(-1), part] = target
    return lines // width, lines % width, targets


def items(index: Index, B: int, work: Work, swapped: bool = False) -> tuple[Any, ...]:
    """(tiles, images, columns, extents, targets), int32, a row for each item.

    tiles (GROUPS, 4) : the first feature of each tile of x, two for each product; or -1
    images (GROUPS, 2) : which of the item's strips a product takes
    columns (STRIPS,) : the first column of each strip, or -1
    extents : strips, tiles of x and of dy, stages
    targets (GROUPS, 4, N / 32) : see `_lines`
    """
    strip, tile, target = _lines(index, B, work.N, swapped)
    kept = np.bincount(strip)
    products = -(-kept // 2)
    number = np.arange(strip.size) - (np.cumsum(kept) - kept)[strip]
    nth = (np.cumsum(products) - products)[strip] + number // 2
    place, image = _packed(products, work)
    count = place[-1] // work.PRODUCTS + 1
    product = place[nth]

    tiles = np.full((count * work.PRODUCTS, 2), -1, np.int32)
    targets = np.full((*tiles.shape, work.N // TILE), -1, np.int32)
    tiles[product, number % 2] = tile * TILE
    targets[product, number % 2] = target
    of_place = np.full(len(tiles), -1, np.int32)
    of_place[place] = image
    images = np.maximum.accumulate(of_place.reshape(count, work.PRODUCTS), axis=1)
    columns = np.full((count, work.STRIPS), -1, np.int32)
    columns[product // work.PRODUCTS, images.reshape(-1)[product]] = strip * work.N

    extents = np.empty((count, 3), np.int32)
    extents[:, 0] = (columns >= 0).sum(1)
    loaded = (tiles.reshape(count, -1) >= 0).sum(1)
    extents[:, 1] = loaded + extents[:, 0] * (work.N // TILE)
    extents[:, 2] = work.stages(extents[:, 0])
    return (
        tiles.reshape(count, work.GROUPS, 4),
        images.reshape(count, work.GROUPS, HALVES),
        columns,
        extents,
        targets.reshape(count, work.GROUPS, 4, -1),
    )


def _packed(products: np.ndarray, work: Work) -> tuple[np.ndarray, np.ndarray]:
    """The place of each product among those of all items, and the number of its strip there."""
    places, images = [], []
    place = image = 0
    for count in products[products > 0].tolist():
        if image == work.STRIPS:
            place += -place % work.PRODUCTS
        for _ in range(count):
            image = 0 if place % work.PRODUCTS == 0 else image
            places.append(place)
            images.append(image)
            place += 1
        image += 1
    return np.array(places), np.array(images)
