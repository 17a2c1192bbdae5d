"""The plan of a weight-gradient for a layout made on a GPU, written there.

A warp goes through the blocks of a group of lines and closes an item when the next block does not
fit: a block row of B = 64 or 128, ROWS neighbouring block rows of B = 32, and of float32 a strip of
columns. `finish`, in `weight_grad_items`, writes what the item's blocks of threads load and
multiply. The items of a group begin where they would if all before had as many as they could have.
Then they are numbered without gaps, those with most panels first; those that do not fill all places
once more are cut over the batch; and heads are written as `weight_grad_plan.cut_up` leaves them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.coordinates import LINES, summing
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper import weight_grad_shares as shares
from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import Cut, finishing, width_of
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import Edges, Tile
from numbsparse.kernels.parts.deal_on_gpu import ranking
from numbsparse.kernels.parts.plans import on_gpu_of
from numbsparse.kernels.parts.regions import in_fours
from numbsparse.kernels.parts.walk_on_gpu import kept_of, mask_of, next_kept
from numbsparse.layout import Index

STEP = {32: 0.8, 64: 0.6, 128: 0.6}  # microseconds of a step of 16-bit values, about
WORTH = 2.5  # times what adding takes: an item as long is cut, into up to MOST_PIECES
MOST_PIECES = 8
PIECES, REST, WHOLE, ITEMS = range(4)  # of the numbers of a cut


@on_gpu_of(in_fours)
def no_fours(index: Index) -> tuple[bool]:
    return (False,)


@on_gpu_of(plans.way_of)
def way_on_gpu(index: Index, B: int) -> tuple[bool, Tile, None]:
    return False, plans.tile_of_columns(B, min(B, 64)), None


@on_gpu_of(shares.plan)
def plan_on_gpu(index: Index, tile: Tile, steps: int, places: int, edges: Edges) -> tuple[Any, ...]:
    time, to_add = steps * STEP[tile.B], plans.TO_ADD
    return tables_of(index, tile, steps, places // tile.CLUSTER, edges, time > WORTH * to_add)


@on_gpu_of(plans.plan)
def plan_of_float32(
    index: Index, tile: Tile, items: None, steps: int, places: int, edges: Edges
) -> tuple[Any, ...]:
    worth = steps * plans.STEP > WORTH * plans.TO_ADD_FLOAT32
    return tables_of(index, tile, steps, places, edges, worth)


def tables_of(
    index: Index, tile: Tile, steps: int, places: int, edges: Edges, worth: bool
) -> tuple[Any, ...]:
    """As `weight_grad_plan.cut_up`; how much is cut, nobody knows here: at most all places once."""
    how, by_columns = Cut.of(tile), tile.ITEM == 4
    walk, bits = (
        (index.columns, index.made.columns) if by_columns else (index.rows, index.made.rows)
    )
    groups = -(-(walk.indptr.size - 1) // how.LINES) * how.ACROSS
    most = index.block_rows.size * how.ACROSS // how.LEAST + groups  # items
    drafts = Drafts.empty(tile, most)
    starts, numbers = empty((groups,), np.int32), empty((groups + 1,), np.int32)
    ends = tuple(int(n) for edge in edges for n in edge)
    table = *bits, walk.indptr, walk.blocks, ends, *drafts, starts, numbers
    launch(items_kernel(tile), groups, 32, *table)

    pieces = min(max(steps // 4, 1), MOST_PIECES) if worth else 1
    found, order, cut = empty((most,), np.int32), empty((most,), np.int32), empty((4,), np.int32)
    launch(number_kernel(tile.CLUSTER), 1, LINES, starts, numbers, places, pieces, found, cut)
    launch(order_kernel(tile.CLUSTER), most, 32, drafts.counts, found, cut, order)

    left = places * tile.CLUSTER if pieces > 1 else 0
    heads = empty((most * tile.CLUSTER + left, 10 if by_columns else 6), np.int32)
    grid = -(-heads.shape[0] // LINES)
    launch(heads_kernel(tile), grid, LINES, drafts.counts, order, cut, steps, heads)
    return heads, *drafts[1:], cut, left, left


class Drafts(NamedTuple):
    """Of each block of threads; see `weight_grad_shares.Shares`."""

    counts: DeviceArray  # (n, 2): its copies, and panels that arrive
    loads: DeviceArray
    places: DeviceArray
    outs: DeviceArray

    @classmethod
    def empty(cls, tile: Tile, items: int) -> Drafts:
        n = items * tile.CLUSTER
        columns = 1 + 2 * tile.UNITS if tile.ITEM == 2 else tile.UNITS
        shapes = (
            (n, 2),
            (n, width_of(tile), 2),
            (n, tile.GROUPS, columns),
            (n, tile.GROUPS, tile.OUTS),
        )
        return cls(*(empty(shape, np.int32) for shape in shapes))


@cache
def items_kernel(tile: Tile) -> Any:
    """The items of a group of lines: a warp closes one when the next block does not fit."""
    how, finish = Cut.of(tile), finishing(tile)
    N, ACROSS, MOST, LEAST, PRODUCTS = how.LINES, how.ACROSS, how.MOST, how.LEAST, how.PRODUCTS

    @cuda.jit(device=True)
    def counted(numbers, mask):
        """`numbers` of blocks of each line, 8 bits each, and those of a mask."""
        for line in range(N):
            numbers = uint32(
                numbers + uint32((mask >> uint32(line) & uint32(1)) << uint32(8 * line))
            )
        return numbers

    @cuda.jit(device=True)
    def products_of(numbers):
        """Pairs of blocks of a line make a product."""
        products = int32(0)
        for line in range(N):
            products += int32(
                ((numbers >> uint32(8 * line) & uint32(255)) + uint32(1)) // uint32(2)
            )
        return products

    @cuda.jit
    def kernel(words, before, indptr, blocks, edges, counts, loads, places, outs, starts, numbers):
        group, lane = cuda.blockIdx.x, cuda.threadIdx.x
        line, across = group // ACROSS * N, group % ACROSS
        here = indptr[line + 1] - indptr[line]
        first = (indptr[line] * ACROSS + across * here) // LEAST + group
        most = MOST
        if N == 1 and here > 0:  # even pieces
            each = (here + MOST - 1) // MOST
            most = (here + each - 1) // each
        bits, tables = (words, before, indptr, blocks), (counts, loads, places, outs)
        item, count, own, kept, numbered = first, 0, int32(0), uint32(0), uint32(0)
        for at in range(words.shape[1]):
            masks = mask_of(words, line, N, at)
            there = kept_of(masks)
            while there != 0:
                bit, lines, there = next_kept(there, masks)
                coming = counted(numbered, lines)
                if count == most or (N > 1 and products_of(coming) > PRODUCTS):
                    finish(item, count, line, across, own, kept, bits, edges, tables)
                    item, count, coming = item + 1, 0, counted(uint32(0), lines)
                if lane == count:
                    own, kept = int32(at * 32 + bit), lines
                count, numbered = count + 1, coming
        if count:
            finish(item, count, line, across, own, kept, bits, edges, tables)
            item += 1
        if lane == 0:
            starts[group], numbers[group + 1] = first, item - first

    return kernel


@cache
def number_kernel(CLUSTER: int) -> Any:
    """found[i] = where the i-th item is; and the numbers of what is cut, and of all items."""
    sum_up, N = summing(), LINES

    @cuda.jit
    def kernel(starts, numbers, places, most_pieces, found, cut):
        items = sum_up(numbers, found.size)
        cuda.syncthreads()
        for group in range(cuda.threadIdx.x, starts.size, N):
            for item in range(numbers[group], numbers[group + 1]):
                found[item] = starts[group] + item - numbers[group]
        if cuda.threadIdx.x == 0:
            rest = items % places
            pieces = min(places // max(rest, 1), most_pieces)
            if rest == 0 or pieces < 2:
                rest = pieces = 0
            cut[PIECES], cut[ITEMS] = pieces, items
            cut[REST], cut[WHOLE] = rest * CLUSTER, (items - rest) * CLUSTER

    return kernel


@cache
def order_kernel(CLUSTER: int) -> Any:
    """The items in order, those for which most panels arrive first."""

    @cuda.jit(device=True)
    def panels_of(items, i):
        counts, found = items
        return counts[found[i] * CLUSTER, 1]

    rank = ranking(panels_of)

    @cuda.jit
    def kernel(counts, found, cut, order):
        item = cuda.blockIdx.x
        if item < cut[ITEMS]:
            order[rank(item, cut[ITEMS], (counts, found))] = found[item]

    return kernel


@cache
def heads_kernel(tile: Tile) -> Any:
    """The heads that `cut_up` makes; behind the last, of blocks of threads without steps."""
    CLUSTER, FLOAT32 = tile.CLUSTER, tile.ITEM == 4
    STRIPS, STAGES, BUFFER, STAGE = Cut.of(tile).HEAD

    @cuda.jit
    def kernel(counts, order, cut, steps, heads):
        share = cuda.grid(1)
        if share >= heads.shape[0]:
            return
        pieces, rest, whole = cut[PIECES], cut[REST], cut[WHOLE]
        piece, of, left, own = 0, 1, -1, share
        if share >= whole and pieces > 0:
            left, of = share - whole, pieces
            piece, own = left // rest, whole + left % rest
        there = own < cut[ITEMS] * CLUSTER and piece < of
        source = order[own // CLUSTER] * CLUSTER + own % CLUSTER if there else 0
        first, last = piece * steps // of, (piece + 1) * steps // of
        heads[share, 0], heads[share, 1] = first, last - first if there else 0
        heads[share, 2] = counts[source, 0] if there else 0
        heads[share, 3] = counts[source, 1] if there else 0
        heads[share, 4], heads[share, 5] = left if there else -1, source
        if FLOAT32:
            heads[share, 6], heads[share, 7] = STRIPS, STAGES
            heads[share, 8], heads[share, 9] = BUFFER, STAGE

    return kernel
