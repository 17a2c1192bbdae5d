"""What the blocks of threads of an item do, of a layout made on a GPU: a warp writes it.

Lane i has the i-th block of the item, or its i-th input where it has several lines.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.kernels.coordinates import bits_below, entry_of
from numbsparse.kernels.matmul.k6_hopper import weight_grad_plan as plans
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import ALONE, BUFFERS, Tile
from numbsparse.kernels.matmul.k6_hopper.weight_grad_shares import sharing_rows
from numbsparse.kernels.parts.walk_on_gpu import lowest
from numbsparse.kernels.ptx import redux_or, shfl_idx, sync_warp

ROWS = 8  # block rows of B = 32 whose blocks are computed together, at most

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
            stages = min((tile.POOL - BUFFERS * tile.IMAGE) // stage, tile.STAGES)
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
