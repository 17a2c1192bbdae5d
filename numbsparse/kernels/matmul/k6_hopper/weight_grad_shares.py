"""Which kept blocks of 16-bit values are computed together: those that share tiles of x and dy.

A tile is read from L2 once for a whole item, so an item should have many kept blocks on few lines:
pieces of a block row (`rows_of_blocks`), pairs of block rows (`pairs_of_rows`), block rows and
columns with many kept blocks where they cross (`regions`), or four block columns that keep the same
rows, as an LSTM's gates do (`fours`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil
from typing import NamedTuple

import numpy as np

from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import (
    MAPS,
    OPERANDS,
    RUNS,
    Edges,
    Tables,
    Tile,
)
from numbsparse.layout import Index

HALF_EMPTY = 1.1  # products, where one of all blocks full would be enough
NOT_FULL = 1.03  # the same, where most regions have all the products they may
FEW_ROUNDS = 4  # so many that the last, half empty, takes much of the time
IN_PAIRS, LEAST_COMMON = 128, 3  # rows among which pairs are looked for; their columns in common
TOGETHER = 1 << 20  # places for blocks among which regions are looked for
LEAST = 32  # block rows of them
LEAVES = 0.05  # blocks that one left behind counts for
FOUR, ROWS_OF_FOUR = 4, 8  # columns that keep the same blocks; block rows of their products


class Share(NamedTuple):
    """What one block of threads of a cluster does in an item."""

    x_loads: list[tuple[int, int]]  # (panel of the matrix, slot | ranks << 16)
    dy_loads: list[tuple[int, int]]
    arriving: int  # panels, from here and from the others
    counts: np.ndarray  # (GROUPS,) products of a warpgroup, or the number of its size
    where: np.ndarray  # (GROUPS, 2 UNITS) their factors lie; see `ptx.wgmma_units`
    outs: np.ndarray  # (GROUPS, OUTS) kept blocks, -1 where there is none

    @property
    def blocks(self) -> int:
        return np.unique(self.outs[self.outs >= 0]).size

    def copies(self, edges: Edges) -> list[tuple[int, int]]:
        """What to ask for: (panel, slot | map << 8 | ranks << 16), neighbours in one copy."""
        found = []
        for operand, loads in enumerate((self.x_loads, self.dy_loads)):
            (whole, part), k = edges[operand], 0
            while k < len(loads):
                panel, code = loads[k]
                run, which = 1, MAPS * operand
                if panel == whole and part:
                    panel, which = 0, which + len(RUNS)
                else:
                    ahead = loads[k : k + max(RUNS)]
                    same = [(p - k, c - k) for k, (p, c) in enumerate(ahead) if p < whole]
                    run = max(n for n in RUNS if n == 1 or same[:n] == [(panel, code)] * n)
                    which += RUNS.index(run)
                found.append((panel, code | which << 8))
                k += run
        return found


def plan(
    index: Index, tile: Tile, steps: int, processors: int, edges: Edges
) -> tuple[np.ndarray | int, ...]:
    """What `cut_up` makes of the items that end first on so many multiprocessors.

    `steps` make the batch, and `processors` blocks of threads run at once.
    """
    at_once, found = processors // tile.CLUSTER, []
    for items in ways_of(index, tile, at_once):
        in_order = sorted(items, key=lambda item: time_of(item, tile))[::-1]
        found.append((*cut_of(in_order, at_once, steps, tile), in_order))
    _, whole, pieces, chosen = min(found, key=lambda way: way[0])
    shares = [share for item in chosen for share in item]
    return plans.cut_up(tables(shares, tile, edges), whole * tile.CLUSTER, pieces, steps)


def tables(shares: list[Share], tile: Tile, edges: Edges) -> Tables:
    copies = [share.copies(edges) for share in shares]
    heads = np.array([(len(c), s.arriving) for c, s in zip(copies, shares, strict=True)], np.int32)
    loads = np.zeros((len(shares), max(map(len, copies), default=0), 2), np.int32)
    places = np.zeros((len(shares), tile.GROUPS, 1 + 2 * tile.UNITS), np.int32)
    outs = np.full((len(shares), tile.GROUPS, tile.OUTS), -1, np.int32)
    for k, share in enumerate(shares):
        loads[k, : len(copies[k])] = np.reshape(copies[k], (-1, 2))
        places[k, :, 0], places[k, :, 1:], outs[k] = share.counts, share.where, share.outs
    return heads.reshape(-1, 2), loads, places, outs


def alone(panels: Iterable[int], slot: int) -> list[tuple[int, int]]:
    """Loads for this block of threads alone, to slots from that one on."""
    return [(int(panel), slot + k | 1 << 16) for k, panel in enumerate(panels)]


def side_by_side(
    tile: Tile,
    x_loads: list[tuple[int, int]],
    dy_loads: list[tuple[int, int]],
    arriving: int,
    groups: list[tuple[int, int, int, np.ndarray]],
) -> Share:
    """One product for a warpgroup: (slots of both factors, its size, kept blocks) of each."""
    step = tile.PANEL_BYTES >> 4
    outs = np.full((tile.GROUPS, tile.OUTS), -1, np.int32)
    where = np.zeros((tile.GROUPS, 2 * tile.UNITS), np.int32)
    for group, (left, right, _, blocks) in enumerate(groups):
        outs[group, : blocks.size], where[group] = (
            blocks,
            np.array([left, right]) * step | step << 16,
        )
    counts = np.array([count for _, _, count, _ in groups], np.int32)
    return Share(x_loads, dy_loads, arriving, counts, where, outs)


def ways_of(index: Index, tile: Tile, places: int) -> Iterator[Iterable[list[Share]]]:
    """What the tile can share: fours of columns, pairs of block rows, one, or regions by size."""
    if tile.B == 32 and len(tile.SIZES) > 1:
        yield fours(index, tile)
    elif tile.B == 64 and tile.UNITS == 1:
        yield pairs_of_rows(index, tile)
    elif tile.B == 128:
        yield rows_of_blocks(index, tile)
    else:
        for products in sizes(index, tile, places):
            yield regions(index, tile, products)


def sizes(index: Index, tile: Tile, places: int) -> list[int]:
    """Products of a region: the most; so many that the regions fill all places once or a few times
    over; and where once is enough, more, which share more."""
    most = tile.GROUPS * tile.UNITS
    products = max(index.block_rows.size, 1) / tile.PAIR
    even = ceil(HALF_EMPTY * products / places)
    rounds = ceil(NOT_FULL * products / (most * places))
    found = {even, 2 * even, 4 * even, most}
    if 1 < rounds <= FEW_ROUNDS:
        found.add(ceil(NOT_FULL * products / (rounds * places)))
    return sorted({min(n, most) for n in found})


# Microseconds as measured on an H200; only their ratios decide.


def copying(panels: int, tile: Tile) -> float:
    """Until the panels of a step are in one multiprocessor, and the next step begins."""
    start, row = (0.3, 0.55e-3) if tile.B == 32 else (0.25, 0.6e-3)
    return start + panels * tile.DEPTH * row


def from_l2(panels: int, tile: Tile) -> float:
    """Until the L2 cache has given the panels of a step to all multiprocessors."""
    return panels * tile.PANEL_BYTES / 8.5e6


def time_of(item: list[Share], tile: Tile) -> float:
    """Of a step of an item: its copies or its products, whatever takes longer."""
    panels, blocks = (max(n) for n in zip(*((s.arriving, s.blocks) for s in item), strict=True))
    products = blocks * tile.B**2 * (2 if tile.B == 32 else 1)
    return max(copying(panels, tile), products * tile.DEPTH / 4e6)


def cut_of(items: list[list[Share]], places: int, steps: int, tile: Tile) -> tuple[float, int, int]:
    """`cut` of items, longest first.

    However they are cut, the copies take their time, from the L2 cache and, the first of each
    panel, from memory.
    """
    loads = [[share.x_loads, share.dy_loads] for item in items for share in item]
    panels = sum(len(panels) for operands in loads for panels in operands)
    first = sum(len({p for share in loads for p, _ in share[k]}) for k in range(OPERANDS))
    memory = 2.4  # times as long as from the L2 cache
    least = steps * max(from_l2(panels, tile), memory * from_l2(first, tile))
    rest = items[len(items) // places * places :]
    sums = sum(share.blocks for item in rest for share in item) * tile.B**2
    rate = 7e4 if tile.UNITS > 1 else 3e5  # pairs of blocks leave theirs number by number
    times = [time_of(item, tile) for item in items]
    return plans.cut(times, sums, places, steps, least, rate, plans.TO_ADD)


def rows_of_blocks(index: Index, tile: Tile) -> Iterator[list[Share]]:
    """Even pieces of the block rows, so that all of an item takes the same tile of x."""
    indptr, columns, _ = index.rows
    for row in np.flatnonzero(np.diff(indptr)):
        yield from pieces_of_row(tile, int(row), columns, np.arange(indptr[row], indptr[row + 1]))


def pieces_of_row(
    tile: Tile, row: int, columns: np.ndarray, blocks: np.ndarray
) -> Iterator[list[Share]]:
    """Items of some kept blocks of a block row."""
    if blocks.size:
        count = -(-blocks.size // (tile.CLUSTER * _blocks_in(tile)))
        for piece in np.array_split(blocks, count):
            yield _piece_of_row(tile, row, columns, piece)


def _blocks_in(tile: Tile) -> int:
    """Kept blocks that one block of threads can compute."""
    panels = tile.B // tile.PANEL
    room = tile.SLOTS // panels - 1  # without x
    outs = tile.OUTS if tile.B == 128 else tile.GROUPS * tile.OUTS
    return min(outs, room)


def _piece_of_row(tile: Tile, row: int, columns: np.ndarray, blocks: np.ndarray) -> list[Share]:
    panels = tile.B // tile.PANEL
    parts = np.array_split(blocks, tile.CLUSTER)
    busy = [rank for rank, part in enumerate(parts) if part.size]
    mask = sum(1 << rank for rank in busy)
    shares = []
    for rank, part in enumerate(parts):
        x_loads = [
            (row * panels + p, p | mask << 16) for p in range(panels) if busy[p % len(busy)] == rank
        ]
        dy_loads = [
            (int(columns[block]) * panels + p, panels * (1 + k) + p | 1 << rank + 16)
            for k, block in enumerate(part)
            for p in range(panels)
        ]
        every, whole = np.arange(part.size), tile.B == 128
        dealt = [every] * tile.GROUPS if whole else np.array_split(every, tile.GROUPS)
        groups = [
            (group * whole, panels * (1 + int(own[:1].sum())), own.size, part[own])
            for group, own in enumerate(dealt)
        ]
        arriving = (panels + len(dy_loads)) if part.size else 0
        shares.append(side_by_side(tile, x_loads, dy_loads, arriving, groups))
    return shares


def pairs_of_rows(index: Index, tile: Tile) -> Iterator[list[Share]]:
    """Pairs with the most columns in common first, then what is left of each row."""
    indptr, columns, _ = index.rows
    kept_rows = np.flatnonzero(np.diff(indptr))
    for top in range(0, kept_rows.size, IN_PAIRS):
        rows = kept_rows[top : top + IN_PAIRS]
        used = np.unique(np.concatenate([columns[indptr[r] : indptr[r + 1]] for r in rows]))
        ids = np.full((rows.size, used.size), -1)
        for k, r in enumerate(rows):
            blocks = np.arange(indptr[r], indptr[r + 1])
            ids[k, np.searchsorted(used, columns[blocks])] = blocks
        left = ids >= 0
        for pair, own, both in _pairs(left, tile.OUTS):
            parts = [(ids[r, c], ids[r, both]) for r, c in zip(pair, own, strict=True)]
            yield [_share_of_pair(tile, rows[list(pair)], columns, parts)]
        for k, r in enumerate(rows):
            yield from pieces_of_row(tile, int(r), columns, ids[k, left[k]])


def _pairs(
    left: np.ndarray, most: int
) -> Iterator[tuple[tuple[int, int], list[np.ndarray], np.ndarray]]:
    """(two rows, what each has alone, what both have), up to `most` a row, taken out of `left`."""
    weights = left.astype(np.float32)
    common = weights @ weights.T
    np.fill_diagonal(common, 0)
    while common.max(initial=0) >= LEAST_COMMON:
        i, j = divmod(int(common.argmax()), common.shape[1])
        both = np.flatnonzero(left[i] & left[j])[:most]
        left[[i, j], both[:, None]] = False
        own = []
        for r in (i, j):
            own.append(np.flatnonzero(left[r])[: most - both.size])
            left[r, own[-1]] = False
            weights[r] = left[r]
        for r in (i, j):
            common[r] = common[:, r] = weights @ weights[r]
            common[r, r] = 0
        yield (i, j), own, both


def _share_of_pair(tile: Tile, rows: np.ndarray, columns: np.ndarray, parts) -> Share:
    """Slots of x for both rows, then dy: what the first has alone, both, the second alone."""
    (first, both), (second, of_second) = parts
    order = np.concatenate([first, both, second])
    groups = [
        (0, 2, first.size + both.size, np.concatenate([first, both])),
        (1, 2 + first.size, both.size + second.size, np.concatenate([of_second, second])),
    ]
    dy_loads = alone(columns[order], 2)
    return side_by_side(tile, alone(rows, 0), dy_loads, 2 + order.size, groups)


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
            yield [_share_of_region(tile, first + region.rows, used[region.columns], region.ids)]


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


def _share_of_region(tile: Tile, rows: np.ndarray, columns: np.ndarray, ids: np.ndarray) -> Share:
    """Slots of x, then of dy; and the products, dealt evenly to the warpgroups."""
    step = tile.PANEL_BYTES >> 4
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
    loads = alone(rows, 0), alone(columns, rows.size)
    return Share(*loads, rows.size + columns.size, counts, *flat)


def in_fours(index: Index) -> tuple[bool]:
    """Whether columns 0 to 3 keep the same block rows, 4 to 7 do, and so on."""
    indptr, rows, _ = index.columns
    lengths = np.diff(indptr)
    if lengths.size == 0 or lengths.size % FOUR:
        return (False,)
    lengths = lengths.reshape(-1, FOUR)
    if (lengths != lengths[:, :1]).any():
        return (False,)
    # Column by column, their rows lie one list after another: those of a four are one list four
    # times over.
    place = np.arange(rows.size) - np.repeat(indptr[:-1], lengths.ravel())
    first = np.repeat(indptr[:-1:FOUR], lengths.sum(1))
    return (bool((rows == rows[first + place]).all()),)


def fours(index: Index, tile: Tile) -> Iterator[list[Share]]:
    """Pieces of the rows that a four keeps; the whole ones side by side, for their tiles of dy."""
    indptr, rows, blocks = index.columns
    for column in range(0, len(indptr) - 1, FOUR):
        lists = [slice(indptr[c], indptr[c + 1]) for c in range(column, column + FOUR)]
        kept = rows[lists[0]]
        ids = np.stack([blocks[of] for of in lists])  # (four, kept rows)
        for first in range(0, kept.size, ROWS_OF_FOUR):
            piece = slice(first, first + ROWS_OF_FOUR)
            yield [_share_of_four(tile, column, kept[piece], ids[:, piece])]


def _share_of_four(tile: Tile, column: int, rows: np.ndarray, ids: np.ndarray) -> Share:
    """Slots of dy for the four columns, then one of x for each row."""
    count = -(-rows.size * tile.B // min(tile.SIZES))
    groups = [
        (2 * group, FOUR, count, ids[2 * group : 2 * group + 2].T.ravel())
        for group in range(tile.GROUPS)
    ]
    loads = alone(rows, FOUR), alone(range(column, column + FOUR), 0)
    return side_by_side(tile, *loads, FOUR + rows.size, groups)
