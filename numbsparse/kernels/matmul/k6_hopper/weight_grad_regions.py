"""Rectangles of block rows and columns, for a block size of which a product takes two kept blocks.

Block rows that keep the same columns are taken together. Blocks of threads in a cluster have block
rows of their own and the same block columns, so tiles of dy go to all that keep a block there. On a
random layout of density 0.1 and 256 x 256 blocks of B = 32, 8 rows read 0.88 tiles per kept block,
where a block row alone needs 1.04.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.steps import grouped
from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import (
    Share,
    Tile,
    copying,
    from_l2,
    last_end,
)
from numbsparse.layout import Index

ROWS = (1, 2, 4, 8)  # block rows of a block of threads
LEAST_COLUMNS = 4


class Rectangle(NamedTuple):
    """Kept blocks of some block rows for each block of threads, and of columns for all of them."""

    lines: np.ndarray  # block rows, ranks * rows of them, -1 for none
    columns: np.ndarray  # block columns
    ids: np.ndarray  # (ranks, rows, columns) kept blocks, -1 where there is none

    @property
    def panels(self) -> int:
        """What it reads from L2."""
        kept = self.ids >= 0
        return int(kept.any(2).sum()) + self.columns.size


def regions(index: Index, tile: Tile, places: int) -> Iterator[list[Share]]:
    """An item for each of the rectangles that bring their panels in the least time.

    The more rows a rectangle has, the fewer columns fit in. Where there are few of them, smaller
    ones may keep all places busy.
    """
    best: list[Rectangle] = []
    least = float("inf")
    for rows in ROWS:
        groups = grouped(index.rows, len(index.columns.indptr) - 1, tile.CLUSTER * rows)
        groups.sort(axis=1)  # neighbours come in one copy
        for slots in range(tile.SLOTS, rows + LEAST_COLUMNS, -1):
            tried = list(_rectangles(index, tile._replace(SLOTS=slots), groups))
            panels = [rectangle.panels for rectangle in tried]
            times = [copying(n, tile) for n in sorted(panels)[::-1]]
            time = max(from_l2(sum(panels), tile), last_end(times, places))
            if time < least:
                best, least = tried, time
            if len(tried) > 2 * places:
                break
    for rectangle in best:
        yield _shares(tile, rectangle)


def _rectangles(index: Index, tile: Tile, groups: np.ndarray) -> Iterator[Rectangle]:
    indptr, columns, _ = index.rows
    rows = groups.shape[1] // tile.CLUSTER
    units, most = tile.GROUPS * tile.UNITS, tile.SLOTS * tile.CLUSTER
    for lines in groups:
        spans = [slice(indptr[r], indptr[r + 1]) if r >= 0 else slice(0, 0) for r in lines]
        used = np.unique(np.concatenate([columns[at] for at in spans]))
        ids = np.full((tile.CLUSTER, rows, used.size), -1)
        for k, at in enumerate(spans):
            line = ids[k // rows, k % rows]
            line[np.searchsorted(used, columns[at])] = np.arange(at.start, at.stop)
        while used.size:
            kept = ids[:, :, :most] >= 0
            counts = kept.cumsum(2)
            products = (-(-counts // 2)).sum(1).max(0)
            needed = kept.any(1)
            taken = needed.cumsum(1).max(0) if tile.CLUSTER <= 2 else needed.any(0).cumsum()
            slots = (counts > 0).sum(1).max(0) + taken
            fit = int(((products <= units) & (slots <= tile.SLOTS)).sum())
            yield Rectangle(lines, used[:fit], ids[:, :, :fit])
            used, ids = used[fit:], ids[:, :, fit:]


def _shares(tile: Tile, rectangle: Rectangle) -> list[Share]:
    """The shares of a rectangle: a product takes two tiles of dy and one of x."""
    lines, columns, ids = rectangle
    rows, step = ids.shape[1], tile.PANEL_BYTES >> 4
    kept: np.ndarray = ids >= 0
    needed = np.asarray(kept.any(1))  # (ranks, columns)
    tops = kept.any(2).sum(1).max()  # slots below are those of x
    slots = _slots(needed, tops)
    dy_loads: list[list[tuple[int, int]]] = [[] for _ in range(tile.CLUSTER)]
    for c, column in enumerate(columns):
        ranks = np.flatnonzero(needed[:, c])
        loader = min(ranks, key=lambda rank: len(dy_loads[rank]))
        mask = int((1 << ranks).sum())
        dy_loads[loader].append((int(column), int(slots[c]) | mask << 16))
    shares = []
    for rank in range(tile.CLUSTER):
        x_loads: list[tuple[int, int]] = []
        words: list[tuple[int, int]] = []
        outs: list[tuple[int, int]] = []
        for k in np.flatnonzero(kept[rank].any(1)):
            slot = len(x_loads)
            x_loads.append((int(lines[rank * rows + k]), slot | 1 << rank + 16))
            at = np.flatnonzero(kept[rank, k])
            at = at[np.argsort(slots[at])]
            for pair in range(0, at.size, 2):
                low, high = at[pair], at[min(pair + 1, at.size - 1)]
                apart = (slots[high] - slots[low]) * step
                words.append((slots[low] * step | apart << 16, slot * step))
                outs.append((ids[rank, k, low], ids[rank, k, high] if high != low else -1))
        arriving = len(x_loads) + int(needed[rank].sum())
        shares.append(_share(tile, x_loads, dy_loads[rank], arriving, words, outs))
    return shares


def _slots(needed: np.ndarray, first: int) -> np.ndarray:
    """A slot for each tile, free in all the blocks of threads that need it."""
    slots = np.zeros(needed.shape[1], np.int64)
    order = np.argsort(-needed.sum(0), kind="stable")
    free = np.full(needed.shape[0], first)
    for c in order:
        ranks = needed[:, c]
        slots[c] = free[ranks].max()
        free[ranks] = slots[c] + 1
    return slots


def _share(tile, x_loads, dy_loads, arriving, words, outs) -> Share:
    """The products of a region dealt to the warpgroups."""
    counts = np.zeros(tile.GROUPS, np.int32)
    where = np.zeros((tile.GROUPS, 2 * tile.UNITS), np.int32)
    kept = np.full((tile.GROUPS, tile.OUTS), -1, np.int32)
    for group, part in enumerate(np.array_split(np.arange(len(words)), tile.GROUPS)):
        counts[group] = part.size
        if part.size:
            where[group, : 2 * part.size] = np.ravel([words[k] for k in part])
            kept[group, : 2 * part.size] = np.ravel([outs[k] for k in part])
    return Share(x_loads, dy_loads, arriving, counts, where, kept)
