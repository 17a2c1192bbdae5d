"""Weight-gradients of float32: the roles in a block of threads, and what each computes.

wgmma reads the second operand from shared memory with contiguous terms of the sum, and in a
batch-major dy they are below each other: so some warps do nothing but split the panels of dy into
hi and lo, a step ahead of the warpgroups that multiply, and leave images of the strips in one of
BUFFERS buffers. x passes through registers.

Lane 4 g + q of a warp has the rows g and g + 8 of an mma of 16 rows, and of every 8 terms of the
sum the q-th and the (q + 4)-th. Which terms these are is free as long as both operands agree: here
rows 2 q and 2 q + 1 of the batch. Rows g and g + 8 are two neighbouring features. So what is read
together from swizzled panels of 32 lines of 128 bytes shares no bank.

An item is products, of 64 features of x, two panels of 32 that a strip of N columns of dy keeps, by
the strip. The plan is worked out once for every layout (`plan`).
"""

from functools import cache
from math import ceil, exp
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbsparse.device import SIMULATED
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.gated import keeping, numbers_of
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import ALONE, Tile, put_panel
from numbsparse.kernels.parts.pieces import clear
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.parts.repair import nan_in_sums, repair_block
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.split import splitting
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    as_float32,
    as_uint32,
    fence_proxy_async,
    load_2xu32,
    load_4xf32,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    store_2xu32,
    store_4xf32,
    sync_warp,
    wait_for_earlier_kernels,
    wgmma_split,
)
from numbsparse.layout import Index, Walk

LINE = 32  # values of a line of a panel
BUFFERS = 2  # each for the images of one step
NO_ROOM = 1 << 31  # more items than there are
PAIRED = 1.6  # the time of a product of 64 columns, where one of 32 takes 1
FEWER = 0.8  # times as many items have x and dy exchanged: 1 to 1.37 times as fast (H200)


@cache
def supplier(tile: Tile, kind: str, transposed: tuple[bool, bool], load: Any, gated: bool) -> Any:
    """`supplier`: warps that make images of dy; the last one requests copies, one lane a panel."""
    STAGES, LOADERS, DEPTH = tile.STAGES, tile.LOADERS, tile.DEPTH
    PANEL_BYTES, X_SIZE = tile.PANEL_BYTES, tile.X_PANELS * tile.PANEL_BYTES // 4
    FULL, EMPTY, SHOWN, FREE = 0, STAGES, 2 * STAGES, 2 * STAGES + BUFFERS
    STAYS, AHEAD, transpose = tile.STAYS, tile.AHEAD, transposer(tile, kind, transposed[1])
    keep = keeping(tile)

    @cuda.jit(device=True)
    def loads_of(tables, item, gates):
        """(steps, row, panel, code, mine, nbytes): what a lane requests for a step of an item."""
        heads, loads, places, outs = tables
        lane, panel, code = uint32(cuda.threadIdx.x) % 32, int32(0), uint32(0)
        mine, nbytes = lane < heads[item, 2], uint32(heads[item, 3] * PANEL_BYTES)
        if mine:
            panel, code = loads[item, lane, 0], uint32(loads[item, lane, 1])
        if gated:
            mine, n = keep(heads, loads, places, outs, item, gates, code, mine)
            nbytes = uint32(n * PANEL_BYTES)
        if AHEAD:
            wait_for_earlier_kernels()
        return heads[item, 1], int32(heads[item, 0] * DEPTH), panel, code, mine, nbytes

    @cuda.jit(device=True)
    def supply(own, maps, tables, item, gates, shared, base, bars):
        heads = tables[0]
        ring = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory
        lane, items = uint32(cuda.threadIdx.x) % 32, heads.shape[0]
        steps, strips, stages = heads[item, 1], heads[item, 5], uint32(heads[item, 6])
        buffer_size, stage_size = uint32(heads[item, 7]), uint32(heads[item, 8])
        begin = uint32(base // 4 + BUFFERS * buffer_size)
        asks, asked, left, row = own == LOADERS - 1, item, int32(0), int32(0)
        panel, code, mine, nbytes = int32(0), uint32(0), False, uint32(0)
        stage = buffer = then = phase = buffer_phase = uint32(0)
        then_phase, step = uint32(1), int32(1) - int32(stages)
        if asks:
            left, row, panel, code, mine, nbytes = loads_of(tables, item, gates)
        while steps > 0:
            if left > 0:
                mbarrier_wait(bars, EMPTY + then, then_phase)
                if lane == 0:
                    mbarrier_expect(bars, FULL + then, nbytes)
                if mine:
                    at = uint32(4 * (begin + then * stage_size))
                    load(maps, panel, row, code, shared, at, bars, FULL + then)
                left, row = int32(left - 1), int32(row + DEPTH)
                then, then_phase = following(then, then_phase, stages)
                if STAYS and left == 0:
                    asked += cuda.gridDim.x
                    if asked < items:
                        left, row, panel, code, mine, nbytes = loads_of(tables, asked, gates)
            if step >= 0:
                mbarrier_wait(bars, FULL + stage, phase)
                mbarrier_wait(bars, FREE + buffer, buffer_phase ^ 1)
                start = uint32(begin + stage * stage_size + X_SIZE)
                transpose(ring, start, own, strips, uint32(base // 4 + buffer * buffer_size))
                fence_proxy_async()
                sync_warp()
                if lane == 0:
                    mbarrier_arrive(bars, EMPTY + stage)
                    mbarrier_arrive(bars, SHOWN + buffer)
                stage, phase = following(stage, phase, stages)
                buffer, buffer_phase = following(buffer, buffer_phase, BUFFERS)
            step = int32(step + 1)
            if step == steps:
                item += cuda.gridDim.x
                if not STAYS or item >= items:
                    break
                steps, strips, step = heads[item, 1], heads[item, 5], int32(0)

    return supply


@cache
def transposer(tile: Tile, kind: str, dy_transposed: bool) -> Any:
    """transpose(ring, start, warp, count, buffer): images of `count` strips; see `ptx.wgmma_split`.

    Column 4 k + e of each 32 is in the e-th matrix of 8 columns, there in line 2 k, or from the
    fifth k on in those between: so four lanes store 64 bytes side by side. Here a lane has four
    terms of each of four columns, or of a feature-major dy 16 terms of one.
    """
    N, LOADERS, HALF, ACROSS = tile.N, tile.LOADERS, tile.DEPTH * tile.N, tile.N // tile.PANEL
    SIZE, PER_IMAGE, IMAGE = tile.PANEL_BYTES // 4, tile.N // 16, tile.IMAGE // 4
    RAW, exact = (4, 4), kind == "highest"
    split = splitting(exact)

    @cuda.jit(device=True)
    def line_of(four):
        return 4 * (four % 4 * 2 + four // 4)

    @cuda.jit(device=True)
    def store(ring, at, a, b, c, d):
        (ah, al), (bh, bl), (ch, cl), (dh, dl) = split(a), split(b), split(c), split(d)
        store_4xf32(ring, at, as_float32(ah), as_float32(bh), as_float32(ch), as_float32(dh))
        if exact:
            at = at + HALF
            store_4xf32(ring, at, as_float32(al), as_float32(bl), as_float32(cl), as_float32(dl))

    @cuda.jit(device=True)
    def from_rows(ring, panel, chunk, image):
        lane = uint32(cuda.threadIdx.x) % 32
        low, high = lane % 8, lane // 8
        raw = cuda.local.array(RAW, float32)
        for j in range(4):
            line = 8 * (high // 2) + high % 2 + 2 * j
            four = load_4xf32(ring, panel + (16 * chunk + line) * LINE + (low ^ line % 8) * 4)
            for e in range(4):
                raw[j, e] = four[e]
        to = image + (4 * chunk + high) * (4 * N) + line_of(low)
        for e in range(4):
            store(ring, to + e * 32, raw[0, e], raw[1, e], raw[2, e], raw[3, e])

    @cuda.jit(device=True)
    def from_columns(ring, panel, chunk, image):
        lane = uint32(cuda.threadIdx.x) % 32
        low, high = lane % 8, lane // 8
        line, raw = 4 * low + high, cuda.local.array(RAW, float32)
        # Half of the lanes begin with the other 8 terms, to avoid bank conflicts.
        start, begin = panel + line * LINE, low // 4
        for j in range(2):
            eight = 2 * chunk + (j ^ begin)
            for u in range(2):
                four = load_4xf32(ring, start + ((2 * eight + u) ^ line % 8) * 4)
                for e in range(4):
                    raw[2 * j + u, e] = four[e]
        for j in range(2):
            eight = 2 * chunk + (j ^ begin)
            to, k = image + eight * (8 * N) + high * 32 + line_of(low), 2 * j
            for u in range(2):
                terms = raw[k, u], raw[k, u + 2], raw[k + 1, u], raw[k + 1, u + 2]
                store(ring, to + u * (4 * N), *terms)

    @cuda.jit(device=True)
    def transpose(ring, start, warp, count, buffer):
        for unit in range(warp, count * PER_IMAGE, LOADERS):
            panel, chunk = unit // 2, unit % 2
            image = buffer + unit // PER_IMAGE * IMAGE + panel % ACROSS * 128
            if dy_transposed:
                from_columns(ring, start + panel * SIZE, chunk, image)
            else:
                from_rows(ring, start + panel * SIZE, chunk, image)

    return transpose


@cache
def multiplier(tile: Tile, kind: str, transposed: tuple[bool, bool], gated: bool) -> Any:
    """`multiplier`, with the sums (UNITS, N / 8, 4) in place; if `gated`, of units left."""
    STAGES, IMAGE, UNITS, DEPTH = tile.STAGES, tile.IMAGE // 4, tile.UNITS, tile.DEPTH
    FULL, EMPTY, SHOWN, FREE = 0, STAGES, 2 * STAGES, 2 * STAGES + BUFFERS
    VALUES, exact = (UNITS, DEPTH // 2), kind == "highest"
    split, read, SIZE = splitting(exact), reader(tile, transposed[0]), tile.PANEL_BYTES // 4
    PER_PANEL, X_PANELS = IMAGE * tile.PANEL // tile.N, tile.X_PANELS
    add, one = (wgmma_split(tile.N, DEPTH // 8, exact, units) for units in (UNITS, 1))
    number_of = numbers_of(tile, gated)

    @cuda.jit(device=True)
    def multiply(warp, head, places, line, shared, base, bars, ring_at, sums):
        ring = cuda.shared.array(0, float32, ALIGNMENT)
        lane, group = uint32(cuda.threadIdx.x) % 32, warp // 4
        stages, buffer_size = uint32(number_of(head, 6)), uint32(number_of(head, 7))
        stage_size, begin = uint32(number_of(head, 8)), uint32(base // 4 + BUFFERS * buffer_size)
        number = places[line, group, 0]
        half, row = warp % 4 // 2, warp % 2 * 16
        upper_x = uint32(begin + ((places[line, group, 1] & 0xFFFF) + half) * SIZE)
        lower_x = uint32(begin + ((places[line, group, 2 * UNITS - 1] & 0xFFFF) + half) * SIZE)
        upper = uint32(base // 4 + (places[line, group, 2] - X_PANELS) * PER_PANEL)
        lower = uint32(base // 4 + (places[line, group, 2 * UNITS] - X_PANELS) * PER_PANEL)
        raw = cuda.local.array(VALUES, float32)
        hi, lo = cuda.local.array(VALUES, uint32), cuda.local.array(VALUES, uint32)
        clear(sums)
        stage, phase, buffer, buffer_phase = ring_at
        for _ in range(number_of(head, 1)):
            mbarrier_wait(bars, FULL + stage, phase)
            at = uint32(stage * stage_size)
            read(ring, uint32(upper_x + at), row, raw[0])
            if UNITS > 1:
                read(ring, uint32(lower_x + at), row, raw[1])
            for m in range(UNITS):
                for i in range(DEPTH // 2):
                    hi[m, i], lo[m, i] = split(raw[m, i])
            fence_proxy_async()  # or the copy engine may write what is still being read
            sync_warp()
            if lane == 0:
                mbarrier_arrive(bars, EMPTY + stage)
            mbarrier_wait(bars, SHOWN + buffer, buffer_phase)
            at = uint32(buffer * buffer_size)
            if UNITS > 1 and (not gated or number == UNITS):
                add(sums, hi, lo, ring, upper + at, lower + at)
            elif not gated or number == 1:
                one(sums[0], hi[0], lo[0], ring, upper + at)
            if lane == 0:
                mbarrier_arrive(bars, FREE + buffer)
            stage, phase = following(stage, phase, stages)
            buffer, buffer_phase = following(buffer, buffer_phase, BUFFERS)
        return stage, phase, buffer, buffer_phase

    return multiply


@cache
def reader(tile: Tile, x_transposed: bool) -> Any:
    """read(ring, start, row, raw): raw = what a lane has of 16 rows of x, of the panel at `start`
    those from `row` on."""
    EIGHTS = tile.DEPTH // 8

    @cuda.jit(device=True)
    def read_rows(ring, start, row, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for k in range(2):
            line = 2 * q + k
            at = start + line * LINE + ((row // 4 + g // 2) ^ line) * 4 + g % 2 * 2
            for s in range(EIGHTS):
                a, b = load_2xu32(ring, at + s * (8 * LINE))
                raw[4 * s + 2 * k], raw[4 * s + 2 * k + 1] = as_float32(a), as_float32(b)

    @cuda.jit(device=True)
    def read_columns(ring, start, row, raw):
        lane = uint32(cuda.threadIdx.x) % 32
        g, q = lane // 4, lane % 4
        for u in range(2):
            line = 2 * g + u  # and of 16 rows, so that these shift no piece
            own = uint32(line * LINE + (q // 2 ^ line % 8) * 4 + q % 2 * 2)
            for s in range(EIGHTS):
                a, b = load_2xu32(ring, start + row * LINE + int64(own ^ 8 * s))
                raw[4 * s + u], raw[4 * s + 2 + u] = as_float32(a), as_float32(b)

    return read_columns if x_transposed else read_rows


def storer(tile: Tile, kind: str, transposed: tuple[bool, bool]) -> Any:
    """`storer`, of no kind of parts of blocks. Where a sum is NaN, the lane that has it repairs it:
    a split makes NaN of infinities."""
    repairs = transposed if kind == "highest" else None
    return storing(tile, tile.B if kind else tile.PART, repairs)


@cache
def storing(tile: Tile, B: int, repairs: tuple[bool, bool] | None = None) -> Any:
    """To blocks of B x B: four neighbours at once; two, where x and dy are exchanged.

    repairs : whether x and dy are feature-major, as `repair_block` takes it; None, there is no need
    """
    swapped, UNITS = tile.SWAPPED, tile.UNITS
    orders = (swapped, *(repairs or (False, False)))
    ACROSS, PARTS = tile.N // tile.PANEL, B // 32
    DOWN, ALONG = (1, B) if swapped else (B, 1)  # from a row to the next, and from a column

    @cuda.jit(device=True)
    def place_of(m, c, warp, outs, item):
        """Where a lane's sums of the c-th 32 columns of a product begin; or -1."""
        lane, group = uint32(cuda.threadIdx.x) % 32, warp // 4
        half, row = warp % 4 // 2, int64(warp % 2 * 16 + 2 * (lane // 4))
        part = int64(outs[item, group, (2 * m + half) * ACROSS + c])
        at = part // PARTS * (32 * B) + part % PARTS * 32
        return at + row * DOWN + 4 * (lane % 4) * ALONG if part >= 0 else int64(-1)

    @cuda.jit(device=True)
    def store_rows(of, c, i, out, at):
        for u in range(2):
            a, b, k = of[4 * c], of[4 * c + 1], 2 * u + i
            store_4xf32(out, at + u * B, a[k], b[k], of[4 * c + 2, k], of[4 * c + 3, k])

    @cuda.jit(device=True)
    def store_columns(of, c, i, out, at):
        for e in range(4):
            sums = of[4 * c + e]
            store_2xu32(out, at + e * B, as_uint32(sums[i]), as_uint32(sums[2 + i]))

    store_part = store_columns if swapped else store_rows

    @cuda.jit(device=True)
    def store(sums, warp, places, outs, item, out, dense):
        for m in range(UNITS):
            for c in range(ACROSS):
                start = place_of(m, c, warp, outs, item)
                if start >= 0:
                    for i in range(2):
                        store_part(sums[m], c, i, out, start + 16 * i * ALONG)
        if repairs is not None and nan_in_sums(sums):
            for number in range(8 * outs.shape[2]):  # of a constant the loop would be unrolled
                c, u, e = number // 16, number // 8 % 2, number % 8
                start = place_of(c // ACROSS, c % ACROSS, warp, outs, item)
                if start >= 0:
                    at = start + u * DOWN + (e // 4 * 16 + e % 4) * ALONG
                    repair_block(out, at, B, dense, orders)

    return store


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
    ways = plans.STEP_OF_ONE[: tile.RESIDENT] if tile.UNITS == 1 else (plans.STEP_IN_US,)
    found = []
    for resident, step in enumerate(ways, 1):
        places, rate, shortest = processors * resident, plans.SUMS_IN_US, plans.SHORTEST
        if 2 * items <= places:
            rate, shortest = plans.SUMS_IN_US_OF_FEW, plans.SHORTEST_OF_FEW
        sums = items % places * tile.GROUPS * tile.UNITS * 64 * tile.N
        each = np.full(items, step)
        found.append(plans.cut(each, sums, places, steps, 0.0, rate, plans.TO_ADD_FEW, shortest))
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
    return plans.cut_up((heads, loads, places, outs), whole, pieces, steps)


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
