"""What a block of threads computes of a weight-gradient: worked out once for every layout.

Kept blocks that share panels of x and dy make an item, of a block of threads or a cluster; those of
float32 are in `weight_grad_float32`. A panel is read from L2 once for a whole item, so one of 16
bits should have many kept blocks on few lines: see `parts.regions`.

The GPU runs items as places become free, in the order of the plan: largest first, and at the end
those that do not fill all places once more, split over the batch. Only these leave sums to add.
"""

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.cores import compiled, inner
from numbsparse.kernels.parts.deal import give
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.regions import Items, pieces_of_rows, regions
from numbsparse.layout import Index

OPERANDS = 2  # each has a tensor map
ALONE = 1  # the ranks of a copy that only the block of threads which requests it gets
TO_START = 4.0  # microseconds until a block of threads multiplies, and while it writes
# For a launch that adds what was cut, besides its sums: of items of many blocks of 16-bit values,
# and of others.
TO_ADD, TO_ADD_FEW = 16.0, 1.0
POOL = 224 * 1024  # bytes of a multiprocessor's shared memory for images and panels
STEP_IN_US = 1.4  # of an item, as measured on an H200
STEP_OF_ONE = 0.65, 0.75  # of an item of a single product, and where two share a multiprocessor
SUMS_IN_US, SUMS_IN_US_OF_FEW = 3e5, 5e5  # to memory and back, of float32
# Steps of a piece, at least, of items that take all places and of fewer; and how many pieces these
# are cut into.
SHORTEST, SHORTEST_OF_FEW = 4, 2
PIECES_OF_MANY = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32])
PIECES_OF_FEW = np.append(np.arange(1, 13), [14, 16, 18, 22, 26, 33, 44, 66, 88, 132])

Tables = tuple[np.ndarray, ...]  # heads, loads, places, outs


class Tile(NamedTuple):
    """How the work of a block of threads is cut: GROUPS warpgroups of UNITS products each."""

    B: int
    GROUPS: int
    UNITS: int
    N: int  # columns of a product
    DEPTH: int  # rows of the batch in a step
    STAGES: int
    SLOTS: int  # panels in a stage
    CLUSTER: int
    LOADERS: int = 4  # warps that request copies
    REGISTERS: tuple[int, int] = (0, 0)  # of a thread that requests copies, and one that multiplies
    ITEM: int = 2  # bytes of a value
    STRIPS: int = 0  # of dy in an item, at most; float32 only
    RESIDENT: int = 1  # blocks of threads of a multiprocessor, of float32
    STAYS: bool = False  # whether blocks of threads go from item to item
    AHEAD: bool = False  # whether these ask for items early: see `asking`
    JOINED: bool = False  # an item is a rectangle, and a warpgroup's units are one product
    SWAPPED: bool = False  # x and dy are exchanged, of float32: few block rows make fewer items so

    @property
    def PANEL(self) -> int:
        """Features of a panel, the box of one copy."""
        return 32 if self.ITEM == 4 else min(self.B, 64)

    @property
    def PANEL_BYTES(self) -> int:
        return self.ITEM * self.PANEL * self.DEPTH

    @property
    def PAIR(self) -> int:
        """Kept blocks that the 64 rows of a product make."""
        return max(64 // self.B, 1)

    @property
    def OUTS(self) -> int:
        """Kept blocks that a warpgroup computes or has a part in; of float32 parts of 32 x 32."""
        if self.ITEM == 4:
            return self.UNITS * 2 * self.N // self.PANEL
        return self.PAIR * self.UNITS * self.N // self.B

    @property
    def SUMS(self) -> Any:
        """Of a thread: how many, or of float32 the shape that `wgmma_split` adds to."""
        return (self.UNITS, self.N // 8, 4) if self.ITEM == 4 else self.UNITS * self.N // 2

    @property
    def X_PANELS(self) -> int:
        """Of an item of float32: two for each product."""
        return 2 * self.UNITS * self.GROUPS

    @property
    def PART(self) -> int:
        """Rows and columns of what one of `outs` names."""
        return 32 if self.ITEM == 4 else self.B

    @property
    def PARTS(self) -> int:
        """Those of a block."""
        return (self.B // self.PART) ** 2

    @property
    def THREADS(self) -> int:
        return 128 * self.GROUPS + 32 * self.LOADERS

    @property
    def STEP(self) -> int:
        """From a slot to the next in `places`: in 16 bytes, as wgmma takes them; of float32, 1."""
        return 1 if self.ITEM == 4 else self.PANEL_BYTES >> 4

    @property
    def IMAGE(self) -> int:
        """Bytes of the image of a strip of float32: hi and lo."""
        return 2 * 4 * self.DEPTH * self.N

    @property
    def POOL(self) -> int:
        """Bytes of shared memory for images and panels of float32."""
        return POOL // self.RESIDENT - (0 if self.RESIDENT == 1 else 2048)

    @property
    def SHARED_BYTES(self) -> int:
        buffer = self.POOL if self.ITEM == 4 else self.STAGES * self.SLOTS * self.PANEL_BYTES
        return buffer + 1024  # panels begin at multiples of that


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

# `put`, `part` and `share` are compiled for the host, and for a GPU, which plan there.


def put(loads, share, at, panel, slot, operand, ranks):
    """A copy of one panel, which these ranks get."""
    loads[share, at, 0], loads[share, at, 1] = panel, slot | operand << 8 | ranks << 16


put_panel = inner()(put)


@compiled()
def cut(times, sums, places, steps, least, rate, to_add, shortest):
    """(end, items that stay whole, pieces of each other one): what ends first on `places` places.

    times : microseconds of a step of each item, longest first
    sums : that the items leave which do not fill all places once more
    least : microseconds that the copies take, however items are cut
    rate : sums of a microsecond, to memory and back
    to_add : microseconds that adding takes besides that
    shortest : steps of a piece
    """
    whole = times.size // places * places
    rest, best, best_pieces = times.size - whole, np.inf, 1
    free, heap = np.zeros(places), np.arange(places)
    for item in range(whole):
        least = max(least, give(free, heap, times[item] * steps + TO_START))
    for pieces in PIECES_OF_FEW if shortest < SHORTEST else PIECES_OF_MANY:
        end, adding = least, to_add + sums * pieces / rate if pieces > 1 else 0.0
        if shortest < SHORTEST and pieces * rest > max(places, rest):
            break  # of few items all pieces run at once
        if pieces > max(steps // shortest, 1) or end + adding >= best:
            continue
        own, order = free.copy(), heap.copy()
        for piece in range(pieces * rest):
            if end + adding >= best:
                break
            time = times[whole + piece % rest] * steps / pieces
            end = max(end, give(own, order, time + TO_START))
        if end + adding < best:
            best, best_pieces = end + adding, pieces
    return best, whole, best_pieces


def cut_up(tables: Tables, whole: int, pieces: int, steps: int) -> tuple[np.ndarray | int, ...]:
    """(heads, loads, places, outs, what was cut, numbers of that, all sums): what each block does.

    tables : of each block of threads, if nothing is cut; the first `whole` of them have all steps
        heads : copies, panels that arrive, and what else the kernel needs to know
        loads (., 2) : (panel, slot | operand << 8 | ranks << 16)
        places (GROUPS, 1 + 2 UNITS) : a warpgroup's products, and the slots of their operands
        outs (GROUPS, OUTS) : what they make, or -1
    heads then have before these the first step and the steps, and after two of them whether sums
    are left: then outs are places among the sums of `what was cut`, piece after piece.
    """
    heads, loads, places, outs = tables
    whole, pieces = (whole, pieces) if pieces > 1 else (len(heads), 0)
    rest = len(heads) - whole
    if pieces:
        heads, loads, places, outs = (
            np.concatenate([a[:whole], *[a[whole:]] * pieces]) for a in tables
        )
    piece = np.repeat(np.arange(pieces), rest)
    first, last = piece * steps // max(pieces, 1), (piece + 1) * steps // max(pieces, 1)
    span = np.zeros((len(heads), 3), np.int32)  # first step, steps, whether sums are left
    span[:, 1] = steps
    span[whole:] = np.stack([first, last - first, np.ones_like(first)], 1)
    tail = outs[whole:]
    kept = np.unique(tail[tail >= 0])
    base = (piece * kept.size)[:, None, None]
    tail[:] = np.where(tail >= 0, base + np.searchsorted(kept, tail), -1)
    heads = np.column_stack([span[:, :2], heads[:, :2], span[:, 2], heads[:, 2:]])
    numbers = np.array([pieces, kept.size], np.int32)
    return heads, loads, places, outs, kept.astype(np.int32), numbers, pieces * kept.size


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
    part_of, put_panel = compile(part), compile(put)

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
    return cut_up(tables, whole * tile.CLUSTER, pieces, steps)


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

    The tables of `cut_up`. Copies are (panel, slot | operand << 8 | ranks << 16), of x, then
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
    order = np.arange(times.size) if many else np.argsort(times, kind="stable")[::-1].copy()
    sums = int(counts[order[order.size // places * places :]].sum()) * tile.B**2
    if is_deep(tile):
        adding = SUMS_OF_FEW, TO_ADD_FEW, SHORTEST_OF_FEW
    else:
        adding = 7e4 if tile.B < 128 else 3e5, TO_ADD, SHORTEST
    return *cut(times[order], sums, places, steps, least, *adding), order
