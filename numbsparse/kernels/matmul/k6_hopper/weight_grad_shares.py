"""What blocks of threads do of a weight-gradient of 16-bit values, and how long it takes.

Kept blocks that share tiles of x and dy are computed together, as an item. A tile is read from L2
once for a whole item, so an item should have many kept blocks on few lines: see `parts.regions`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from math import ceil
from typing import NamedTuple

import numpy as np

from numbsparse.device import CPU_THREADS
from numbsparse.kernels.cores import compiled, threads
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import (
    ALONE,
    MAPS,
    RUNS,
    Edges,
    Tables,
    Tile,
)
from numbsparse.kernels.parts.deal import in_turn
from numbsparse.kernels.parts.regions import pieces_of_rows, regions
from numbsparse.layout import Index

HALF_EMPTY = 1.1  # products, where one of all blocks full would be enough
NOT_FULL = 1.03  # the same, where most regions have all the products they may
AT_ONCE = 256  # items whose shares one core works out
FEW_ROUNDS = 4  # up to here the last, half empty, takes much of the time

part_of = compiled(error_model="numpy")(plans.part)


class Shares(NamedTuple):
    """What each block of threads does; those of a cluster follow one another, and are an item."""

    loads: np.ndarray  # (n, SLOTS, 2): (panel of the matrix, slot | ranks << 16), of x, then of dy
    ends: np.ndarray  # (n, 2): where the loads of x end, and those of dy
    arriving: np.ndarray  # (n,) panels, from here and from the others
    places: np.ndarray  # (n, GROUPS, 1 + 2 UNITS): products of a warpgroup, or the number of its
    # size, and where their operands are; see `ptx.wgmma_units`
    outs: np.ndarray  # (n, GROUPS, OUTS) kept blocks, -1 where there is none

    def blocks(self, tile: Tile) -> np.ndarray:
        """(n,) kept blocks; those of 128 are in both warpgroups, half of each."""
        return np.count_nonzero(self.outs >= 0, axis=(1, 2)) // (2 if tile.B == 128 else 1)


def plan(
    index: Index, tile: Tile, steps: int, processors: int, edges: Edges
) -> tuple[np.ndarray | int, ...]:
    """What `cut_up` makes of the items that end first on `processors` multiprocessors.

    `steps` make the batch, and `processors` blocks of threads run at once.
    """
    at_once, found = processors // tile.CLUSTER, []
    for items in ways_of(index, tile, at_once):
        shares = shares_of(index, tile, items)
        found.append((*cut_of(shares, at_once, steps, tile), shares))
    _, whole, pieces, order, chosen = min(found, key=lambda way: way[0])
    order = (order[:, None] * tile.CLUSTER + np.arange(tile.CLUSTER)).reshape(-1)
    return plans.cut_up(tables(chosen, edges), order, whole * tile.CLUSTER, pieces, steps)


def tables(shares: Shares, edges: Edges) -> Tables:
    """Copies are (panel, slot | map << 8 | ranks << 16), of neighbours in one copy.

    They take the place of the loads.
    """
    loads, counts = shares.loads, np.zeros(len(shares.ends), np.int32)
    _join(loads, shares.ends, np.array(edges, np.int64), MAPS, np.array(RUNS, np.int64), counts)
    heads = np.stack([counts, shares.arriving], 1)
    return heads, loads[:, : counts.max(initial=0)], shares.places, shares.outs


@compiled(error_model="numpy")
def _join(loads, ends, edges, maps, runs, counts):
    for share in range(len(ends)):
        k = copy = 0
        for operand in range(2):
            while k < ends[share, operand]:
                panel, code = loads[share, k]
                number, run, same = 0, 1, 1
                if edges[operand, 1] and panel == edges[operand, 0]:
                    panel, number = 0, runs.size
                else:
                    while (
                        k + same < ends[share, operand]
                        and loads[share, k + same, 0] == panel + same
                        and loads[share, k + same, 1] == code + same
                        and panel + same < edges[operand, 0]
                    ):
                        same += 1
                    while number + 1 < runs.size and runs[number + 1] <= same:
                        number += 1
                    run = runs[number]
                loads[share, copy, 0] = panel
                loads[share, copy, 1] = code | maps * operand + number << 8
                copy, k = copy + 1, k + run
        counts[share] = copy


def ways_of(index: Index, tile: Tile, places: int) -> Iterator[np.ndarray]:
    """What the tile can share: a block row, or regions of several sizes.

    Each is the items of all kept blocks, numbered.
    """
    if tile.B == 128:
        yield rows_of_blocks(index, tile)
    else:
        shape = tile.SLOTS, tile.PAIR
        found = sizes(index, tile, places)
        with ThreadPoolExecutor(min(len(found), CPU_THREADS)) as pool:  # which wait for `threads`
            yield from pool.map(lambda n: regions(index, *shape, n), found)


def rows_of_blocks(index: Index, tile: Tile) -> np.ndarray:
    """Pieces of block rows, so that all of an item takes the same tile of x."""
    free = tile.SLOTS // (tile.B // tile.PANEL) - 1  # for blocks of dy, besides x
    return pieces_of_rows(index, tile.CLUSTER * min(tile.OUTS, free))


def shares_of(index: Index, tile: Tile, items: np.ndarray) -> Shares:
    """What the blocks of threads of these items do."""
    order, starts = in_turn(items, int(items.max(initial=-1)) + 1)
    n = (starts.size - 1) * tile.CLUSTER
    shares = Shares(
        np.zeros((n, tile.SLOTS, 2), np.int32),
        np.zeros((n, 2), np.int32),
        np.zeros(n, np.int32),
        np.zeros((n, tile.GROUPS, 1 + 2 * tile.UNITS), np.int32),
        np.full((n, tile.GROUPS, tile.OUTS), -1, np.int32),
    )
    lines, step = (index.block_rows, index.block_columns), tile.PANEL_BYTES >> 4
    if tile.B == 128:
        share_rows(order, starts, *lines, step, tile.B // tile.PANEL, tile.CLUSTER, *shares)
    else:
        n_columns = index.columns.indptr.size - 1

        def share(first: int, end: int) -> None:
            own, slot = (a[first:end] for a in shares), np.full(n_columns, -1)
            begins = starts[first : end + 1]
            here = order[begins[0] : begins[-1]], begins - begins[0]
            share_regions(*here, *lines, step, tile.PAIR, slot, *own)

        others = [threads().submit(share, k, k + AT_ONCE) for k in range(AT_ONCE, n, AT_ONCE)]
        share(0, AT_ONCE)
        for other in others:
            other.result()
    return shares


@compiled(error_model="numpy")
def share_regions(
    order, starts, block_rows, block_columns, step, pair, slot, loads, ends, arriving, places, outs
):
    """Slots of x, then of dy; and the products, dealt evenly to the warpgroups."""
    groups, rows, columns = outs.shape[1], block_rows[order], block_columns[order]
    for item in range(starts.size - 1):
        first, end = starts[item], starts[item + 1]
        n = products = 0  # of rows
        for k in range(first, end):
            begins = k == first or rows[k] != rows[k - 1]
            if begins:
                loads[item, n, 0], loads[item, n, 1] = rows[k], n | ALONE
                n, run = n + 1, 0
            products += run & (pair - 1) == 0
            run += 1
        count = n
        for k in range(first, end):  # columns in order
            if slot[columns[k]] < 0:
                slot[columns[k]] = at = count
                while at > n and loads[item, at - 1, 0] > columns[k]:
                    loads[item, at, 0] = loads[item, at - 1, 0]
                    at -= 1
                loads[item, at, 0] = columns[k]
                count += 1
        for at in range(n, count):
            slot[loads[item, at, 0]] = at
            loads[item, at, 1] = at | ALONE
        ends[item, 0], ends[item, 1], arriving[item] = n, count, count
        each = -(-products // groups)
        group, unit, row = -1, each - 1, -1
        for k in range(first, end):
            if k == first or rows[k] != rows[k - 1]:
                row, run = row + 1, 0
            half = run & (pair - 1)  # pair is 1 or 2
            if half == 0:
                group, unit = (group, unit + 1) if unit + 1 < each else (group + 1, 0)
            outs[item, group, unit * pair + half] = order[k]
            places[item, group, 0] = unit + 1
            x, dy = row * step, slot[columns[k]] * step
            if pair == 1:
                places[item, group, 1 + 2 * unit], places[item, group, 2 + 2 * unit] = x, dy
            elif half == 0:
                places[item, group, 1 + 2 * unit], places[item, group, 2 + 2 * unit] = dy, x
            else:
                places[item, group, 1 + 2 * unit] |= dy - places[item, group, 1 + 2 * unit] << 16
            run += 1
        for k in range(first, end):
            slot[columns[k]] = -1


@compiled(error_model="numpy")
def share_rows(
    order, starts, rows, columns, step, panels, cluster, loads, ends, arriving, places, outs
):
    """Slots of x, then of the dy of its blocks, which are dealt to the cluster.

    Each warpgroup has all blocks, but a panel of x: a part of each.
    """
    for item in range(starts.size - 1):
        first, end = starts[item], starts[item + 1]
        busy = min(end - first, cluster)
        for rank in range(cluster):
            begin, past = part_of(end - first, cluster, rank)
            share, copy = item * cluster + rank, 0
            for p in range(panels):
                if p % busy == rank:
                    loads[share, copy, 0] = rows[order[first]] * panels + p
                    loads[share, copy, 1] = p | ((1 << busy) - 1) << 16
                    copy += 1
            ends[share, 0] = copy
            for slot in range(panels, panels * (1 + past - begin)):
                block = order[first + begin + slot // panels - 1]
                panel = columns[block] * panels + slot % panels
                loads[share, copy, 0], loads[share, copy, 1] = panel, slot | ALONE << rank
                copy += 1
            ends[share, 1] = copy
            arriving[share] = panels * (1 + past - begin) if begin < past else 0
            for group in range(outs.shape[1]):
                places[share, group, 0] = past - begin
                places[share, group, 1] = group * step | step << 16
                places[share, group, 2] = panels * step | step << 16
                for k in range(begin, past):
                    outs[share, group, k - begin] = order[first + k]


def sizes(index: Index, tile: Tile, places: int) -> list[int]:
    """Products of a region: the most; so many that the regions fill all places once or a few times
    over; and where once is enough, more, which share more."""
    most = tile.GROUPS * tile.UNITS
    products = max(index.block_rows.size, 1) / tile.PAIR
    even = ceil(HALF_EMPTY * products / places)
    rounds = ceil(NOT_FULL * products / (most * places))
    found = {even, 2 * even, 4 * even, most}
    if rounds <= FEW_ROUNDS:
        found.add(ceil(NOT_FULL * products / (rounds * places)))
    return sorted({min(n, most) for n in found})


# Microseconds as measured on an H200; only their ratios decide.

PRODUCTS = {32: 2e6, 64: 2.5e6, 128: 4e6}  # multiply-adds of a multiprocessor in one, by block size


def copying(panels: np.ndarray, tile: Tile) -> np.ndarray:
    """Until the panels of a step are in one multiprocessor, and the next step begins."""
    start, row = (0.3, 0.55e-3) if tile.B == 32 else (0.25, 0.6e-3)
    return start + panels * tile.DEPTH * row


def from_l2(panels: int, tile: Tile) -> float:
    """Until the L2 cache has given the panels of a step to all multiprocessors."""
    return panels * tile.PANEL_BYTES / 8.5e6


def times_of(shares: Shares, blocks: np.ndarray, tile: Tile) -> np.ndarray:
    """Of a step of each item: its copies or its products, whichever take longer.

    blocks (items, CLUSTER) : `Shares.blocks`
    """
    panels = shares.arriving.reshape(blocks.shape).max(1)
    products = blocks.max(1).astype(np.int64) * tile.B**2 * tile.DEPTH / PRODUCTS[tile.B]
    return np.maximum(copying(panels.astype(np.int64), tile), products)


@compiled(error_model="numpy")
def _see(loads, ends, seen):
    """Which panels of x and of dy are loaded."""
    for share in range(len(ends)):
        for k in range(ends[share, 1]):
            seen[0 if k < ends[share, 0] else 1, loads[share, k, 0]] = True


def cut_of(
    shares: Shares, places: int, steps: int, tile: Tile
) -> tuple[float, int, int, np.ndarray]:
    """`cut` of the items, and their order: longest first.

    However they are cut, the copies take their time, from the L2 cache and, the first of each
    panel, from memory.
    """
    panels = int(shares.ends[:, 1].sum())
    seen = np.zeros((2, int(shares.loads[..., 0].max(initial=0)) + 1), np.bool_)
    _see(shares.loads, shares.ends, seen)
    first = int(np.count_nonzero(seen))
    memory = 2.4  # times as long as from the L2 cache
    least = steps * max(from_l2(panels, tile), memory * from_l2(first, tile))
    blocks = shares.blocks(tile).reshape(-1, tile.CLUSTER)
    times = times_of(shares, blocks, tile)
    order = np.argsort(times, kind="stable")[::-1]
    rest = blocks[order[order.size // places * places :]]
    rate = 7e4 if tile.UNITS > 1 else 3e5  # pairs of blocks leave theirs number by number
    sums = int(rest.sum()) * tile.B**2
    return *plans.cut(times[order], sums, places, steps, least, rate, plans.TO_ADD), order
