"""The units of a layout made on a GPU, written there; its blocks are of 32 and more.

A thread works out what a place for a unit holds, and nothing of it waits for another one. Whole
lines go to the shares in turn, longest first, every other round backwards; where shares become too
uneven so, lines end to end are cut wherever a share is full: 4,096 features, 16 rows, density 0.2,
took an H200 5.6 us cut, and 3.4 us whole. A plan has places for as many blocks as the layout, and
for what is uneven. A line that shares first to last hold has the parts first + first to first +
last, so that those of a line follow each other, and no other line has them.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.matmul.k8_small_batch.blocks import plan_blocks
from numbsparse.kernels.matmul.k8_small_batch.plan import READ_AHEAD, Lines, plan_lines
from numbsparse.kernels.parts.plans import on_gpu_of, scratch
from numbsparse.kernels.parts.plans_on_gpu import longest_first, other_way
from numbsparse.kernels.parts.shares import units_beyond
from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.layout import Index

RECORD = 4  # numbers of a unit


@on_gpu_of(plan_lines)
def lines_on_gpu(
    index: Index,
    transposed: bool,
    size: int,
    shares: int,
    warps: int,
    part: int,
    slots: int = 0,
    tiles: int = 1,
    unit: float = 0.3,
) -> tuple[Any, ...]:
    walk, of = walk_of(index, transposed)
    cut, most = size // WIDTH, index.block_rows.size * (size // WIDTH) ** 2  # units
    lines = (walk.indptr.size - 1) * cut
    more = units_beyond(warps, unit)
    each = -(-(-(-most // shares) + more) // warps)
    units, parts = shares * warps * each + READ_AHEAD, 2 * shares
    lengths = Lines(shares * warps, 3 * parts, lines + 1)
    begin = np.cumsum([RECORD * units, *lengths]).tolist()
    plan, sections = empty((begin.pop(),), np.int32), Lines(*begin)
    how = *walk, of, longest_first(walk.indptr, cut), shares, warps, each, more, sections
    kernel = lines_kernel(size, transposed)
    launch(kernel, blocks(max(units, lines)), THREADS, *how, plan)
    partials = scratch((parts * tiles + slots) * part, np.float32)
    return plan, each, sections, lines, partials, scratch(parts * tiles, np.int32)


@on_gpu_of(plan_blocks)
def blocks_on_gpu(index: Index, size: int) -> tuple[DeviceArray, DeviceArray]:
    walk, of = walk_of(index, True)
    most = index.block_rows.size * (size // WIDTH) ** 2
    plan, count = empty(((most + READ_AHEAD) * RECORD,), np.int32), empty((1,), np.int32)
    launch(blocks_kernel(size), blocks(max(most, 1)), THREADS, *walk, of, plan, count)
    return plan, count


def walk_of(index: Index, transposed: bool) -> tuple[Any, DeviceArray]:
    """(the walk over lines of y, the line of each stored block)."""
    if transposed:
        return index.rows, index.block_rows
    return index.columns, index.block_columns


@cache
def unit_of(size: int, transposed: bool) -> Any:
    """unit(number, indptr, others, blocks, of): (place, line of x, line of y, where that begins
    and ends), all as in `plan.lines_of`."""
    CUT, SQUARES, ROWS = size // WIDTH, (size // WIDTH) ** 2, size * size // WIDTH

    @cuda.jit(device=True)
    def unit(number, indptr, others, blocks, of):
        entry = number // SQUARES
        line = of[blocks[entry]]
        begin, length = indptr[line] * SQUARES, (indptr[line + 1] - indptr[line]) * CUT
        mine, at = (number - begin) // length, (number - begin) % length
        begin, entry, other = begin + mine * length, indptr[line] + at // CUT, at % CUT
        row, column = (mine, other) if transposed else (other, mine)
        place = blocks[entry] * ROWS + row * size + column
        return place, others[entry] * CUT + other, line * CUT + mine, begin, begin + length

    return unit


@cache
def length_of(size: int) -> Any:
    """length(indptr, line): units of a line."""
    CUT = size // WIDTH

    @cuda.jit(device=True)
    def length(indptr, line):
        return (indptr[line // CUT + 1] - indptr[line // CUT]) * CUT

    return length


@cache
def lines_kernel(size: int, transposed: bool) -> Any:
    """A thread for each place of a unit, and for each line.

    Units are numbered from line to line; where lines are whole, anew in each share.
    more : units that a share may have beyond its part of all, so that no line is cut
    """
    CUT, SQUARES, unit_at = size // WIDTH, (size // WIDTH) ** 2, unit_of(size, transposed)
    length = length_of(size)

    @cuda.jit(device=True)
    def start_of(line, indptr):
        """The first unit of a line."""
        of, own = line // CUT, line % CUT
        begin = indptr[of] * SQUARES
        return begin + own * (indptr[of + 1] - indptr[of]) * CUT if own else begin

    @cuda.jit(device=True)
    def line_of(share, turn, shares, order):
        """The line that a share takes in a round, or -1."""
        at = turn * shares + other_way(turn, share, shares)
        return order[at] if at < order.size else int32(-1)

    @cuda.jit(device=True)
    def units_of(share, shares, indptr, order):
        """How many units the lines of a share have."""
        total = int32(0)
        for turn in range((order.size + shares - 1) // shares):
            line = line_of(share, turn, shares, order)
            total += length(indptr, line) if line >= 0 else 0
        return total

    @cuda.jit(device=True)
    def apart_of(at, share, shares, indptr, order):
        """How far the number of a unit among all is from that in its share."""
        turn = before = 0
        line = line_of(share, turn, shares, order)
        while at >= before + length(indptr, line):
            before += length(indptr, line)
            turn += 1
            line = line_of(share, turn, shares, order)
        return start_of(line, indptr) - before

    @cuda.jit(device=True)
    def run_of(run, whole, fair, total, warps, shares, indptr, order):
        """(the first unit of a share and its end, the first of a warp's run and how many)."""
        share, warp = run // warps, run % warps
        begin = 0 if whole else min(share * fair, total)
        end = units_of(share, shares, indptr, order) if whole else min(begin + fair, total)
        few, more = (end - begin) // warps, (end - begin) % warps
        return begin, end, begin + warp * few + min(warp, more), few + (1 if warp < more else 0)

    @cuda.jit(device=True)
    def place_of(number, begin, end, share, warps, each):
        """Where a unit of a share is."""
        few, more = (end - begin) // warps, (end - begin) % warps
        at, longer = number - begin, more * (few + 1)
        if at < longer:
            return (share * warps + at // (few + 1)) * each + at % (few + 1)
        return (share * warps + more + (at - longer) // few) * each + (at - longer) % few

    @cuda.jit
    def kernel(indptr, others, blocks, of, order, shares, warps, each, more, sections, plan):
        i, lines = cuda.grid(1), indptr.size - 1
        filled, cuts, empty_lines = sections
        total = indptr[lines] * SQUARES
        fair, run = max((total + shares - 1) // shares, 1), i // each
        uneven = int32(0)
        for share in range(cuda.threadIdx.x, shares, cuda.blockDim.x):
            units = units_of(share, shares, indptr, order)
            uneven |= int32(1 if units > fair + more else 0)
        whole = cuda.syncthreads_or(uneven) == 0
        if i < lines * CUT:  # a line that is not there is not written
            line = i // CUT
            plan[empty_lines + i] = i if indptr[line + 1] == indptr[line] else lines * CUT
        if i >= shares * warps * each + READ_AHEAD:
            return
        x = place = name = end_place = count = int32(0)
        if run < shares * warps:
            of_run = run, whole, fair, total, warps, shares, indptr, order
            begin, end, first, count = run_of(*of_run)
            number, share, apart = first + i % each, run // warps, 0
            if i % each < count:
                if whole:
                    apart = apart_of(number, share, shares, indptr, order)
                unit = unit_at(number + apart, indptr, others, blocks, of)
                place, x, line, line_begin, line_end = unit
                line_begin, line_end = line_begin - apart, line_end - apart
                piece, name = max(begin, line_begin), line
                end_place = place_of(min(line_end, end) - 1, begin, end, share, warps, each) + 1
                if line_begin < begin or line_end > end:
                    of_line, last = line_begin // fair, (line_end - 1) // fair
                    part = of_line + share
                    name = -1 - part
                    if number == piece:
                        plan[cuts + 3 * part], plan[cuts + 3 * part + 1] = line, 2 * of_line
                        plan[cuts + 3 * part + 2] = last - of_line + 1
                if i % each == 0 and piece < number:
                    count = -count
            if i % each == 0:
                plan[filled + run] = count
        plan[4 * i], plan[4 * i + 1], plan[4 * i + 2], plan[4 * i + 3] = place, x, name, end_place

    return kernel


@cache
def blocks_kernel(size: int) -> Any:
    SQUARES, unit_at = (size // WIDTH) ** 2, unit_of(size, True)

    @cuda.jit
    def kernel(indptr, others, blocks, of, plan, count):
        i = cuda.grid(1)
        total = indptr[indptr.size - 1] * SQUARES
        if i == 0:
            count[0] = total
        if i < total:
            place, y, line, _, _ = unit_at(i, indptr, others, blocks, of)
            plan[4 * i], plan[4 * i + 1], plan[4 * i + 2], plan[4 * i + 3] = place, y, line, 0

    return kernel
