"""The plans of layouts made on a GPU, written there.

**Of forward and input_grad** the records are those of `plan`, but neighbouring strips are a group,
whatever they keep: which strips meet the same inputs would take longer to find out than the product
takes. A warp writes the steps of a group; it goes through the words of bits of the group's lines,
32 inputs at a time, whose blocks its lanes look up at once. Where a strip is a group of its own and
a step one block of it, a thread writes the step.

**Of a weight-gradient** a warp goes through the blocks of ROWS neighbouring block rows of B = 32
and closes an item when the next block does not fit; of a block row of B = 64 or 128, and of a strip
of columns of float32, a warp takes each piece. `finish` writes what the item's blocks of threads
load and multiply: lane i has the i-th block of the item, or its i-th input where it has several
lines. The items of a group begin where they would if all before had as many as they could have.
Then they are numbered without gaps, those with most panels first, or, of large grids, those
together that meet the same lines (`order_kernel`); of float32 those that do not fill all places
once more are cut over the batch; and tables are written as `weight_grad_plan.cut_up` leaves them,
empty where no item is. With items cut, an H200 took 5 to 9 % more time of 16 bits, and 13 to 16 %
less of float32 (8,192 rows and features, density 0.1). So of 16 bits only few blocks are cut.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.coordinates import LINES, bits_below, entry_of, sum_up
from numbsparse.kernels.matmul.k6_hopper import plan as of_lines
from numbsparse.kernels.matmul.k6_hopper import weight_grad_float32 as of_float32
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.plan import BEFORE, EDGE, LAST, READ_AHEAD
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import (
    ALONE,
    FEW_ROUNDS,
    Tile,
    sharing_rows,
)
from numbsparse.kernels.parts.pieces import PIECES, STEP
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.parts.plans_on_gpu import LengthsOnGPU, kept_by, lowest, next_kept, ranking
from numbsparse.kernels.parts.regions import MOST
from numbsparse.kernels.ptx import redux_or, shfl_idx, sync_warp
from numbsparse.layout import Index

LONE = 32 if SIMULATED else 128  # threads of a group that is one strip
# Of many items, in several parts of the grid: groups whose items run together, and among how many
# parts these are dealt; and words of 32 inputs from which an item has its own. With 32,768 features
# and density 0.1 4,096 and 1,024 rows took an H200 0.62 and 0.75 of the time of longest first, with
# density 0.03 4,096 rows 0.75, and with 16,384 features 0.95.
NEAR, PARTS, WINDOW = 32, 8, 4
ROWS = 8  # block rows of B = 32 whose blocks are computed together, at most
WORTH = 2.5  # times what adding takes: an item as long is cut, into up to MOST_PIECES
MOST_PIECES = 32
A_STEP = 0.25  # microseconds of a step of 16 bits
REST, WHOLE, ITEMS = range(2, 5)  # more numbers of a cut


@on_gpu_of(of_lines.steps_of)
def steps_on_gpu(
    index: Index, transposed: bool, tile: of_lines.Tile, ragged: bool
) -> tuple[DeviceArray, DeviceArray, LengthsOnGPU]:
    made, walk = index.made, index.rows if transposed else index.columns
    bits = made.rows if transposed else made.columns
    inputs = (index.columns if transposed else index.rows).indptr.size - 1
    groups = -(-(walk.indptr.size - 1) * tile.ACROSS // tile.COLUMNS)
    most = index.block_rows.size * tile.ACROSS * tile.PARTS + groups + READ_AHEAD
    records, lengths = empty((most, tile.RECORD), np.int32), LengthsOnGPU(groups)
    strips = empty((groups, tile.COLUMNS), np.int32)
    out = records.view(np.uint32), strips, lengths.starts, lengths.steps
    edge = inputs - 1 if ragged else -1
    if tile.BLOCKS == 1:
        launch(lone_steps_kernel(tile), groups, LONE, *walk, edge, *out)
        return records, strips, lengths
    launch(steps_kernel(tile), groups, 32, *bits, walk.indptr, walk.blocks, edge, *out)
    return records, strips, lengths


@cache
def lone_steps_kernel(tile: of_lines.Tile) -> Any:
    """With a warp for a group the plan took 12 to 35 us, not 2 (8,192 features, B = 128, H200)."""
    PARTS, ACROSS = tile.PARTS, tile.ACROSS

    @cuda.jit
    def kernel(indptr, inputs, blocks, edge, records, strips, starts, steps):
        group, t = cuda.blockIdx.x, cuda.threadIdx.x
        line, across = group // ACROSS, group % ACROSS
        begin = indptr[line]
        parts = (indptr[line + 1] - begin) * PARTS
        first, many = begin * (ACROSS * PARTS) + group + parts * across, max(parts, 1)
        for i in range(t, many, cuda.blockDim.x):
            last = uint32(LAST if i == many - 1 else 0)
            records[first + i, 0], records[first + i, 1] = last, 0
            if parts > 0:
                x, part = inputs[begin + i // PARTS], i % PARTS
                block = uint32((blocks[begin + i // PARTS] * ACROSS + across) * PARTS + part)
                records[first + i, 0], records[first + i, 1] = uint32(last | uint32(1)), 1 + 256
                records[first + i, 2] = x * PARTS + part
                records[first + i, 3] = uint32(block | uint32(EDGE)) if x == edge else block
        if t == 0:
            strips[group, 0], starts[group], steps[group] = group, first, many

    return kernel


@cache
def steps_kernel(tile: of_lines.Tile) -> Any:
    COLUMNS, INPUTS, BLOCKS, PARTS = tile.COLUMNS, tile.INPUTS, tile.BLOCKS, tile.PARTS
    ACROSS, finish = tile.ACROSS, finishing_steps(tile)

    @cuda.jit
    def kernel(words, before, indptr, blocks, edge, records, strips, starts, steps):
        group, lane, lines = cuda.blockIdx.x, cuda.threadIdx.x, words.shape[0]
        line, across = group * COLUMNS // ACROSS, group * COLUMNS % ACROSS
        if lane < COLUMNS:
            strip = group * COLUMNS + lane
            strips[group, lane] = strip if strip < lines * ACROSS else -1
        named = cuda.local.array(COLUMNS, int32)  # the blocks at the input 32 at + lane
        # As if each block had a step of its own, and each group one more.
        first = indptr[line] * (ACROSS * PARTS) + group
        first += (indptr[line + 1] - indptr[line]) * (across * PARTS)
        step, place, taken = first, 0, 0
        kept, x_tile, block = uint32(0), uint32(0), uint32(0)
        for at in range(words.shape[1]):
            masks, there = kept_by(words, line, COLUMNS, at)
            for c in range(COLUMNS):
                named[c] = 0
                if masks >> uint32(c) & uint32(1):
                    named[c] = blocks[entry_of(words, before, indptr, line + c, at * 32 + lane)]
            sync_warp()  # else shuffles gave other blocks (H200)
            while there != 0:
                bit, columns, there = next_kept(there, masks)
                count, x, entry = int32(cuda.popc(columns)), at * 32 + bit, int32(0)
                for c in range(COLUMNS):
                    of_column = shfl_idx(named[c], uint32(bit))
                    entry = of_column if lane % COLUMNS == c else entry
                for part in range(PARTS):
                    if place == INPUTS or taken + count > BLOCKS:
                        finish(records, step, kept, place, taken, x_tile, block, uint32(0))
                        step, place, taken, kept = step + 1, 0, 0, uint32(0)
                    if lane // COLUMNS == place:
                        x_tile = uint32(x * PARTS + part)
                        block = uint32((entry * ACROSS + across) * PARTS + part)
                        if x == edge:
                            block = uint32(block | uint32(EDGE))
                    kept = uint32(kept | uint32(columns << uint32(place * COLUMNS)))
                    place, taken = place + 1, taken + count
        finish(records, step, kept, place, taken, x_tile, block, uint32(LAST))
        if lane == 0:
            starts[group], steps[group] = first, step + 1 - first

    return kernel


@cache
def finishing_steps(tile: of_lines.Tile) -> Any:
    """finish(records, step, kept, place, taken, x_tile, block, last): the record of a step.

    kept : bit e * COLUMNS + c where column c has a block at the e-th of `place` inputs, and lane
        e * COLUMNS + c knows that input's tile of x, and the block
    """
    COLUMNS, INPUTS, SHARES, SHARE = tile.COLUMNS, tile.INPUTS, tile.SHARES, tile.SHARE
    BITS, FIRST_BLOCK = tile.INPUTS * tile.COLUMNS, tile.SHARES + 1 + tile.INPUTS
    EACH = sum(1 << e * COLUMNS for e in range(INPUTS))  # the first column at each input
    OWN = (1 << SHARE) - 1

    @cuda.jit(device=True)
    def blocks_before(kept, share):
        """Those of the shares before this one."""
        return int32(cuda.popc(uint32(kept & uint32(((1 << share * SHARE) - 1) * EACH))))

    @cuda.jit(device=True)
    def finish(records, step, kept, place, taken, x_tile, block, last):
        lane = int32(cuda.threadIdx.x)
        if lane < SHARES:
            mask = uint32(uint32(blocks_before(kept, lane) << BEFORE) | last)
            for e in range(INPUTS):
                own = uint32(kept >> uint32(e * COLUMNS + lane * SHARE)) & uint32(OWN)
                mask = uint32(mask | uint32(own << uint32(e * SHARE)))
            records[step, lane] = mask
        if lane == 0:
            records[step, SHARES] = uint32(place + 256 * taken)
        if lane % COLUMNS == 0 and lane // COLUMNS < place:
            records[step, SHARES + 1 + lane // COLUMNS] = x_tile
        if lane < BITS and kept >> uint32(lane) & uint32(1):
            share = lane % COLUMNS // SHARE
            own = uint32(kept & uint32((OWN << share * SHARE) * EACH))
            slot = blocks_before(kept, share) + bits_below(own, lane)
            records[step, FIRST_BLOCK + slot] = block

    return finish


@on_gpu_of(plans.plan)
@on_gpu_of(of_float32.plan)
def tables_of(index: Index, tile: Tile, steps: int, processors: int) -> tuple[Any, ...]:
    """As `weight_grad_plan.cut_up`, with room for all that may be cut, -1 where there is none."""
    how, is_float32, places = Cut.of(tile), tile.ITEM == 4, processors // tile.CLUSTER
    places *= tile.RESIDENT
    time = plans.STEP_IN_US if is_float32 else A_STEP if plans.is_deep(tile) else 0.0
    worth = steps * time > WORTH * plans.TO_ADD_FEW
    by_columns = is_float32 and not tile.SWAPPED
    walk, bits = (
        (index.columns, index.made.columns) if by_columns else (index.rows, index.made.rows)
    )
    groups = -(-(walk.indptr.size - 1) // how.LINES) * how.ACROSS
    most = index.block_rows.size * how.ACROSS // how.LEAST + groups  # items
    sides = [side.indptr.size - 1 for side in (index.rows, index.columns)]
    many = index.block_rows.size > 2 * how.PRODUCTS * FEW_ROUNDS * places
    drafts, is_near = Drafts.empty(tile, most), how.LINES > 1 and max(sides) > MOST and many
    starts, numbers = empty((groups,), np.int32), empty((groups + 1,), np.int32)
    table = Bits(bits[0], bits[1], walk.indptr, walk.blocks, walk.indices), drafts, starts, numbers
    if how.LINES == 1:
        pieces = -(-sides[0 if by_columns else 1] // how.MOST)  # of a line, at most
        launch(pieces_kernel(tile), (groups, pieces), 32, *table)
    else:
        window = WINDOW if is_near else bits[0].shape[1]
        launch(items_kernel(tile), groups, 32, window, *table)

    pieces = min(max(steps // 4, 1), MOST_PIECES) if worth else 1
    found, order, cut = empty((most, 2), np.int32), empty((most,), np.int32), empty((5,), np.int32)
    launch(number_kernel, 1, LINES, starts, numbers, places, pieces, how.OUTS, found, cut)
    rounds = FEW_ROUNDS if is_near else most
    ordering = drafts.counts, found, numbers, rounds * places, cut, order
    launch(order_kernel(tile.CLUSTER), most, 32, *ordering)

    some = min(places // 2, most) * how.OUTS  # of what is cut, at most
    most += places if pieces > 1 else 0
    final, threads = Drafts.empty(tile, most), most * tile.CLUSTER
    heads = empty((threads, 9 if is_float32 else 5), np.int32)
    kept = empty((some if pieces > 1 else 1,), np.int32)
    launch(tables_kernel(tile), threads, 32, drafts, order, cut, steps, heads, *final[1:], kept)
    return heads, *final[1:], kept, cut, places * how.OUTS if pieces > 1 else 0


class Drafts(NamedTuple):
    """Of each block of threads; see `weight_grad_plan.tables_of`."""

    counts: DeviceArray  # (n, 2): its copies, and panels that arrive
    loads: DeviceArray
    places: DeviceArray
    outs: DeviceArray

    @classmethod
    def empty(cls, tile: Tile, items: int) -> Drafts:
        n = items * tile.CLUSTER
        shapes = (
            (n, 2),
            (n, width_of(tile), 2),
            (n, tile.GROUPS, 1 + 2 * tile.UNITS),
            (n, tile.GROUPS, tile.OUTS),
        )
        return cls(*(empty(shape, np.int32) for shape in shapes))


@cache
def pieces_kernel(tile: Tile) -> Any:
    """The items of a line: even pieces of it, a warp for each."""
    how, finish = Cut.of(tile), finishing(tile)
    ACROSS, MOST, LEAST = how.ACROSS, how.MOST, how.LEAST

    @cuda.jit
    def kernel(bits, drafts, starts, numbers):
        indptr = bits.indptr
        group, piece, lane = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        line, across = group // ACROSS, group % ACROSS
        here = indptr[line + 1] - indptr[line]
        first = (indptr[line] * ACROSS + across * here) // LEAST + group
        pieces = (here + MOST - 1) // MOST
        most = (here + pieces - 1) // max(pieces, 1)
        if piece < pieces:
            count = min(most, here - piece * most)
            own = bits.inputs[indptr[line] + piece * most + lane] if lane < count else int32(0)
            finish(first + piece, count, line, across, own, uint32(1), bits, drafts)
        if piece == 0 and lane == 0:
            starts[group], numbers[group + 1] = first, pieces

    return kernel


@cache
def items_kernel(tile: Tile) -> Any:
    """The items of a group of lines: a warp closes one when the next input does not fit.

    Inputs follow each other by the last line that keeps them, so that an item meets few lines: on
    random layouts of density 0.1 that saves one panel in ten. They do so among 32 `window` inputs,
    so that items of several groups may meet the same ones. Two blocks of a line make a product, and
    so does an odd one.
    """
    how, finish = Cut.of(tile), finishing(tile)
    N, MOST, LEAST, PRODUCTS = how.LINES, how.MOST, how.LEAST, how.PRODUCTS

    @cuda.jit
    def kernel(window, bits, drafts, starts, numbers):
        words = bits.words
        group, lane = cuda.blockIdx.x, cuda.threadIdx.x
        line, across = group * N, 0
        first = bits.indptr[line] // LEAST + group
        item, count, own, kept, total, odd = first, 0, int32(0), uint32(0), 0, uint32(0)
        for step in range(N * ((words.shape[1] + window - 1) // max(window, 1))):
            last, begin = step % N, step // N * window
            for at in range(begin, min(begin + window, words.shape[1])):
                masks, _ = kept_by(words, line, N, at)
                is_last = uint32(masks >> uint32(last)) == uint32(1)
                there = redux_or(uint32(uint32(1 if is_last else 0) << uint32(lane)))
                while there != 0:
                    bit, lines, there = next_kept(there, masks)
                    total, odd = total + int32(cuda.popc(lines)), uint32(odd ^ lines)
                    if count == MOST or total + int32(cuda.popc(odd)) > 2 * PRODUCTS:
                        finish(item, count, line, across, own, kept, bits, drafts)
                        item, count, total, odd = item + 1, 0, int32(cuda.popc(lines)), lines
                    if lane == count:
                        own, kept = int32(at * 32 + bit), lines
                    count += 1
        if count:
            finish(item, count, line, across, own, kept, bits, drafts)
            item += 1
        if lane == 0:
            starts[group], numbers[group + 1] = first, item - first

    return kernel


@cuda.jit
def number_kernel(starts, numbers, places, most_pieces, each, found, cut):
    """found[i] = where the i-th item is, and its group; and the numbers of what is cut."""
    items = sum_up(numbers, found.shape[0])
    cuda.syncthreads()
    for group in range(cuda.threadIdx.x, starts.size, LINES):
        for item in range(numbers[group], numbers[group + 1]):
            found[item, 0], found[item, 1] = starts[group] + item - numbers[group], group
    if cuda.threadIdx.x == 0:
        rest = items % places
        pieces = min(places // max(rest, 1), most_pieces)
        if rest == 0 or pieces < 2:
            rest = pieces = 0
        cut[PIECES], cut[STEP], cut[REST] = pieces, rest * each, rest
        cut[WHOLE], cut[ITEMS] = items - rest, items


@cache
def order_kernel(CLUSTER: int) -> Any:
    """The items in order, those for which most panels arrive first.

    Of more than `few` memory is what they wait for: then in each part of the grid, NEAR groups by
    one of PARTS of what each has. So those that run together meet few lines, whose panels are in
    the L2 cache.
    """

    @cuda.jit(device=True)
    def length_of(items, i):
        counts, found, numbers, many = items
        length = counts[found[i, 0] * CLUSTER, 1]
        if many:
            group = found[i, 1]
            before, all_of = i - numbers[group], numbers[group + 1] - numbers[group]
            part = PARTS * (group // NEAR) + PARTS * before // all_of
            length -= part << 16
        return length

    rank = ranking(length_of)

    @cuda.jit
    def kernel(counts, found, numbers, few, cut, order):
        item, items = cuda.blockIdx.x, cut[ITEMS]
        if item < items:
            many = items > few
            order[rank(item, items, (counts, found, numbers, many))] = found[item, 0]

    return kernel


@cache
def tables_kernel(tile: Tile) -> Any:
    """What `cut_up` returns, a warp for each block of threads."""
    GROUPS, OUTS, CLUSTER, ALL = tile.GROUPS, tile.OUTS, tile.CLUSTER, tile.GROUPS * tile.OUTS
    WIDTH, EACH = width_of(tile), Cut.of(tile).OUTS
    STRIPS, STAGES, BUFFER, STAGE = Cut.of(tile).HEAD if tile.ITEM == 4 else (0, 0, 0, 0)

    @cuda.jit
    def kernel(drafts, order, cut, all_steps, heads, loads, places, outs, kept):
        share, lane = cuda.blockIdx.x, cuda.threadIdx.x
        item, rank = share // CLUSTER, share % CLUSTER
        pieces, rest, whole, items = cut[PIECES], cut[REST], cut[WHOLE], cut[ITEMS]
        piece, nth, first, steps = -1, 0, 0, all_steps
        if item >= whole and pieces > 0:
            piece, nth = (item - whole) // rest, (item - whole) % rest
            item, first = whole + nth, piece * all_steps // pieces
            steps = (piece + 1) * all_steps // pieces - first
        there = item < items and piece < pieces
        source = order[item] * CLUSTER + rank if there else 0
        if lane == 0:
            heads[share, 0], heads[share, 1] = first, steps if there else 0
            heads[share, 2] = drafts.counts[source, 0] if there else 0
            heads[share, 3] = drafts.counts[source, 1] if there else 0
            heads[share, 4] = 1 if there and piece >= 0 else 0
            if STAGES:
                heads[share, 5], heads[share, 6] = STRIPS, STAGES
                heads[share, 7], heads[share, 8] = BUFFER, STAGE
        for i in range(lane, WIDTH, 32):
            if there and i < drafts.counts[source, 0]:
                loads[share, i, 0] = drafts.loads[source, i, 0]
                loads[share, i, 1] = drafts.loads[source, i, 1]
        for i in range(lane, GROUPS * places.shape[2], 32):
            group, at = i // places.shape[2], i % places.shape[2]
            places[share, group, at] = drafts.places[source, group, at] if there else 0
        for i in range(lane, ALL, 32):
            group, at = i // OUTS, i % OUTS
            block = drafts.outs[source, group, at] if there else -1
            if piece >= 0 and there:
                slot = nth * EACH + i % EACH
                if piece == 0:
                    kept[slot] = block
                if block >= 0:
                    block = piece * rest * EACH + slot
            outs[share, group, at] = block

    return kernel


put, share_row = cuda.jit(device=True)(plans.put), sharing_rows(cuda.jit(device=True))


class Bits(NamedTuple):
    """Which inputs lines keep, as `layout.Made` has them, and the same as a `Walk`."""

    words: Any
    before: Any
    indptr: Any
    blocks: Any
    inputs: Any


class Cut(NamedTuple):
    """How many blocks an item has."""

    LINES: int  # that it goes through together
    ACROSS: int  # items side by side, which have the same blocks
    MOST: int  # inputs of an item
    LEAST: int  # blocks of each of a group's items but the last
    PRODUCTS: int  # at most, of pairs of blocks of a line
    OUTS: int  # different ones of a block of threads
    HEAD: tuple[int, int, int, int] = (0, 0, 0, 0)  # of float32, what heads end with

    @classmethod
    def of(cls, tile: Tile) -> Cut:
        all_outs = tile.GROUPS * tile.OUTS
        if tile.ITEM == 4:
            most, across = tile.X_PANELS * 32 // tile.B, tile.N // tile.PANEL
            stage = (tile.X_PANELS + across) * tile.PANEL_BYTES
            stages = min((tile.POOL - of_float32.BUFFERS * tile.IMAGE) // stage, tile.STAGES)
            head = 1, stages, tile.IMAGE // 4, stage // 4
            return cls(1, tile.B // tile.N, most, most, 0, all_outs, head)
        if tile.B == 32:
            products = tile.GROUPS * tile.UNITS
            rows = min(ROWS, tile.SLOTS // 2, products)
            most = min(32, tile.SLOTS - rows)
            # Too much was an input that all lines keep, after which all have an odd number.
            least = max(1, min(2 * (products + 1 - rows), most))
            return cls(rows, 1, most, least, products, all_outs)
        outs = tile.OUTS if tile.B == 128 else all_outs
        most = tile.CLUSTER * min(outs, tile.SLOTS // (tile.B // tile.PANEL) - 1)
        return cls(1, 1, most, most, 0, outs)


def width_of(tile: Tile) -> int:
    """Copies of a block of threads, at most."""
    return tile.SLOTS if tile.ITEM == 2 else tile.X_PANELS + tile.N // tile.PANEL


def finishing(tile: Tile) -> Any:
    """finish(item, count, line, across, own, kept, bits, tables).

    own : the input of a lane, of `count`; kept : which lines of the item keep it
    """
    if tile.ITEM == 4:
        return finishing_strips(tile)
    return finishing_regions(tile) if tile.B == 32 else finishing_rows(tile)


@cache
def finishing_rows(tile: Tile) -> Any:
    """Of one block row: a lane writes the share of a block of threads."""
    PANELS, CLUSTER, STEP = tile.B // tile.PANEL, tile.CLUSTER, tile.STEP

    @cuda.jit(device=True)
    def finish(item, count, line, across, own, kept, bits, tables):
        words, before, indptr, _, inputs = bits
        counts, loads, places, outs = tables
        lane = int32(cuda.threadIdx.x)
        first, share = (
            entry_of(words, before, indptr, line, shfl_idx(own, 0)),
            item * CLUSTER + lane,
        )
        if lane < CLUSTER:
            of = lane, CLUSTER, PANELS, STEP, share
            share_row(first, count, line, inputs, *of, counts, loads, places, outs)

    return finish


@cache
def finishing_regions(tile: Tile) -> Any:
    """Of up to ROWS block rows of B = 32: their panels of x, then those of dy; products are of two
    blocks of a row, dealt evenly to the warpgroups."""
    GROUPS, UNITS, OUTS, N = tile.GROUPS, tile.UNITS, tile.OUTS, Cut.of(tile).LINES
    STEP = tile.STEP

    @cuda.jit(device=True)
    def keepers(kept, row):
        """Which lanes have a block in a row."""
        return redux_or(uint32((kept >> uint32(row) & uint32(1)) << uint32(cuda.threadIdx.x)))

    @cuda.jit(device=True)
    def finish(item, count, line, across, own, kept, bits, tables):
        words, before, indptr, _, _ = bits
        counts, loads, places, outs = tables
        lane = cuda.threadIdx.x
        kept = kept if lane < count else uint32(0)
        rows = all_products = 0
        for row in range(N):
            lanes = int32(cuda.popc(keepers(kept, row)))
            if lanes:
                if lane == 0:
                    put(loads, item, rows, line + row, rows, 0, ALONE)
                rows += 1
            all_products += (lanes + 1) // 2
        if lane < count:
            put(loads, item, rows + lane, own, rows + lane, 1, ALONE)
        each = max((all_products + GROUPS - 1) // GROUPS, 1)
        for i in range(lane, GROUPS * OUTS, 32):
            outs[item, i // OUTS, i % OUTS] = -1
        for i in range(lane, GROUPS * UNITS, 32):
            group, at = i // UNITS, 1 + 2 * (i % UNITS)
            places[item, group, at] = places[item, group, at + 1] = 0
        if lane < GROUPS:
            places[item, lane, 0] = min(max(all_products - lane * each, 0), each)
        if lane == 0:
            counts[item, 0] = counts[item, 1] = rows + count
        sync_warp()
        slot = base = 0
        for row in range(N):
            lanes = keepers(kept, row)
            if lanes >> uint32(lane) & uint32(1):
                nth = bits_below(lanes, lane)
                product = base + nth // 2
                group, unit = product // each, product % each
                block = entry_of(words, before, indptr, line + row, own)
                outs[item, group, 2 * unit + nth % 2] = block
                if nth % 2 == 0:
                    later = uint32(lanes >> uint32(lane)) & uint32(0xFFFFFFFE)
                    step = lowest(later) * STEP if later != 0 else 0
                    places[item, group, 1 + 2 * unit] = (rows + lane) * STEP | step << 16
                    places[item, group, 2 + 2 * unit] = slot * STEP
            number = int32(cuda.popc(lanes))
            base += (number + 1) // 2
            slot += 1 if number else 0

    return finish


@cache
def finishing_strips(tile: Tile) -> Any:
    """Of float32: two panels of x for each product, then the panels of the strip."""
    PARTS, ACROSS, X_PANELS = tile.B // 32, tile.N // tile.PANEL, tile.X_PANELS
    GROUPS, UNITS, EACH, SWAPPED = tile.GROUPS, tile.UNITS, tile.OUTS, tile.SWAPPED

    @cuda.jit(device=True)
    def finish(item, count, line, across, own, kept, bits, tables):
        words, before, indptr, blocks, _ = bits
        counts, loads, places, outs = tables
        lane = cuda.threadIdx.x
        for i in range(lane, GROUPS * EACH, 32):
            outs[item, i // EACH, i % EACH] = -1
        for i in range(lane, GROUPS * UNITS, 32):
            group, unit = i // UNITS, i % UNITS
            places[item, group, 0] = UNITS
            places[item, group, 1 + 2 * unit] = 2 * i | 1 << 16
            places[item, group, 2 + 2 * unit] = X_PANELS
        sync_warp()
        if lane < count:
            block = blocks[entry_of(words, before, indptr, line, own)]
            for p in range(PARTS):
                at = lane * PARTS + p
                put(loads, item, at, own * PARTS + p, at, 0, ALONE)
                for c in range(ACROSS):
                    to = at * ACROSS + c
                    row, column = p, across * ACROSS + c
                    if SWAPPED:
                        row, column = column, row
                    outs[item, to // EACH, to % EACH] = (block * PARTS + row) * PARTS + column
        if lane < ACROSS:
            panel = (line * (PARTS // ACROSS) + across) * ACROSS + lane
            put(loads, item, count * PARTS + lane, panel, X_PANELS + lane, 1, ALONE)
        if lane == 0:
            counts[item, 0] = counts[item, 1] = count * PARTS + ACROSS

    return finish
