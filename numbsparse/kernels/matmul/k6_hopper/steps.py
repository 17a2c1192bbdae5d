"""What a block of threads does step by step, worked out once for every layout."""

from __future__ import annotations

from heapq import heapreplace
from typing import Any

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.tile import Tile
from numbsparse.layout import Index, Walk

MATCHED = 4096  # lines: more of them are grouped as they come
EXCHANGES, EXCHANGED = 16, 1024  # rounds at most, of at most so many lines
READ_AHEAD = 64  # records
LAST = 1 << 31  # in a mask: the group's last step
BEFORE, MOST = 26, 31  # in a mask, from this bit on: kept blocks of the shares before, at most
EDGE = 1 << 31  # in a kept block: it reaches beyond the edge along the sum
TILE_STEPS = 3  # what a tile costs beside its steps


class Lengths:
    """Where the steps of each group begin; the same object for every launch with a layout."""

    def __init__(self, starts: np.ndarray):
        self.starts, self.steps = starts[:-1], np.diff(starts)


def steps_of(index: Index, turned: bool, tile: Tile, ragged: bool) -> tuple[Any, ...]:
    """(records, lines, lengths) of the groups of output block columns.

    lines : (groups, COLUMNS), the output block columns of a group, -1 for none
    records : (steps + READ_AHEAD, RECORD); of each step
        a mask for each share of SHARE columns: bit e * SHARE + g where its column g has a block at
        the e-th input, the number of blocks BEFORE its own, and LAST;
        the number of inputs, and 256 times that of blocks;
        the inputs, counted in tiles of x; the kept blocks in order of the masks' bits, counted in
        PARTS, and EDGE.

    Turned, w.T is meant: output columns are the block rows of w. `ragged` says whether the last
    input block reaches beyond the edge.
    """
    walk, others = (index.rows, index.columns) if turned else (index.columns, index.rows)
    n_inputs = len(others.indptr) - 1
    lines = grouped(walk, n_inputs, tile.COLUMNS)
    groups, inputs, columns, blocks = _sorted_by_group(walk, lines)

    # A tile of x for every input that a group meets; for every part of it.
    first = np.flatnonzero(np.diff(groups, prepend=-1) | np.diff(inputs, prepend=-1))
    counts = np.diff(first, append=len(groups))
    first, counts = np.repeat(first, tile.PARTS), np.repeat(counts, tile.PARTS)
    parts = np.arange(len(first)) % tile.PARTS
    x_groups, x_tiles = groups[first], inputs[first] * tile.PARTS + parts

    step, place = _packed(x_groups, counts, tile)
    owner = np.zeros(step[-1] + 1 if len(step) else 0, np.int64)
    owner[step] = x_groups
    absent = np.setdiff1d(np.arange(len(lines)), owner)  # these have a step without inputs
    order = np.argsort(np.concatenate([owner, absent]), kind="stable")
    starts = np.searchsorted(np.concatenate([owner, absent])[order], np.arange(len(lines) + 1))
    row = np.argsort(order)[step]

    of = np.repeat(np.arange(len(row)), counts)  # of each block, its tile of x
    block = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    share, column = np.divmod(columns[block], tile.SHARE)
    bit = place[of] * tile.SHARE + column
    kept = blocks[block] * tile.PARTS + parts[of]
    kept += EDGE * (ragged & (x_tiles[of] // tile.PARTS == n_inputs - 1))
    in_order = np.lexsort((bit, share, row[of]))
    slot = np.arange(len(of)) - np.searchsorted(row[of][in_order], row[of][in_order])

    records = np.zeros((len(order) + READ_AHEAD, tile.RECORD), np.int64)
    masks, first_input = records[:, : tile.SHARES], tile.SHARES + 1
    np.add.at(masks, (row[of], share), 1 << bit)
    for later in range(1, tile.SHARES):
        np.add.at(masks[:, later], row[of], (share < later) << BEFORE)
    masks[starts[1:] - 1] += LAST
    np.add.at(records[:, tile.SHARES], row, 1 + 256 * counts)
    records[row, first_input + place] = x_tiles
    records[row[of][in_order], first_input + tile.INPUTS + slot] = kept[in_order]
    return records.astype(np.uint32).view(np.int32), lines, Lengths(starts)


def schedule(
    index: Index, lengths: Lengths, row_tiles: int, units: int, together: int = 1
) -> tuple[Any, ...]:
    """(tiles, starts): what each unit computes in turn, (group, tile of rows, first step, end).

    A unit is a cluster, and all run at once. Rows change slowly, so that their x stays in the L2
    cache; within them the longest group comes first, and each goes to the unit that is free first.
    Tiles of `together` neighbouring rows follow one another, so that blocks of w stay there too.
    """
    groups = np.argsort(-lengths.steps, kind="stable").tolist()
    own: list[list[tuple[int, int]]] = [[] for _ in range(min(units, row_tiles * len(groups)))]
    free = [(0, unit) for unit in range(len(own))]
    for top in range(0, row_tiles, together):
        for group in groups:
            for rows in range(top, min(top + together, row_tiles)):
                time, unit = free[0]
                own[unit].append((group, rows))
                heapreplace(free, (time + int(lengths.steps[group]) + TILE_STEPS, unit))
    starts = np.cumsum([0] + [len(tiles) for tiles in own])
    flat = np.array([tile for tiles in own for tile in tiles], np.int32)
    first = lengths.starts[flat[:, 0]]
    steps = np.stack([first, first + lengths.steps[flat[:, 0]]], axis=1, dtype=np.int32)
    return np.hstack([flat, steps]), starts.astype(np.int32)


def grouped(walk: Walk, n_inputs: int, size: int) -> np.ndarray:
    """(groups, size) int32: lines that meet many inputs together, -1 for none.

    Pairs with the largest overlap are matched, then pairs of pairs; and as long as two groups gain
    by it, they exchange a line.
    """
    n_lines = len(walk.indptr) - 1
    groups = np.arange(n_lines, dtype=np.int32)[:, None]
    if n_lines > MATCHED:
        groups = np.append(groups, np.full(-n_lines % size, -1, np.int32))
        return groups.reshape(-1, size)
    meets: np.ndarray = np.zeros((n_lines, n_inputs), np.float32)
    meets[np.repeat(np.arange(n_lines), np.diff(walk.indptr)), walk.indices] = 1
    own = meets
    while groups.shape[1] < size:
        if len(groups) % 2:
            groups = np.vstack([groups, np.full((1, groups.shape[1]), -1, np.int32)])
            meets = np.vstack([meets, np.zeros((1, n_inputs), np.float32)])
        pairs = _pairs(meets)
        groups = np.hstack([groups[pairs[:, 0]], groups[pairs[:, 1]]])
        meets = np.maximum(meets[pairs[:, 0]], meets[pairs[:, 1]])
    return _exchanged(groups, own)


def _pairs(meets: np.ndarray) -> np.ndarray:
    """(n / 2, 2): every line with the one of those left that shares most inputs with it."""
    overlap = meets @ meets.T
    np.fill_diagonal(overlap, -1)
    left = np.ones(len(meets), bool)
    pairs = []
    for line in np.argsort(-meets.sum(1), kind="stable"):
        if left[line]:
            left[line] = False
            other = int(np.argmax(np.where(left, overlap[line], -2)))
            left[other] = False
            pairs.append((line, other))
    return np.array(pairs, np.int64).reshape(-1, 2)


def _exchanged(groups: np.ndarray, meets: np.ndarray) -> np.ndarray:
    """The groups after exchanges of two lines that leave fewer inputs to both together."""
    size, lines = groups.shape[1], groups.reshape(-1).copy()
    group = np.arange(lines.size) // size
    meets = np.vstack([meets, np.zeros((1, meets.shape[1]), np.float32)])  # of line -1: none
    for _ in range(EXCHANGES if lines.size <= EXCHANGED else 0):
        own = meets[lines]
        held = own.reshape(len(groups), size, -1).sum(1)
        inputs = np.repeat((held > 0).sum(1), size).astype(np.float32)
        others = (np.repeat(held, size, axis=0) > own).astype(np.float32)
        # [i, j]: inputs of the group of i if line j stood in the place of line i
        with_other = others.sum(1)[:, None] + own.sum(1) - others @ own.T
        gain = inputs[:, None] + inputs - with_other - with_other.T
        gain[group[:, None] == group] = 0
        best, most = gain.argmax(1), gain.max(1)
        free = np.ones(len(groups), bool)
        for i in np.argsort(-most, kind="stable")[: np.count_nonzero(most > 0)]:
            a, b = group[i], group[best[i]]
            if free[a] and free[b]:
                lines[[i, best[i]]] = lines[[best[i], i]]
                free[[a, b]] = False
        if free.all():
            break
    return lines.reshape(-1, size)


def _sorted_by_group(walk: Walk, lines: np.ndarray) -> list[np.ndarray]:
    """Of each kept block its group, input, column in the group, and number; in this order."""
    flat = lines.reshape(-1)
    place = np.empty(len(walk.indptr) - 1, np.int64)
    place[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    group, column = np.divmod(np.repeat(place, np.diff(walk.indptr)), lines.shape[1])
    inputs, blocks = walk.indices.astype(np.int64), walk.blocks.astype(np.int64)
    order = np.lexsort((column, inputs, group))
    return [array[order] for array in (group, inputs, column, blocks)]


def _packed(groups: np.ndarray, counts: np.ndarray, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
    """The step of each tile of x, and its place there: as many as fit into one, in order."""
    steps, places = [], []
    step, group, place, blocks = -1, -1, 0, 0
    for own, count in zip(groups.tolist(), counts.tolist(), strict=True):
        if own != group or place == tile.INPUTS or blocks + count > tile.BLOCKS:
            step, group, place, blocks = step + 1, own, 0, 0
        steps.append(step)
        places.append(place)
        place, blocks = place + 1, blocks + count
    return np.array(steps, np.int64), np.array(places, np.int64)
