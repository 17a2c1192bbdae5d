"""Slots of a region: which kept blocks they are, and how their sums get to dvalues.

A slot is 16 x B values: a block of 16 x 16, or two of 8 x 8 of one column, one after the other.
They are in order of columns, so that most find the dy of their column already in registers. Lanes
put their sums in their places in shared memory, and read neighbours, 8 bytes to 32, of whole
blocks.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import Cuts, Sums, regions_of_blocks
from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.parts.pixels import WIDTHS, boxes_of
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.repair import repair_block
from numbsparse.kernels.parts.strip import Region
from numbsparse.kernels.parts.swizzle import BOX_BITS, PIECE, feature_of, feature_of_eight
from numbsparse.kernels.parts.words import PACK, words_of_lane
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    as_float32,
    as_uint32,
    cluster_sync,
    let_next_kernel_start,
    load_4xf32_at,
    shfl_idx,
    store_4xf32,
    sync_warp,
    wait_for_earlier_kernels,
)
from numbsparse.layout import Index

NO_GROUP = -1
PLACE_BITS = 10
PLACE = (1 << PLACE_BITS) - 1
NEW_COLUMN = 1 << 3 * PLACE_BITS
ADDERS, AHEAD = 4, 4  # warps of a block that adds up what was cut; pieces read at once
MANY_AHEAD = {8: 16, 16: 8}  # of regions that are cut into many: where taps share boxes
# Pieces of a slot: so many are added by all warps of a block of threads. 16 to 64 of 8,192 rows and
# 512 to 1,024 features took 0.74 to 0.93 of the time (H200).
SHARED_FROM = 8


class Into(NamedTuple):
    """Where sums go, as one argument of a kernel."""

    partials: Any  # of regions that were cut
    blocks: Any  # of each slot, see `plan_regions`
    dvalues: Any  # along one axis


def plan_boxes(
    index: Index, B: int, widths: tuple[int, int], region: Region, offsets: Any = None
) -> tuple[Any, ...]:
    """As `plan_regions`. With the `offsets` of taps x are images: then behind the groups of a
    region, what `pixels` knows of each."""
    sides = -(-widths[0] // B), -(-widths[1] // B)
    groups, *rest = plan_regions(index, B, sides, region)
    if offsets is not None:
        a_tap = widths[0] // len(offsets) // (region.FEATURES * region.SHIFTS)
        of_x = boxes_of(groups >> 1, offsets, a_tap)
        of_dy = boxes_of(groups >> 1, ((0, 0, 0, 0),), WIDTHS)
        groups = np.hstack([groups, np.where(groups & 1, of_dy, of_x)])
    return groups, *rest


def plan_regions(index: Index, B: int, sides: tuple[int, int], region: Region) -> tuple[Any, ...]:
    """What `regions` reads.

    groups (regions, GROUPS): twice the group, plus 1 where it is one of dy; or -1.
    codes (regions, WARPS, SLOTS): where both pieces of x and the first of dy are in a row of a
    stage, in 10 bits each, and NEW_COLUMN where the slot before had another column. Of boxes that
    taps share in BOX_BITS each, of x by lines of BOX to a group.
    used (regions, WARPS): the slots that are taken, first ones first.
    blocks (regions, WARPS, SLOTS, 2): the stored blocks, or -1.
    """
    of_group = region.FEATURES // B
    row_groups, column_groups = -(-sides[0] // (of_group * region.SHIFTS)), -(-sides[1] // of_group)
    height, items, slots, _ = planned(index, regions_of_blocks, B, sides, region)
    n, group_of = slots.size, np.arange(sides[0]) // (of_group * region.SHIFTS)
    lines = tuple(index.columns), group_of, group_of // height, items
    xs, dys = np.zeros((n, row_groups), np.int16), np.zeros((n, column_groups), np.int16)
    groups = np.full((n, region.GROUPS), NO_GROUP, np.int32)
    _line_up(*lines, of_group, xs, dys, groups)

    codes = np.zeros((n, region.WARPS, region.SLOTS), np.int64 if region.BOX else np.uint32)
    blocks = np.full((*codes.shape, 2), -1, np.int32)
    used = np.zeros((n, region.WARPS), np.int32)
    taken, last, run = np.zeros(n, np.int64), np.full(n, -1), np.zeros(n, np.int64)
    rows, places = (of_group * many for many in (region.SHIFTS, region.BOX or 1))
    how = of_group, rows, places, BOX_BITS if region.BOX else PLACE_BITS, B
    _deal_slots(*lines, *how, xs, dys, slots, taken, last, run, codes, used, blocks)
    return groups, *(a.reshape(-1) for a in (codes, used, blocks))


@compiled()
def _line_up(walk, group_of, panel_of, items, of_group, xs, dys, groups):
    """The groups of each region, those of x first, and in xs and dys the place of each."""
    indptr, rows, _ = walk
    for column in range(indptr.size - 1):
        for k in range(indptr[column], indptr[column + 1]):
            item = items[panel_of[rows[k]], column]
            xs[item, group_of[rows[k]]] = dys[item, column // of_group] = 1
    for item in range(len(groups)):
        place = 0
        for side, places in enumerate((xs, dys)):
            for group in range(places.shape[1]):
                if places[item, group]:
                    groups[item, place], places[item, group] = 2 * group + side, place
                    place += 1


@compiled()
def _deal_slots(
    walk, group_of, panel_of, items, of_group, of_rows, of_places, bits, B, xs, dys, slots, taken,
    last, run, codes, used, blocks,
):  # fmt: skip
    """Equal runs of the slots, but for one, to the warps of each region, column by column.

    of_rows, of_places : blocks of a group of x, and places for them in a stage
    taken, last, run : of each region so far, the slots, its last column, and the blocks of that
    """
    (indptr, rows, stored), per_slot, pieces = walk, 16 // B, B // PIECE
    n_warps = used.shape[1]
    for column in range(indptr.size - 1):
        own = column // of_group
        for k in range(indptr[column], indptr[column + 1]):
            row = rows[k]
            item, group = items[panel_of[row], column], group_of[row]
            run[item] = run[item] + 1 if last[item] == column else 0
            last[item], half = column, run[item] & (per_slot - 1)  # per_slot is 1 or 2
            taken[item] += 1 - half
            nth = taken[item] - 1
            warp = ((nth + 1) * n_warps - 1) // slots[item]
            slot = nth - slots[item] * warp // n_warps
            x = (xs[item, group] * of_places + row - group * of_rows) * pieces
            dy = (dys[item, own] * of_group + column - own * of_group) * pieces
            blocks[item, warp, slot, half] = stored[k]
            if half:
                codes[item, warp, slot] &= ~(((1 << bits) - 1) << bits)
                codes[item, warp, slot] |= x << bits
            else:
                new = run[item] == 0 or slot == 0
                second = x + (pieces - 1)
                codes[item, warp, slot] = x | second << bits | dy << 2 * bits | new << 3 * bits
                used[item, warp] += 1


@cache
def place_of(sums: Sums) -> Any:
    """(row, column) of the i-th sum of a lane in the 16 x B values of a slot."""
    x_transposed, dy_transposed, B = sums.x_transposed, sums.dy_transposed, sums.B

    @cuda.jit(device=True)
    def place_16_bit(i):
        lane = uint32(cuda.threadIdx.x) % 32
        return lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2

    @cuda.jit(device=True)
    def place_tf32(i):
        lane = uint32(cuda.threadIdx.x) % 32
        g, half, line = lane // 4, i // 2 % 2, lane % 4 * 2 + i % 2
        row = feature_of(g, half) if x_transposed else 2 * g + half
        if B == 8:
            return row, feature_of_eight(line) if dy_transposed else line
        return row, feature_of(line, i // 4) if dy_transposed else 2 * line + i // 4

    return place_16_bit if sums.region.ITEM == 2 else place_tf32


@cache
def put_slot(sums: Sums) -> Any:
    """The sums of a slot to shared memory, from a word on."""
    COUNT, LINE, place = 4 * sums.TILES, sums.B * sums.region.ITEM // 4, place_of(sums)
    pair = PACK.get(sums.arithmetic, PACK["f16"])

    @cuda.jit(device=True)
    def put_16_bit(acc, words, at):
        for i in range(0, COUNT, 2):
            row, column = place(i)
            c = acc[i // 4]
            words[at + row * LINE + column // 2] = pair(c[i % 4], c[i % 4 + 1])

    @cuda.jit(device=True)
    def put_float32(acc, words, at):
        for i in range(COUNT):
            row, column = place(i)
            words[at + row * LINE + column] = as_uint32(acc[i // 4, i % 4])

    return put_16_bit if sums.region.ITEM == 2 else put_float32


@cuda.jit(device=True)
def stored_blocks(blocks, slot):
    """Those of a warp's slots, two a slot, from this one on: a lane has one of the first 32, and
    one of those behind. What each store would wait for is read at once."""
    at, last = 2 * slot + cuda.threadIdx.x % 32, blocks.size - 1
    return blocks[min(at, last)], blocks[min(at + 32, last)]


@cuda.jit(device=True)
def block_of(stored, slot, half):
    """The block of half a slot, or -1."""
    at = uint32(2 * slot + half)
    first, second = shfl_idx(stored[0], at % 32), shfl_idx(stored[1], at % 32)
    return int64(first if at < 32 else second)


@cache
def store_slot(sums: Sums) -> Any:
    """A slot from shared memory to its blocks, a few neighbours of a row at a time. `stored` are
    those of its warp. What is beyond the edges was summed of zeros."""
    B, ITEM = sums.B, sums.region.ITEM
    BLOCK, WORDS = B * B * ITEM // 4, 16 * B * ITEM // 128  # words of a block, and of a lane
    RUN = min(WORDS, 4)
    load, store_words = words_of_lane(WORDS)
    orders = False, sums.x_transposed, sums.dy_transposed
    exact = sums.arithmetic == "highest" and not sums.of_images

    @cuda.jit(device=True)
    def store(words, at, stored, slot, into, dense):
        lane = cuda.threadIdx.x % 32
        half = lane // 16 if B == 8 else 0
        block = block_of(stored, slot, half)
        if block >= 0:
            own, first = load(words, at), (block - half) * BLOCK
            store_words(into.dvalues, first, own)
            if exact:
                bad = 0
                for w in range(WORDS):
                    bad = bad if as_float32(own[w]) == as_float32(own[w]) else WORDS
                for w in range(bad):
                    number = first + w // RUN * 128 + lane * RUN + w % RUN
                    repair_block(into.dvalues, number, B, dense, orders)

    return store


@cache
def storer(sums: Sums) -> Any:
    """The sums of a warp's slots, in its own part of the ring, as many slots at a time as it holds;
    or to the partial sums, where the region is one of several pieces."""
    region = sums.region
    WARPS, SLOTS, SLOT = region.WARPS, region.SLOTS, 16 * sums.B * region.ITEM // 4
    AT_ONCE = min(SLOTS, region.STAGES * region.STAGE_BYTES // 4 // (WARPS * SLOT))
    put, store = put_slot(sums), store_slot(sums)

    def some_slots(k: int) -> Any:
        first, last = k * AT_ONCE, min((k + 1) * AT_ONCE, SLOTS)

        @cuda.jit(device=True)
        def store_some(acc, used, stored, words, at, into, dense):
            if first > 0:
                sync_warp()
            for p in range(first, last):  # which are used is known too late for registers
                put(acc[p], words, at + (p - first) * SLOT)
            sync_warp()
            for p in range(first, min(used, last)):
                store(words, at + (p - first) * SLOT, stored, p, into, dense)

        return store_some

    store_slots = one_by_one(some_slots, -(-SLOTS // AT_ONCE))

    @cuda.jit(device=True)
    def store_region(acc, warp, slot, partial, used, words, start, into, dense):
        if partial >= 0:
            pieces.save(into.partials, int64(partial) * WARPS + warp, acc)
        else:
            at, stored = start + warp * (AT_ONCE * SLOT), stored_blocks(into.blocks, slot)
            store_slots(acc, used, stored, words, at, into, dense)

    return store_region


@cache
def storer_of_cluster(sums: Sums) -> Any:
    """`storer` of a region whose blocks of threads have a part of all sums each, which they leave
    in their shared memory as their lanes hold them; each block adds up some of the slots. Left
    where they are added (`pieces.add_parts`), 0.97 to 1.06 of the time, 1.02 at the mean (H200)."""
    region, TILES = sums.region, sums.TILES
    WARPS, SLOTS, SPLIT, ALL = region.WARPS, region.SLOTS, region.SPLIT, region.WARPS * region.SLOTS
    EACH, LINE, SLOT = -(-ALL // (WARPS * SPLIT)), 32 * 4, 16 * sums.B * region.ITEM // 4
    put, store = put_slot(sums), store_slot(sums)

    @cuda.jit(device=True)
    def store_slice(acc, warp, slot, partial, used, words, start, into, dense):
        floats = cuda.shared.array(0, float32, ALIGNMENT)
        lane, total = uint32(cuda.threadIdx.x) % 32, cuda.local.array((TILES, 4), float32)
        own, first = int32(cuda.blockIdx.x) % SPLIT + SPLIT * warp, slot - warp * SLOTS
        # Two lanes know the blocks of a slot that the warp adds up.
        known = 2 * (first + min(own + SPLIT * WARPS * (lane // 2), ALL - 1)) + lane % 2
        stored = into.blocks[known], int32(-1)
        for p in range(SLOTS):
            for t in range(TILES):
                c = acc[p, t]
                at = uint32(start + ((warp * SLOTS + p) * TILES + t) * LINE + 4 * lane)
                store_4xf32(floats, at, c[0], c[1], c[2], c[3])
        cluster_sync()
        at = start + (ALL * TILES * LINE + warp * SLOT)
        for k in range(EACH):
            number = own + SPLIT * WARPS * k
            if number < ALL and block_of(stored, k, 0) >= 0:
                for t in range(TILES):
                    for i in range(4):
                        total[t, i] = 0
                for other in range(SPLIT):
                    for t in range(TILES):
                        where = uint32(start + (number * TILES + t) * LINE + 4 * lane)
                        four = load_4xf32_at(floats, where, uint32(other))
                        for i in range(4):
                            total[t, i] += four[i]
                put(total, words, at)
                sync_warp()
                store(words, at, stored, k, into, dense)
                sync_warp()

    return store_slice


def add_up(sums: Sums, cuts: Cuts, into: Into, dense: Any, soon: bool) -> None:
    """The sums of the regions that were cut over the batch, the last ones; a warp per slot, or
    those of a block of threads share its pieces. By `pieces.add_pieces` images took 0.92 to 0.95 of
    the time, but 28 matrices 0.93 to 1.27, of 16 bits 1.01 at the mean, of float32 1.06 (H200).

    Those of 16 bits are in the same places whatever the orders of x and dy: one kernel for all.
    """
    if sums.region.ITEM == 2:
        sums = sums._replace(x_transposed=False, dy_transposed=False)
    slots, uncut = cuts.left * sums.region.CODES, cuts.whole * sums.region.CODES
    ways = ADDERS if cuts.pieces >= SHARED_FROM else 1
    args = uncut, slots, cuts.pieces, ways, int(soon), into, dense
    launch(total_kernel(sums), -(-slots * ways // ADDERS), 32 * ADDERS, *args, overlap=True)


@cache
def total_kernel(sums: Sums) -> Any:
    SLOTS, ACC = sums.region.WARPS * sums.region.SLOTS, (1, sums.TILES, 4)
    WORDS, put, store = 16 * sums.B * sums.region.ITEM // 4, put_slot(sums), store_slot(sums)
    AT_ONCE = MANY_AHEAD[sums.B] if sums.region.BOX else AHEAD
    ALL, COMING, GATED = ADDERS * WORDS, (AT_ONCE, *ACC), sums.gated
    PARTS = ADDERS * pieces.floats_of(1, sums.TILES)

    @cuda.jit
    def kernel(uncut, slots, count, ways, soon, into, dense):
        if soon:
            let_next_kernel_start()
        warp = uint32(cuda.threadIdx.x) // 32
        way = int32(warp) if ways > 1 else int32(0)
        number = int64(cuda.blockIdx.x) * (1 if ways > 1 else ADDERS) + int32(warp) - way
        which, slot = number // SLOTS, number % SLOTS
        words = cuda.shared.array(ALL, uint32, ALIGNMENT)
        parts = cuda.shared.array(PARTS, float32, ALIGNMENT)
        if number >= slots:
            return
        if GATED:  # then they are of the kernel before
            wait_for_earlier_kernels()
        stored = stored_blocks(into.blocks, uncut + number)
        acc, coming = cuda.local.array(ACC, float32), cuda.local.array(COMING, float32)
        pieces.clear(acc)
        wait_for_earlier_kernels()
        first = way
        while first < count:
            for p in range(AT_ONCE):
                pieces.clear(coming[p])  # the last one is read again
                piece = which * count + min(first + p * ways, count - 1)
                pieces.add_saved(into.partials, piece * SLOTS + slot, coming[p])
            for p in range(AT_ONCE):
                if first + p * ways < count:
                    pieces.add(acc, coming[p])
            first += ways * AT_ONCE
        if ways > 1:
            pieces.save(parts, way, acc)
            cuda.syncthreads()
            if way > 0:
                return
            pieces.clear(acc)
            for other in range(ADDERS):
                pieces.add_saved(parts, other, acc)
        put(acc[0], words, warp * WORDS)
        sync_warp()
        store(words, warp * WORDS, stored, 0, into, dense)

    return kernel
