"""What blocks of threads do of a weight-gradient of 16-bit values, and how long it takes.

Kept blocks that share tiles of x and dy are computed together, as an item. A tile is read from L2
once for a whole item, so an item should have many kept blocks on few lines: see `parts.regions`.
"""

from math import ceil
from typing import Any

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.cores import compiled, inner
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import ALONE, Tables, Tile, put_panel
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.regions import Items, pieces_of_rows, regions
from numbsparse.layout import Index

HALF_EMPTY = 1.1  # products, where one of all blocks full would be enough
NOT_FULL = 1.03  # the same, where most regions have all the products they may
DEEP = 384  # rows on their way, from which on a step waits less
BAND = 8  # rectangles below each other: as many features of x as of dy are in use at once
FEW_ROUNDS = 4  # up to here the last, half empty, takes much of the time


TILES = {
    32: Tile(32, 4, 4, 32, 32, 3, 37, 1, REGISTERS=(24, 112)),
    64: Tile(64, 2, 6, 64, 64, 3, 9, 1, REGISTERS=(40, 232)),
    128: Tile(128, 2, 2, 128, 64, 4, 6, 2, LOADERS=1),
}
OF_ROWS = Tile(64, 2, 4, 64, 64, 3, 9, 1, 2)
# Of a feature-major dy at B = 32. With a batch-major one, four stages would let some blocks of
# threads run ahead of others, which then find what they share no longer in the L2 cache.
OF_LINES = TILES[32]._replace(STAGES=4, SLOTS=27)
# Of rectangles of 256 x 128 features that keep nearly all blocks of 32: a warpgroup multiplies
# eight rows by two columns at once, which reads less of shared memory. JOINED_FROM rows and more of
# so many blocks took 0.71 to 0.91 of the time, feature-major ones 0.61 to 0.80; with three quarters
# of the blocks 0.92 and 0.80, with 0.7 0.98; 512 rows 0.99 to 1.12 (H200). In blocks of 64 full
# matrices took 0.91 to 0.97, and with a tenth of the blocks away 1.06.
RECTANGLES = Tile(32, 2, 8, 32, 64, 4, 12, 1, LOADERS=1, JOINED=True)
FILLED, JOINED_FROM, WORTH_JOINING = 0.75, 1024, 16_000_000  # rows; rows times blocks
# Smaller steps and items: 65 and 96 rows take 0.8 of the time, 128 and 192 1.03 and 0.98, 200 0.77
# and 0.92 (4,096 and 8,192 features; H200); 512 take 1.02.
SHORT, BRIEF = Tile(64, 2, 4, 64, 32, 6, 8, 1, REGISTERS=(40, 232)), 224
# Of batch-major operands, without a cluster: 8192 and 4096 features, density 0.25, 65 and 96 rows
# take 0.79 to 0.83 of the time, 128 to 256 0.89 to 0.92; density 0.1 0.88 to 1.04 (H200).
OF_FEW, FEW = Tile(128, 2, 2, 128, 32, 8, 6, 1, LOADERS=1), 256
# Of few blocks: more stages of smaller items, which hide how long a copy is on its way. 4,096 rows
# of 512 features take 5 to 8 us in place of 9 to 18, 512 rows 0.64 to 0.94 of the time, 1,024 rows
# of 4,096 features, three or six blocks for each multiprocessor, 0.8 to 0.9 (H200).
OF_FEW_BLOCKS = {
    32: Tile(32, 2, 2, 32, 64, 6, 8, 1, LOADERS=1),
    64: Tile(64, 2, 2, 64, 64, 6, 4, 1, LOADERS=1),
    128: Tile(128, 2, 1, 128, 64, 6, 4, 1, LOADERS=1),
}
# Blocks for each multiprocessor, at most; and where x and dy are larger than the L2 cache, from
# which blocks of threads that get apart read again: 8,192 rows and features, density 0.01 and 0.024
# in blocks of 32 and 64, took 1.32 and 1.19 times as long as few.
BLOCKS, LARGE_BLOCKS, LARGE = {32: 8, 64: 4, 128: 1}, {32: 1, 64: 2, 128: 1}, 50_000_000
# Rows of the batch from which on a launch waits for the one before, and announces its maps anew: at
# B = 32 it takes 311 us of an H200, one that overlaps 324. Blocks that stay lose nothing.
LONG = 2048
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


def tile_of(B: int, transposed: tuple[bool, bool], index: Index, batch: int, gated: bool) -> Tile:
    """Of 16-bit values, x and dy maybe transposed; OF_ROWS is for a layout made on a GPU."""
    made, few = index.made is not None, index.block_rows.size <= most_blocks(B, index, batch)
    tile = OF_LINES if B == 32 and transposed[1] else OF_ROWS if made and B == 64 else TILES[B]
    if B == 128 and batch <= FEW and not any(transposed) and not (made and few):
        tile = OF_FEW
    elif few:
        tile = OF_FEW_BLOCKS[B]
    elif B == 32 and not (made or gated) and are_filled(index, batch):
        tile = RECTANGLES
    if B == 64 and batch <= BRIEF:
        tile = SHORT
    if SIMULATED:
        tile = tile._replace(GROUPS=1 if B == 32 else 2, STAGES=2, LOADERS=1)
    dealt = made and (few or B == 32)  # whoever is free takes an item, as nobody knows how many
    stays = B == 128 or not (gated or batch >= LONG)
    return tile._replace(STAYS=stays and not dealt)


def are_filled(index: Index, batch: int) -> bool:
    worth = batch >= JOINED_FROM and batch * index.block_rows.size >= WORTH_JOINING
    return worth and planned(index, filled, RECTANGLES)[0] >= FILLED


def most_blocks(B: int, index: Index, batch: int) -> int:
    """Blocks that are few."""
    features = B * (index.rows.indptr.size + index.columns.indptr.size - 2)
    large = 2 * batch * features > LARGE and index.made is None
    each = LARGE_BLOCKS if large else BLOCKS
    return each[B] * multiprocessors()


def plan(index: Index, tile: Tile, steps: int, processors: int) -> tuple[np.ndarray | int, ...]:
    """What `cut_up` makes of the items that end first on `processors` multiprocessors.

    `steps` make the batch, and `processors` blocks of threads run at once.
    """
    at_once = processors // tile.CLUSTER
    lines = sum(int(np.count_nonzero(np.diff(a.indptr))) for a in (index.rows, index.columns))
    ways = [
        (*cut_of(items, lines, at_once, steps, tile), items)
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
    lines = index.block_rows, index.block_columns
    if tile.B == 128:
        of_rows = tile.B // tile.PANEL, tile.CLUSTER
        share_rows(order, items.starts, *lines, *of_rows, tile.STEP, *tables)
    else:
        slots = np.full(index.columns.indptr.size - 1, -1)
        of_regions = tile.PAIR, tile.JOINED, slots
        share_regions(order, *items[:2], *lines, *of_regions, tile.STEP, *tables)
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
    items: Items, lines: int, places: int, steps: int, tile: Tile
) -> tuple[float, int, int, np.ndarray]:
    """`cut` of the items, and their order: longest first, or, of many rounds, as they were found.

    So they follow each other part by part of the grid. Where items of all parts run at once, their
    panels leave the L2 cache before others want them: 12,800 to 32,768 features in blocks of 32,
    density 0.1 and 0.2, took an H200 0.65 to 0.90 of the time part by part, in blocks of 64 0.96 to
    1.0.

    A step takes the copies of an item or its products, whichever take longer. However items are
    cut, their copies take their time, from the L2 cache and, the first of each panel, from memory.

    lines : rows and columns that have a block
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
    many = times.size > FEW_ROUNDS * places
    order = np.arange(times.size) if many else np.argsort(times, kind="stable")[::-1]
    sums = int(counts[order[order.size // places * places :]].sum()) * tile.B**2
    if is_deep(tile):
        adding = SUMS_OF_FEW, plans.TO_ADD_FEW, plans.SHORTEST_OF_FEW
    else:
        adding = 7e4 if tile.B < 128 else 3e5, plans.TO_ADD, plans.SHORTEST
    return *plans.cut(times[order], sums, places, steps, least, *adding), order
