"""What a block of threads does step by step, worked out once for every layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.tile import Tile
from numbsparse.kernels.parts.deal import Lengths
from numbsparse.kernels.parts.groups import grouped
from numbsparse.layout import Index, Walk

READ_AHEAD = 64  # records
LAST = 1 << 31  # in a mask: the group's last step
BEFORE, MOST = 26, 31  # in a mask, from this bit on: kept blocks of the shares before, at most
EDGE = 1 << 31  # in a kept block: it reaches beyond the edge along the sum


def steps_of(index: Index, transposed: bool, tile: Tile, ragged: bool) -> tuple[Any, ...]:
    """(records, strips, lengths) of the groups of strips of the output.

    strips : (groups, COLUMNS), the strips of a group, -1 for none
    records : (steps + READ_AHEAD, RECORD); of each step
        a mask for each share of SHARE strips: bit e * SHARE + g where its strip g has a block at
        the e-th input, the number of blocks BEFORE its own, and LAST;
        the number of inputs, and 256 times that of blocks;
        the inputs, counted in tiles of x; the kept blocks in order of the masks' bits, each as
        (block * ACROSS + strip of it) * PARTS + part, and EDGE.

    Of w, or of w.T, whose columns are the block rows of w. `ragged` says whether the last input
    block reaches beyond the edge.
    """
    walk, others = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    walk, n_inputs = strips_of(walk, tile.ACROSS), len(others.indptr) - 1
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


def strips_of(walk: Walk, across: int) -> Walk:
    """The walk of `across` strips of each line, which keep parts of the same blocks."""
    if across == 1:
        return walk
    lengths = np.diff(walk.indptr).repeat(across)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    strip = np.repeat(np.arange(lengths.size), lengths)
    entry = walk.indptr[strip // across] + np.arange(strip.size) - indptr[strip]
    blocks = walk.blocks[entry].astype(np.int64) * across + strip % across
    return Walk(indptr, walk.indices[entry], blocks)


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
