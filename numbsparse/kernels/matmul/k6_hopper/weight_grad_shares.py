"""What blocks of threads do of a weight-gradient of 16-bit values, and how long it takes.

Kept blocks that share tiles of x and dy are computed together, as an item. A tile is read from L2
once for a whole item, so an item should have many kept blocks on few lines: see `parts.regions`.
"""

from math import ceil
from typing import Any

import numpy as np

from numbsparse.kernels.cores import compiled, inner, threads
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import ALONE, Tables, Tile, put_panel
from numbsparse.kernels.parts.regions import Items, parts_of, pieces_of_rows, regions
from numbsparse.layout import Index

HALF_EMPTY = 1.1  # products, where one of all blocks full would be enough
NOT_FULL = 1.03  # the same, where most regions have all the products they may
AT_ONCE = 512  # items whose shares one core works out: a task costs as much as 100 of them
DEEP = 384  # rows on their way, from which on a step waits less
BAND = 8  # rectangles below each other: as many features of x as of dy are in use at once
FEW_ROUNDS = 4  # up to here the last, half empty, takes much of the time

# `part` and `share` are compiled for a GPU too, which plans there.


def part(n, parts, k):
    """(begin, end) of part k of n things, the first parts being the longer ones."""
    begin = k * (n // parts) + min(k, n % parts)
    return begin, begin + n // parts + (1 if k < n % parts else 0)


def sharing_rows(compile: Any) -> Any:
    """share(first, count, row, columns, rank, cluster, panels, step, at, ...tables).

    What a block of threads of a cluster does of `count` blocks of a row, from number `first` on:
    slots of x, then of the dy of its blocks. Where x has several panels a warpgroup has one of
    them and all these blocks, else a part of the blocks.
    """
    part_of, put_panel = compile(part), compile(plans.put)

    def share(
        first, count, row, columns, rank, cluster, panels, step, at, heads, loads, places, outs
    ):  # fmt: skip
        busy, copy = min(count, cluster), 0
        begin, past = part_of(count, cluster, rank)
        n = past - begin
        for p in range(panels):
            if p % busy == rank:
                put_panel(loads, at, copy, row * panels + p, p, 0, (1 << busy) - 1)
                copy += 1
        for slot in range(panels, panels * (1 + n)):
            column = columns[first + begin + slot // panels - 1]
            put_panel(loads, at, copy, column * panels + slot % panels, slot, 1, ALONE << rank)
            copy += 1
        heads[at, 0], heads[at, 1] = copy, panels * (1 + n) if n else 0
        for group in range(outs.shape[1]):
            own, end = part_of(n, outs.shape[1], group) if panels == 1 else (0, n)
            places[at, group, 0] = end - own
            for k in range(outs.shape[2]):
                there, right = k < end - own, panels * (1 + own + k)
                places[at, group, 1 + 2 * k] = group * step if panels > 1 else 0
                places[at, group, 2 + 2 * k] = right * step | step << 16 if there else 0
                outs[at, group, k] = first + begin + own + k if there else -1

    return compile(share)


share_row = sharing_rows(inner())


def plan(index: Index, tile: Tile, steps: int, processors: int) -> tuple[np.ndarray | int, ...]:
    """What `cut_up` makes of the items that end first on `processors` multiprocessors.

    `steps` make the batch, and `processors` blocks of threads run at once.
    """
    at_once = processors // tile.CLUSTER
    lines = sum(int(np.count_nonzero(np.diff(a.indptr))) for a in (index.rows, index.columns))
    ways = [
        (*cut_of(items, lines, at_once, steps, tile, parts_near(index, items)), items)
        for items in ways_of(index, tile, at_once)
    ]
    _, whole, pieces, order, items = min(ways, key=lambda way: way[0])
    *others, outs = tables_of(index, tile, items, order)
    tables = *others, np.where(outs >= 0, index.rows.blocks[outs], -1)
    return plans.cut_up(tables, whole * tile.CLUSTER, pieces, steps)


def ways_of(index: Index, tile: Tile, places: int) -> list[Items]:
    """What the tile can share: pieces of a block row, or regions of several sizes."""
    if tile.B == 128:  # an item takes the same tile of x
        most = min(tile.OUTS, tile.SLOTS // (tile.B // tile.PANEL) - 1)  # blocks of dy, besides x
        # 102 blocks for 132 places, 256 rows: 6.5 us by one for each place, 8.1 by two (H200).
        enough = max(-(-index.block_rows.size // (places * tile.CLUSTER)), 1)
        return [pieces_of_rows(index, tile.CLUSTER * n) for n in {most, min(most, enough)}]
    if tile.JOINED:
        return [rectangles(index, tile)]
    return regions(index, tile.SLOTS, tile.PAIR, sizes(index, tile, places))


def rectangles(index: Index, tile: Tile) -> Items:
    """Of neighbouring rows and columns, BAND of them below each other, whose dy is the same."""
    i, j = index.block_rows // tile.UNITS, index.block_columns // (tile.PAIR * tile.GROUPS)
    number = (i // BAND * index.columns.indptr.size + j) * BAND + i % BAND
    order = np.argsort(number, kind="stable")
    starts = np.flatnonzero(np.diff(number[order], prepend=-1, append=-1))
    return Items(order, starts, np.full(starts.size - 1, tile.SLOTS))


def filled(index: Index, tile: Tile) -> tuple[float]:
    """The part of the rectangles that is kept."""
    items = rectangles(index, tile).starts.size - 1
    return (index.block_rows.size / max(items * tile.GROUPS * tile.OUTS, 1),)


def tables_of(index: Index, tile: Tile, items: Items, order: np.ndarray) -> Tables:
    """What each block of threads does, those of an item together, in this order of the items.

    The tables of `plans.cut_up`. Copies are (panel, slot | operand << 8 | ranks << 16), of x, then
    of dy; places are as `ptx.wgmma_units` takes them.
    """
    n = order.size * tile.CLUSTER
    tables = (
        np.zeros((n, 2), np.int32),
        np.zeros((n, tile.SLOTS, 2), np.int32),
        np.zeros((n, tile.GROUPS, 1 + 2 * tile.UNITS), np.int32),
        np.full((n, tile.GROUPS, tile.OUTS), -1, np.int32),
    )
    step = tile.STEP
    n_columns = index.columns.indptr.size - 1

    def share(first: int) -> None:
        which, lines = order[first : first + AT_ONCE], (index.block_rows, index.block_columns)
        rows = slice(first * tile.CLUSTER, (first + AT_ONCE) * tile.CLUSTER)
        own = step, *(a[rows] for a in tables)
        if tile.B == 128:
            share_rows(which, items.starts, *lines, tile.B // tile.PANEL, tile.CLUSTER, *own)
        else:
            slots = np.full(n_columns, -1)
            share_regions(which, *items[:2], *lines, tile.PAIR, tile.JOINED, slots, *own)

    others = [threads().submit(share, first) for first in range(AT_ONCE, order.size, AT_ONCE)]
    share(0)
    for other in others:
        other.result()
    return tables


@compiled()
def share_regions(
    which, order, starts, block_rows, block_columns, pair, joined, slot, step,
    heads, loads, places, outs,
):  # fmt: skip
    """Slots of x, then of dy; and the products, dealt evenly to the warpgroups, or, if they are
    `joined`, each of two columns, by all rows.

    slot : of each column, -1
    """
    groups = outs.shape[1]
    for item in range(which.size):
        first, end = starts[which[item]], starts[which[item] + 1]
        n = products = 0  # of rows
        for k in range(first, end):
            row = block_rows[order[k]]
            if n == 0 or row != loads[item, n - 1, 0]:
                loads[item, n, 0] = row
                n, run = n + 1, 0
            products += run & (pair - 1) == 0
            run += 1
        count = n
        for k in range(first, end):  # columns in order
            column = block_columns[order[k]]
            if slot[column] < 0:
                slot[column] = at = count
                while at > n and loads[item, at - 1, 0] > column:
                    loads[item, at, 0] = loads[item, at - 1, 0]
                    at -= 1
                loads[item, at, 0] = column
                count += 1
        for at in range(n, count):
            slot[loads[item, at, 0]] = at
        each = -(-products // groups)
        group, unit, row = -1, each - 1, -1
        for k in range(first, end):
            if row < 0 or block_rows[order[k]] != loads[item, row, 0]:
                row, run = row + 1, 0
            half = run & (pair - 1)  # pair is 1 or 2
            if joined:
                c = slot[block_columns[order[k]]] - n
                group, unit, half = c // pair, row, c % pair
            elif half == 0:
                group, unit = (group, unit + 1) if unit + 1 < each else (group + 1, 0)
            outs[item, group, unit * pair + half] = order[k]
            places[item, group, 0] = unit + 1
            x, dy = row * step, slot[block_columns[order[k]]] * step
            if joined:
                places[item, group, 1] = (n + group * pair) * step | step << 16
                places[item, group, 2] = step << 16
            elif pair == 1:
                places[item, group, 1 + 2 * unit], places[item, group, 2 + 2 * unit] = x, dy
            elif half == 0:
                places[item, group, 1 + 2 * unit], places[item, group, 2 + 2 * unit] = dy, x
            else:
                places[item, group, 1 + 2 * unit] |= dy - places[item, group, 1 + 2 * unit] << 16
            run += 1
        for k in range(first, end):
            slot[block_columns[order[k]]] = -1
        for at in range(count):
            put_panel(loads, item, at, loads[item, at, 0], at, 1 if at >= n else 0, ALONE)
        heads[item, 0] = heads[item, 1] = count


@compiled()
def share_rows(
    which, starts, rows, columns, panels, cluster, step, heads, loads, places, outs
):  # fmt: skip
    for item in range(which.size):
        first, end = starts[which[item]], starts[which[item] + 1]
        for rank in range(cluster):
            share_row(
                first, end - first, rows[first], columns, rank, cluster, panels, step,
                item * cluster + rank, heads, loads, places, outs,
            )  # fmt: skip


def parts_near(index: Index, items: Items) -> np.ndarray | None:
    """The part of the grid that each item is of; None if all are of one.

    Where items of all parts run at once, their panels leave the L2 cache before others want them:
    12,800 to 32,768 features in blocks of 32, density 0.1 and 0.2, took an H200 0.65 to 0.90 of the
    time part by part, in blocks of 64 0.96 to 1.0.
    """
    first = items.order[items.starts[:-1]]
    number = np.zeros(first.size, np.int64)
    for walk, lines in ((index.rows, index.block_rows), (index.columns, index.block_columns)):
        parts = parts_of(walk.indptr.size - 1)
        number = number * parts.size + np.searchsorted(parts, lines[first], "right")
    return None if number.size == 0 or number.min() == number.max() else number


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
PRODUCTS_OF_FEW = {32: 2e6, 64: 3.6e6, 128: 4e6}  # where items are of few blocks
SUMS_OF_FEW = 3.5e5  # of these in one, to memory and back
# Until a step's panels are in one multiprocessor: of each step, and for each row of a panel.
COPYING = {32: (0.3, 0.55e-3), 64: (0.25, 0.6e-3), 128: (0.25, 0.6e-3)}
COPYING_OF_FEW = {32: (0.12, 0.45e-3), 64: (0.16, 0.35e-3), 128: (0.2, 0.45e-3)}


def copying(panels: np.ndarray, tile: Tile) -> np.ndarray:
    """Until the panels of a step are in one multiprocessor, and the next step begins."""
    start, row = (COPYING_OF_FEW if is_deep(tile) else COPYING)[tile.B]
    return start + panels * tile.DEPTH * row


def is_deep(tile: Tile) -> bool:
    """Whether it is for few blocks."""
    return tile.STAGES * tile.DEPTH >= DEEP


def from_l2(panels: int, tile: Tile) -> float:
    """Until the L2 cache has given the panels of a step to all multiprocessors."""
    return panels * tile.PANEL_BYTES / 8.5e6


def cut_of(
    items: Items, lines: int, places: int, steps: int, tile: Tile, near: np.ndarray | None = None
) -> tuple[float, int, int, np.ndarray]:
    """`cut` of the items, and their order: longest first, or, of many rounds, in each part.

    A step takes the copies of an item or its products, whichever take longer. However items are
    cut, their copies take their time, from the L2 cache and, the first of each panel, from memory.

    lines : rows and columns that have a block
    near : which part of the grid each item is of, where there are several
    """
    panels, counts = tile.B // tile.PANEL, np.diff(items.starts)  # of a line
    own = -(-counts // tile.CLUSTER)  # blocks of one of a cluster
    rate = (PRODUCTS_OF_FEW if is_deep(tile) else PRODUCTS)[tile.B]
    multiplied = tile.GROUPS * tile.OUTS if tile.JOINED else own
    products = multiplied * tile.B**2 * tile.DEPTH / rate
    times = np.maximum(copying(panels * (items.lines - counts + own), tile), products)
    read, first = (panels * int(n) for n in (items.lines.sum(), lines))
    memory = 2.4  # times as long as from the L2 cache
    least = steps * max(from_l2(read, tile), memory * from_l2(first, tile))
    order = np.argsort(times, kind="stable")[::-1]
    if near is not None and times.size > FEW_ROUNDS * places:  # their panels are in the L2 cache
        order = order[np.argsort(near[order], kind="stable")]
    sums = int(counts[order[order.size // places * places :]].sum()) * tile.B**2
    if is_deep(tile):
        adding = SUMS_OF_FEW, plans.TO_ADD_FEW, plans.SHORTEST_OF_FEW
    else:
        adding = 7e4 if tile.B < 128 else 3e5, plans.TO_ADD, plans.SHORTEST
    return *plans.cut(times[order], sums, places, steps, least, *adding), order
