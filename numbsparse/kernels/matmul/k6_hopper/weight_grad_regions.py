"""Regions: block rows and block columns that have many kept blocks where they cross.

All tiles of x and of dy that a region has are read once for all of its kept blocks, so it grows by
the row or column that brings it most blocks, as long as there is room for their sums and tiles. A
row or column of which few blocks would be left behind comes first among equals: these would be
read for themselves later. On a random layout of density 0.1 and 256 x 256 blocks of B = 32, regions
of 32 kept blocks read 0.64 tiles for each, regions of 52 0.57, where pieces of a block row read
1.04.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import Share, Tile
from numbsparse.layout import Index

TOGETHER = 1 << 20  # places for blocks among which regions are looked for
LEAST = 32  # block rows of them
LEAVES = 0.05  # blocks that one left behind counts for


class Region(NamedTuple):
    rows: np.ndarray
    columns: np.ndarray
    ids: np.ndarray  # (rows, columns) kept blocks, -1 where there is none, or in another region


def regions(index: Index, tile: Tile, products: int) -> Iterator[list[Share]]:
    """An item of at most so many products for each region."""
    indptr, columns, _ = index.rows
    at_once = max(TOGETHER // len(index.columns.indptr), LEAST)
    for first in range(0, len(indptr) - 1, at_once):
        rows = np.arange(first, min(first + at_once, len(indptr) - 1))
        blocks = np.arange(indptr[rows[0]], indptr[rows[-1] + 1])
        used, place = np.unique(columns[blocks], return_inverse=True)
        ids = np.full((rows.size, used.size), -1)
        ids[np.repeat(rows - first, np.diff(indptr[first : rows[-1] + 2])), place] = blocks
        for region in _grown(ids, tile, products):
            yield [_share(tile, first + region.rows, used[region.columns], region.ids)]


def _grown(ids: np.ndarray, tile: Tile, products: int) -> Iterator[Region]:
    """Regions, until every kept block is in one."""
    left = (ids >= 0).astype(np.int32)  # 1 for each block that is in no region
    # Of rows, then of columns; float32, for its rounding decides between lines that bring the same.
    counts = np.concatenate([left.sum(1), left.sum(0)]).astype(np.float32)
    while counts.any():
        rows, columns = _grow(left, counts, tile, products)
        here = np.ix_(rows, columns)
        taken = left[here]
        yield Region(rows, columns, np.where(taken > 0, ids[here], -1))
        left[here] = 0
        counts[rows] -= taken.sum(1)
        counts[len(left) + columns] -= taken.sum(0)


def _grow(
    left: np.ndarray, counts: np.ndarray, tile: Tile, products: int
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of a region, in order."""
    n = len(left)
    inside = np.zeros(counts.size, bool)
    brings = np.zeros(counts.size, np.int32)  # blocks, if taken inside
    for room in range(tile.SLOTS, 0, -1):
        opens = _opened(left, inside[:n], brings, tile)
        free = products - opens[:n][inside[:n]].sum()
        fits = ~inside & (brings > 0) & (opens <= free)
        line = np.where(fits, (1 + LEAVES) * brings - LEAVES * counts, -np.inf).argmax()
        if not fits[line]:  # begins, perhaps once more, with a row that meets no column inside
            apart = np.where(inside[:n] | (brings[:n] > 0), 0, counts[:n])
            line = apart.argmax()
            if not apart[line] or not free or room < 2:
                break
        inside[line] = True
        if line < n:
            brings[n:] += left[line]
        else:
            brings[:n] += left[:, line - n]
    used = inside & (brings > 0)
    return np.flatnonzero(used[:n]), np.flatnonzero(used[n:])


def _opened(left: np.ndarray, inside: np.ndarray, brings: np.ndarray, tile: Tile) -> np.ndarray:
    """The products that each row has, or would have inside, and those that each column adds."""
    if tile.PAIR == 1:
        return brings
    n = len(left)
    even = inside & (brings[:n] & 1 == 0)  # rows without a product that has one block alone
    return np.concatenate([brings[:n] + 1 >> 1, left[even].sum(0)])


def _share(tile: Tile, rows: np.ndarray, columns: np.ndarray, ids: np.ndarray) -> Share:
    """Slots of x, then of dy; and the products, dealt evenly to the warpgroups."""
    step, mine = tile.PANEL_BYTES >> 4, 1 << 16
    x_loads = [(int(row), k | mine) for k, row in enumerate(rows)]
    dy_loads = [(int(column), rows.size + k | mine) for k, column in enumerate(columns)]
    products = [
        (k, at[first : first + tile.PAIR])
        for k, at in enumerate(map(np.flatnonzero, ids >= 0))
        for first in range(0, at.size, tile.PAIR)
    ]
    counts = np.zeros(tile.GROUPS, np.int32)
    where = np.zeros((tile.GROUPS, tile.UNITS, 2), np.int32)
    outs = np.full((tile.GROUPS, tile.UNITS, tile.PAIR), -1, np.int32)
    for n, (k, at) in enumerate(products):
        group, unit = divmod(n, -(-len(products) // tile.GROUPS))
        counts[group] = unit + 1
        x, dy = k * step, (rows.size + at) * step
        apart = dy[-1] - dy[0] << 16
        where[group, unit] = (dy[0] | apart, x) if tile.PAIR == 2 else (x, dy[0])
        outs[group, unit, : at.size] = ids[k, at]
    flat = where.reshape(tile.GROUPS, -1), outs.reshape(tile.GROUPS, -1)
    return Share(x_loads, dy_loads, rows.size + columns.size, counts, *flat)
