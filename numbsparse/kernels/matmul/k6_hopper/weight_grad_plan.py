"""What a block of threads computes of a weight-gradient: worked out once for every layout.

Kept blocks that share panels of x and dy make an item, of a block of threads or a cluster. Of 16
bits they are chosen in `weight_grad_shares`. Of float32 an item is products, of 64 features of x,
two panels of 32 that a strip of N columns of dy keeps, by the strip.

The GPU runs items as places become free, in the order of the plan: largest first, and at the end
those that do not fill all places once more, split over the batch. Only these leave sums to add.
"""

from math import ceil, exp
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.cores import compiled, inner
from numbsparse.kernels.parts.deal import give
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.layout import Index, Walk

NO_ROOM = 1 << 31  # more items than there are
OPERANDS = 2  # each has a tensor map
ALONE = 1  # the ranks of a copy that only the block of threads which requests it gets
BUFFERS = 2  # each for the images of one step, of float32
TO_START = 4.0  # microseconds until a block of threads multiplies, and while it writes
# For a launch that adds what was cut, besides its sums: of items of many blocks of 16-bit values,
# and of others.
TO_ADD, TO_ADD_FEW = 16.0, 1.0
PAIRED = 1.6  # the time of a product of 64 columns, where one of 32 takes 1
FEWER = 0.8  # times as many items have x and dy exchanged: 1 to 1.37 times as fast (H200)
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


# `put` is compiled for the host, which plans there, and for a GPU, which does too.


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


def items_of(counts: np.ndarray, tile: Tile) -> tuple[int, np.ndarray, np.ndarray]:
    """(items, where the products of each strip begin, its number in the item there).

    A product has two of the panels that a strip keeps, which are so many.
    """
    (first, image), each = np.empty((2, counts.size), np.int64), tile.UNITS * tile.GROUPS
    return -(-_pack(counts, each, tile.STRIPS, first, image) // each), first, image


@compiled()
def _pack(counts, each, most, first, images):
    place = image = 0
    for strip in range(counts.size):
        products = (counts[strip] + 1) // 2
        if products and image == most:
            place += -place % each
        if place % each == 0:
            image = 0
        first[strip], images[strip] = place, image
        if place // each != (place + max(products, 1) - 1) // each:  # it goes on in another item
            image = 0
        place += products
        image += 1 if products else 0
    return place


def walk_of(index: Index, tile: Tile) -> Walk:
    """Down the lines of which strips are."""
    return index.rows if tile.SWAPPED else index.columns


def panels_kept(index: Index, tile: Tile) -> np.ndarray:
    """How many panels of x each strip of N columns keeps any of."""
    walk, n, across = walk_of(index, tile), tile.B // 32, tile.N // 32
    counts = np.diff(walk.indptr).astype(np.int64)
    if across <= n:
        return np.repeat(counts * n, n // across)
    met = np.zeros((-(-counts.size // 2), walk.indices.max(initial=-1) + 1), bool)  # by pairs
    met[np.repeat(np.arange(counts.size), counts) // 2, walk.indices] = True
    return np.count_nonzero(met, axis=1)


def number_of_items(index: Index, tile: Tile) -> int:
    """Of a layout made on a GPU as many as there were, if blocks were where chance puts them, and
    each item of blocks of one line."""
    if index.made is None:
        return items_of(panels_kept(index, tile), tile)[0]
    most, lines = tile.X_PANELS * 32 // tile.B, walk_of(index, tile).indptr.size - 1
    if most == 0:
        return NO_ROOM
    each = index.block_rows.size / max(lines, 1)  # blocks of a line
    there = 1 - exp(-each)  # of the lines those that have any
    return ceil(lines * (tile.B // tile.N) * max(there, each / most + there / 2))


def way_of(index: Index, B: int) -> tuple[Tile]:
    """The tile, or that which has x and dy exchanged."""
    tile, swapped = tile_of(index, B), tile_of(index, B, True)
    fewer = number_of_items(index, swapped) <= FEWER * number_of_items(index, tile)
    return (swapped if fewer else tile,)


def tile_of(index: Index, B: int, swapped: bool = False) -> Tile:
    """Products of 64 columns where B is as large, or neighbouring columns keep the same rows: in a
    band that took 3 and 14 % less, with all blocks kept 22 to 25 % (H200)."""
    wide = tile_of_columns(B, 64)._replace(SWAPPED=swapped)
    in_pairs = index.made is None and B == 32
    if in_pairs and PAIRED * panels_kept(index, wide).sum() <= index.block_rows.size:
        return wide
    return tile_of_columns(B, min(B, 64))._replace(SWAPPED=swapped)


def tile_of_columns(B: int, N: int) -> Tile:
    """For products of N columns.

    Three warpgroups begin with 168 registers for a thread, four with 128: if all together
    requested more, some would wait forever.
    """
    if SIMULATED:
        return Tile(B, 1, 2, N, 32, 2, 0, 1, 1, (128, 128), ITEM=4, STRIPS=2)
    if N == 64:
        return Tile(B, 2, 2, N, 32, 5, 0, 1, 4, (72, 216), ITEM=4, STRIPS=3)
    return Tile(B, 3, 2, N, 32, 5, 0, 1, 4, (80, 144), ITEM=4, STRIPS=4)


def single(tile: Tile) -> Tile:
    """For items of one product each, two of which are on a multiprocessor."""
    stages = tile.STAGES if SIMULATED else 8
    one = tile._replace(GROUPS=1, UNITS=1, STAGES=stages, STRIPS=1, REGISTERS=(0, 0))
    return one._replace(RESIDENT=2)


def smaller(index: Index, tile: Tile, steps: int, processors: int) -> tuple[Tile]:
    """The tile, or where that ends first one for items of single products.

    Few items leave places free, and a step of a single product takes less time: all of an item are
    multiplied, whether they are there or not.
    """
    ways = [(number_of_items(index, each), each) for each in (tile, single(tile))]
    if ways[1][0] > processors * ways[1][1].RESIDENT:
        return (tile,)
    ends = [cut_of(*way, steps, processors)[0] for way in ways]
    return (ways[ends[1] < ends[0]][1],)


on_gpu_of(way_of)(way_of)
on_gpu_of(smaller)(smaller)


def cut_of(items: int, tile: Tile, steps: int, processors: int) -> tuple[float, int, int]:
    """`cut` of so many items."""
    ways = STEP_OF_ONE[: tile.RESIDENT] if tile.UNITS == 1 else (STEP_IN_US,)
    found = []
    for resident, step in enumerate(ways, 1):
        places, rate, shortest = processors * resident, SUMS_IN_US, SHORTEST
        if 2 * items <= places:
            rate, shortest = SUMS_IN_US_OF_FEW, SHORTEST_OF_FEW
        sums = items % places * tile.GROUPS * tile.UNITS * 64 * tile.N
        each = np.full(items, step)
        found.append(cut(each, sums, places, steps, 0.0, rate, TO_ADD_FEW, shortest))
    return min(found)


def plan(index: Index, tile: Tile, steps: int, processors: int) -> tuple[np.ndarray | int, ...]:
    """What `cut_up` makes of the items, longest strips first.

    Copies are of x, then of dy; places say where a product's two panels of x are and its strip of
    dy; outs name parts of kept blocks of 32 x 32, in row order; of each product those of its first
    panel, then those of the second. Heads end with the strips of an item, its stages, and how many
    values are in the images of a step, a buffer, and in its panels, a stage. In shared memory the
    buffers are first.
    """
    across, blocks, each = tile.N // tile.PANEL, tile.B // 32, tile.GROUPS * tile.UNITS
    n, *of_strips = items_of(panels_kept(index, tile), tile)
    loads = np.zeros((n, tile.X_PANELS + tile.STRIPS * across, 2), np.int32)
    images = np.full((n, each), -1, np.int32)  # which strip of the item a product takes
    outs = np.full((n, tile.GROUPS, tile.OUTS), -1, np.int32)
    strips, n_loads = np.full((n, tile.STRIPS), -1, np.int32), np.zeros(n, np.int32)
    of_products = images, outs.reshape(-1, 2, across)
    of_items = *of_strips, strips, n_loads, loads, *of_products
    _fill(*walk_of(index, tile), blocks, tile.SWAPPED, *of_items)
    of_groups = images.reshape(n, tile.GROUPS, tile.UNITS)
    places = np.empty((n, tile.GROUPS, 1 + 2 * tile.UNITS), np.int32)
    places[:, :, 0] = (of_groups >= 0).sum(2)
    places[:, :, 1::2] = 2 * np.arange(each).reshape(tile.GROUPS, tile.UNITS) | 1 << 16
    places[:, :, 2::2] = tile.X_PANELS + np.maximum(of_groups, 0) * across
    _, whole, pieces = cut_of(n, tile, steps, processors)
    many: np.ndarray = (strips >= 0).sum(1)
    # Blocks of threads that go from item to item keep their stages.
    alone = not tile.STAYS or whole + (n - whole) * pieces <= processors * tile.RESIDENT
    room = many if alone else np.full(n, many.max(initial=0))
    buffer, stage = room * tile.IMAGE, (tile.X_PANELS + room * across) * tile.PANEL_BYTES
    stages = np.minimum((tile.POOL - BUFFERS * buffer) // stage, tile.STAGES)
    heads = np.stack([n_loads, n_loads, many, stages, buffer // 4, stage // 4], 1).astype(np.int32)
    return cut_up((heads, loads, places, outs), whole, pieces, steps)


@compiled()
def _fill(
    indptr, lines, blocks, n, swapped, first, image, strips, n_loads, loads, images, outs
):  # fmt: skip
    """strips (items, STRIPS) : of dy, or -1; images (items, products), outs (products, 2, .)"""
    across, each = outs.shape[2], images.shape[1]
    per_line = max(n // across, 1)
    for strip in range(first.size):
        line = strip * across // n
        i, j, end = indptr[line], indptr[line + 1], indptr[line + 1]
        last = j if across <= n or line + 2 == indptr.size else indptr[line + 2]  # of a second line
        kept, number = 2 * first[strip], image[strip]
        while i < end or j < last:
            one = j == last or (i < end and lines[i] <= lines[j])
            other = i == end or (j < last and lines[j] <= lines[i])
            row = lines[i] if one else lines[j]
            for r in range(n):
                product, half = kept // 2, kept % 2
                if product % each == 0:
                    number = 0
                item = product // each
                strips[item, number] = strip
                images[item, product % each] = number
                slot = 2 * (product % each) + half
                put_panel(loads, item, n_loads[item], row * n + r, slot, 0, ALONE)
                n_loads[item] += 1
                for c in range(across):
                    if across > n:
                        if one and c == 0:
                            outs[product, half, c] = blocks[i]
                        elif other and c == 1:
                            outs[product, half, c] = blocks[j]
                    else:
                        column = strip % per_line * across + c
                        at = column * n + r if swapped else r * n + column
                        outs[product, half, c] = blocks[i] * n * n + at
                kept += 1
            i, j = i + (1 if one else 0), j + (1 if other else 0)
    for item in range(len(images)):
        for number in range(strips.shape[1]):
            for c in range(across if strips[item, number] >= 0 else 0):
                panel, slot = strips[item, number] * across + c, 2 * each + number * across + c
                put_panel(loads, item, n_loads[item], panel, slot, 1, ALONE)
                n_loads[item] += 1
