"""Which parts of kept blocks of float32 are computed together: items of products.

A product is 64 features of x, two panels of 32 that a strip of N columns of dy keeps, by the strip.
Each warpgroup of an item has two products. These follow one another down the strips, so that most
of an item have the same strip, and share its image.
"""

from __future__ import annotations

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import MAPS, ROOMS, RUNS, Edges, Tile
from numbsparse.layout import Index

PAIRED = 1.6  # the time of a product of 64 columns, where one of 32 takes 1
FEWER = 0.8  # items: so many fewer are worth to store blocks value by value
POOL = 224 * 1024  # bytes of shared memory for images and panels
STEP = 1.4  # microseconds of a step of an item, as measured on an H200
SUMS_IN_US = 3e5


class Items:
    """Of a layout, longest strips first; the same object for every launch with it.

    panels (items, X_PANELS) : of x, two for each product; or -1
    images (items, GROUPS, UNITS) : which of the item's strips a product takes
    strips (items, STRIPS) : of dy, or -1
    outs (items, GROUPS, OUTS) : parts of kept blocks of 32 x 32, in row order; of each product
        those of its first panel, then those of the second; or -1
    """

    def __init__(self, index: Index, tile: Tile, swapped: bool):
        strip, panel, part = parts_of_strips(index, tile.B, tile.N, swapped)
        kept = np.bincount(strip)
        products = -(-kept // 2)
        number = np.arange(strip.size) - (np.cumsum(kept) - kept)[strip]
        nth = (np.cumsum(products) - products)[strip] + number // 2
        place, image = _packed(products, tile)
        each = tile.UNITS * tile.GROUPS
        count, product = place[-1] // each + 1, place[nth]

        panels = np.full((count * each, 2), -1, np.int32)
        outs = np.full((*panels.shape, tile.N // tile.PANEL), -1, np.int32)
        panels[product, number % 2] = panel
        outs[product, number % 2] = part
        of_place = np.full(count * each, -1, np.int32)
        of_place[place] = image
        images = np.maximum.accumulate(of_place.reshape(count, each), axis=1)
        self.strips = np.full((count, tile.STRIPS), -1, np.int32)
        self.strips[product // each, images.reshape(-1)[product]] = strip
        self.panels = panels.reshape(count, -1)
        self.images = images.reshape(count, tile.GROUPS, tile.UNITS)
        self.outs = outs.reshape(count, tile.GROUPS, tile.OUTS)

    def __len__(self) -> int:
        return len(self.panels)


def _packed(products: np.ndarray, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """The place of each product among those of all items, and the number of its strip there."""
    places, images = [], []
    place = image = 0
    each = tile.UNITS * tile.GROUPS
    for count in products[products > 0].tolist():
        if image == tile.STRIPS:
            place += -place % each
        for _ in range(count):
            image = 0 if place % each == 0 else image
            places.append(place)
            images.append(image)
            place += 1
        image += 1
    return np.array(places), np.array(images)


def parts_of_strips(
    index: Index, B: int, N: int, swapped: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(strip, panel, parts) of each panel of x that a strip keeps any of, strip by strip.

    parts (., N / 32) : see `Items.outs`
    """
    n, across = B // 32, N // 32
    row, column = (a.reshape(-1) for a in np.indices((n, n)))
    rows = (index.block_rows[:, None] * np.int64(n) + row).reshape(-1)
    columns = (index.block_columns[:, None] * np.int64(n) + column).reshape(-1)
    if swapped:
        rows, columns = columns, rows
    strip, part = np.divmod(columns, across)
    width = int(rows.max(initial=0)) + 1
    lines, of = np.unique(strip * width + rows, return_inverse=True)
    parts = np.full((lines.size, across), -1, np.int64)
    parts[of.reshape(-1), part] = np.arange(rows.size)
    return lines // width, lines % width, parts


def way_of(index: Index, B: int) -> tuple[bool, Tile, Items]:
    """(whether x and dy change places, tile, items): few rows of blocks make fewer items so."""

    def way(swapped: bool) -> tuple[bool, Tile, Items]:
        tile = tile_of(index, B, swapped)
        return swapped, tile, Items(index, tile, swapped)

    ways = way(False), way(True)
    return ways[len(ways[1][2]) <= FEWER * len(ways[0][2])]


def tile_of(index: Index, B: int, swapped: bool = False) -> Tile:
    """Products of 64 columns where B is as large, or neighbouring columns keep the same rows.

    Three warpgroups begin with 168 registers for a thread, four with 128: should all together want
    more, some would wait for ever.
    """
    N = 64
    if B == 32:
        wide, narrow = (parts_of_strips(index, B, n, swapped)[0].size for n in (64, 32))
        N = 64 if PAIRED * wide <= narrow else 32
    if SIMULATED:
        return Tile(B, 1, 2, (N,), 32, 2, 0, 1, 1, 1, (128, 128), ITEM=4, STRIPS=2)
    if N == 64:
        return Tile(B, 2, 2, (64,), 32, 5, 0, 1, 4, 1, (72, 216), ITEM=4, STRIPS=3)
    return Tile(B, 3, 2, (32,), 32, 5, 0, 1, 4, 1, (80, 144), ITEM=4, STRIPS=4)


def plan(
    index: Index, tile: Tile, items: Items, steps: int, processors: int, edges: Edges
) -> tuple[np.ndarray | int, ...]:
    """What `cut_up` makes of the items; heads end with the strips of an item, and its stages."""
    across = tile.N // tile.PANEL
    own = items.strips[..., None] * across + np.arange(across)
    of_dy = np.where(items.strips[..., None] >= 0, own, -1).reshape(len(items), -1)
    loads = np.hstack(
        [coded(items.panels, 0, 0, edges[0]), coded(of_dy, 1, tile.X_PANELS, edges[1])]
    )
    absent = loads[..., 0] < 0
    loads = np.take_along_axis(loads, np.argsort(absent, axis=1, kind="stable")[..., None], axis=1)
    n_loads, strips = (~absent).sum(1), (items.strips >= 0).sum(1)
    heads = np.stack([n_loads, n_loads, strips, stages_of(tile, strips)], 1).astype(np.int32)

    rest = len(items) % processors
    sums = rest * tile.UNITS * tile.GROUPS * 64 * tile.N
    _, whole, pieces = plans.cut([STEP] * len(items), sums, processors, steps, 0.0, SUMS_IN_US)
    return plans.cut_up((heads, loads, items.images, items.outs), whole, pieces, steps)


def coded(panels: np.ndarray, operand: int, slot: int, edge: tuple[int, bool]) -> np.ndarray:
    """(items, panels, 2) int32, as `Share.copies`: each panel alone, to slots from that one on."""
    at_edge = (panels == edge[0]) & edge[1]
    code = slot + np.arange(panels.shape[1]) | (MAPS * operand + len(RUNS) * at_edge) << 8 | 1 << 16
    return np.stack([np.where(at_edge, 0, panels), code], -1).astype(np.int32)


def stages_of(tile: Tile, strips: np.ndarray) -> np.ndarray:
    """For how many steps the panels of an item with so many strips have room."""
    room = POOL - ROOMS * strips * tile.IMAGE
    panels = tile.X_PANELS + strips * (tile.N // tile.PANEL)
    return np.minimum(room // (panels * tile.PANEL_BYTES), tile.STAGES)
