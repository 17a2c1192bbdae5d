"""Rectangles of block rows and columns, for a block size of which a product takes two kept blocks.

Block rows that keep the same columns are taken together, and columns that leave few products with
one kept block alone: it would cost as much as two. Blocks of threads in a cluster have block rows
of their own and the same block columns, so tiles of dy go to all that keep a block there. On a
random layout of density 0.1 and 256 x 256 blocks of B = 32, 8 rows read 0.88 tiles per kept block,
where a block row alone needs 1.04, and 3 % of the products are half empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
LIKELY = 4  # ways that are looked at closely


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
    tried: list[tuple[float, int, int]] = []
    groups = {}
    for rows in ROWS:
        lines = grouped(index.rows, len(index.columns.indptr) - 1, tile.CLUSTER * rows)
        groups[rows] = np.sort(lines, axis=1)  # neighbours come in one copy
        slots = tile.SLOTS
        while slots > rows + LEAST_COLUMNS:
            smaller = tile._replace(SLOTS=slots)
            found = list(_rectangles(index, smaller, groups[rows], _at_best))
            tried.append((_time(found, tile, places), rows, slots))
            if len(found) > 2 * places:
                break
            slots = min(slots, max((each.panels for each in found), default=0)) - 1
    likely = [
        list(_rectangles(index, tile._replace(SLOTS=slots), groups[rows], _together))
        for _, rows, slots in sorted(tried)[:LIKELY]
    ]
    for rectangle in min(likely, key=lambda found: _time(found, tile, places)):
        yield _shares(tile, rectangle)


def _time(found: list[Rectangle], tile: Tile, places: int) -> float:
    panels = [rectangle.panels for rectangle in found]
    times = [copying(n, tile) for n in sorted(panels)[::-1]]
    return last_end(times, places) + from_l2(sum(panels), tile)


def _rectangles(
    index: Index, tile: Tile, groups: np.ndarray, choose: Callable[..., np.ndarray]
) -> Iterator[Rectangle]:
    indptr, columns, _ = index.rows
    rows = groups.shape[1] // tile.CLUSTER
    for lines in groups:
        spans = [slice(indptr[r], indptr[r + 1]) if r >= 0 else slice(0, 0) for r in lines]
        used = np.unique(np.concatenate([columns[at] for at in spans]))
        ids = np.full((tile.CLUSTER, rows, used.size), -1)
        for k, at in enumerate(spans):
            line = ids[k // rows, k % rows]
            line[np.searchsorted(used, columns[at])] = np.arange(at.start, at.stop)
        while used.size:
            taken = choose(ids >= 0, tile)
            yield Rectangle(lines, used[taken], ids[:, :, taken])
            used, ids = used[~taken], ids[:, :, ~taken]


def _at_best(kept: np.ndarray, tile: Tile) -> np.ndarray:
    """Which columns a rectangle takes of (ranks, rows, columns), if no product is half empty."""
    counts = kept[:, :, : tile.SLOTS * tile.CLUSTER].cumsum(2)
    return _first(kept, counts, -(-counts.sum(1) // 2), tile, 0)


def _together(kept: np.ndarray, tile: Tile) -> np.ndarray:
    """Which columns a rectangle takes of (ranks, rows, columns).

    The first ones, and then, as long as there is room, the one that fills most of the products in
    which a kept block is alone.
    """
    counts = kept[:, :, : tile.SLOTS * tile.CLUSTER].cumsum(2)
    spare = kept.shape[1] // 2
    taken = _first(kept, counts, (-(-counts // 2)).sum(1), tile, spare)
    needed = _needed(kept, tile)
    while True:
        inside = kept[:, :, taken].sum(2)[:, :, None]
        alone = inside % 2 == 1
        opened, filled = (kept & ~alone).sum(1), (kept & alone).sum(1)
        products = (-(-inside // 2)).sum(1) + opened
        begun = (inside + kept > 0).sum(1)
        slots = begun.max(0) + (needed[:, taken].sum(1)[:, None] + needed).max(0)
        fits = ~taken & (products.max(0) <= tile.GROUPS * tile.UNITS) & (slots <= tile.SLOTS)
        if not fits.any():
            return taken
        gain = (filled - opened - begun).sum(0)
        taken[np.where(fits, gain, gain.min() - 1).argmax()] = True


def _first(
    kept: np.ndarray, counts: np.ndarray, products: np.ndarray, tile: Tile, spare: int
) -> np.ndarray:
    """The first columns whose products and slots are there, `spare` slots left; one at least."""
    needed = _needed(kept[:, :, : counts.shape[2]], tile)
    slots = (counts > 0).sum(1).max(0) + needed.cumsum(1).max(0)
    fit = (products.max(0) <= tile.GROUPS * tile.UNITS) & (slots <= tile.SLOTS - spare)
    return np.arange(kept.shape[2]) < max(int(fit.sum()), 1)


def _needed(kept: np.ndarray, tile: Tile) -> np.ndarray:
    """Whose tile of dy takes a slot, of each rank; of more than two, the same one in all."""
    needed = np.asarray(kept.any(1))
    return needed if tile.CLUSTER <= 2 else np.asarray(needed.any(0))[None]


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
