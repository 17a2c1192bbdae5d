"""The plan of a weight-gradient for a layout made on a GPU, written there.

A warp goes through the blocks of ROWS neighbouring block rows of B = 32 and closes an item when the
next block does not fit; of a block row of B = 64 or 128, and of a strip of columns of float32, a
warp takes each piece. `finish`, in `weight_grad_items`, writes what the item's blocks of threads
load and multiply. The items of a group begin where they would if all before had as many as they
could have. Then they are numbered without gaps, those with most panels first, or, of large grids,
those together that meet the same lines (`order_kernel`); of float32 those that do not fill all
places once more are cut over the batch; and tables are written as `weight_grad_plan.cut_up` leaves
them, empty where no item is. With items cut, an H200 took 5 to 9 % more time of 16 bits, and 13 to
16 % less of float32 (8,192 rows and features, density 0.1). So of 16 bits only few blocks are cut.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.coordinates import LINES, sum_up
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper import weight_grad_shares as shares
from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import Bits, Cut, finishing, width_of
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import Tile
from numbsparse.kernels.matmul.k6_hopper.weight_grad_shares import FEW_ROUNDS
from numbsparse.kernels.parts.deal_on_gpu import ranking
from numbsparse.kernels.parts.pieces_of_blocks import PIECES, STEP
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.parts.regions import MOST
from numbsparse.kernels.parts.walk_on_gpu import kept_by, next_kept
from numbsparse.kernels.ptx import redux_or
from numbsparse.layout import Index

# Of many items, in several parts of the grid: groups whose items run together, and among how many
# parts these are dealt; and words of 32 inputs from which an item has its own. With 32,768 features
# and density 0.1 4,096 and 1,024 rows took an H200 0.62 and 0.75 of the time of longest first, with
# density 0.03 4,096 rows 0.75, and with 16,384 features 0.95.
NEAR, PARTS, WINDOW = 32, 8, 4
WORTH = 2.5  # times what adding takes: an item as long is cut, into up to MOST_PIECES
MOST_PIECES = 32
A_STEP = 0.25  # microseconds of a step of 16 bits
REST, WHOLE, ITEMS = range(2, 5)  # more numbers of a cut


@on_gpu_of(shares.plan)
@on_gpu_of(plans.plan)
def tables_of(index: Index, tile: Tile, steps: int, processors: int) -> tuple[Any, ...]:
    """As `weight_grad_plan.cut_up`, with room for all that may be cut, -1 where there is none."""
    how, is_float32, places = Cut.of(tile), tile.ITEM == 4, processors // tile.CLUSTER
    places *= tile.RESIDENT
    time = plans.STEP_IN_US if is_float32 else A_STEP if shares.is_deep(tile) else 0.0
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
    """Of each block of threads; see `weight_grad_shares.tables_of`."""

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
