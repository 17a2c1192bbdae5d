"""The work of a layout, cut once into equal shares: one for each multiprocessor.

A unit is what a warp multiplies at once: 32 features of the sum for one line of up to 32 output
features; a larger block is cut into squares of 32, and smaller blocks of a line are taken together,
32 features of them. A piece is the units of a line that one share holds. A line is cut only where
shares of whole lines would be uneven; the parts of such a line are added in their order by
whichever finishes last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.parts.deal import dealt
from numbsparse.kernels.parts.plans import scratch
from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.layout import Index

READ_AHEAD = 16  # units that a warp may look at behind its last
TOGETHER = 12  # units of a share that take as long as adding up the parts of lines


class Lines(NamedTuple):
    """Where the parts of a plan for forward or input_grad start, in an array of int32.

    It begins with the units, places for `each` of a warp: (place, line of x) for each block of a
    unit, line of y, end of its piece.
    """

    counts: Any  # units of each warp; below 0 where its first line began in an earlier one
    cuts: Any  # per part of a cut line: its line, the line's first part and how many it has
    empty: Any  # lines without a unit
    indptr: Any  # the lines once more, for `repair`
    indices: Any
    places: Any  # of squares, see `lines_of`


def plan_lines(
    index: Index,
    transposed: bool,
    size: int,
    shares: int,
    warps: int,
    part: int,
    slots: int = 0,
    tiles: int = 1,
) -> tuple[np.ndarray, int, tuple[int, ...], int, np.ndarray, np.ndarray]:
    """(plan, units of a warp, where the parts of the plan start, empty lines, partials, tickets).

    The lines of y are the block columns, or of w.T the block rows, in parts of up to 32 features;
    lines of x are numbered the same way. A place is -1 where a unit has fewer than others; a line
    of y that was cut is named by -1 - part. A part is `part` float32 of the partials, which has
    those of each of the `tiles` of the batch, and after them `slots` more.
    """
    indptr, xs, places = lines_of(index, transposed, size)
    together = max(WIDTH // size, 1)
    counts = -(-np.diff(indptr) // together)
    work = spread(counts, shares, warps)
    units = np.zeros((shares * warps * work.each + READ_AHEAD, 2 * together + 2), np.int32)
    _name_blocks(units, work.place, work.line, work.step, (indptr, xs, places))
    units[work.place, -2], units[work.place, -1] = work.name, work.end
    empty = np.flatnonzero(counts == 0)
    plan, begin = joined(units, Lines(work.filled, work.cuts, empty, indptr, xs, places))
    parts = max(len(work.cuts), 1) * tiles
    partials, tickets = scratch((parts + slots) * part, np.float32), scratch(parts, np.int32)
    return plan, work.each, begin, empty.size, partials, tickets


class Work(NamedTuple):
    """Units of all lines, in the order of the warps that take them, with gaps between warps.

    Per unit: its line, its number within the line, its place, its line's name (or -1 - part, where
    the line is cut), and the end of its piece. For all: places of a warp, how many of them each
    warp fills (see `Lines.counts`), and of each part the line, the line's first part and how many
    it has.
    """

    line: np.ndarray
    step: np.ndarray
    place: np.ndarray
    name: np.ndarray
    end: np.ndarray
    each: int
    filled: np.ndarray
    cuts: np.ndarray


def spread(counts: np.ndarray, shares: int, warps: int) -> Work:
    """Cut lines of so many units into equal shares, and each share into equal runs."""
    line, first, count, part_of, share = _pieces(counts, shares)
    order = np.lexsort((first, line, share))
    line, first, count, part_of, share = (a[order] for a in (line, first, count, part_of, share))

    ends = np.cumsum(count)
    which = np.repeat(np.arange(count.size), count)  # the piece of each unit
    step = np.arange(which.size) - (ends - count)[which] + first[which]
    loads = np.bincount(share, count, shares).astype(np.int64)
    each, place, filled = _runs(loads, warps, which)
    parts = np.flatnonzero(part_of > 1)
    name = line.copy()
    name[parts] = -1 - _numbers(line[parts], first[parts])

    cut = np.lexsort((first[parts], line[parts]))
    cut_lines, begins, many = np.unique(line[parts][cut], return_index=True, return_counts=True)
    cuts = np.stack([cut_lines, begins, many], 1).repeat(many, 0)
    end = place[ends - 1][which] + 1
    return Work(line[which], step, place, name[which], end, each, filled, cuts)


def _runs(loads: np.ndarray, warps: int, piece: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """(places of a warp, place of each unit, how many places each warp fills) of equal runs."""
    each = max(-(-int(loads.max(initial=0)) // warps), 1)
    # Those of a share differ by one unit at most, the longer ones first.
    longer = np.arange(warps) < loads[:, None] % warps
    lengths = (loads[:, None] // warps + longer).ravel()
    run = np.repeat(np.arange(lengths.size), lengths)
    begin = np.cumsum(lengths) - lengths
    place = np.arange(piece.size) - begin[run] + run * each
    continued = (lengths > 0) & (np.arange(lengths.size) % warps > 0)
    there = begin[begin < piece.size]
    continued[: there.size] &= piece[there] == piece[there - 1]
    return each, place, np.where(continued, -lengths, lengths)


def joined(units: np.ndarray, sections: tuple[Any, ...]) -> tuple[np.ndarray, tuple[int, ...]]:
    """One array of int32 of all that a plan says, and where the parts behind the units start."""
    arrays = [np.ravel(part) for part in (units, *sections)]
    begin = np.cumsum([part.size for part in arrays])[:-1]
    return np.concatenate(arrays).astype(np.int32), tuple(map(int, begin))


def plan_blocks(index: Index, size: int) -> tuple[np.ndarray, int]:
    """((place, line of dy) for each block of a unit, its line of x, 0; how many units).

    For weight_grad: the lines of x are the block rows in parts of up to 32 features, those of dy
    the block columns. A unit is a square of 32 of a block, or several blocks side by side; -1 where
    it has fewer. Units of one line of x follow each other.
    """
    indptr, ys, places = lines_of(index, True, size)
    together = max(WIDTH // size, 1)
    counts = -(-np.diff(indptr) // together)
    line = np.repeat(np.arange(counts.size), counts)
    step = np.arange(line.size) - (np.cumsum(counts) - counts)[line]
    units = np.zeros((line.size + READ_AHEAD, 2 * together + 2), np.int32)
    units[: line.size, -2] = line
    _name_blocks(units, np.arange(line.size), line, step, (indptr, ys, places))
    return units.reshape(-1), line.size


def _name_blocks(units: np.ndarray, at: Any, line: Any, step: Any, walk: tuple[Any, ...]) -> None:
    """Write (place, line of the other operand) of each block of the step-th unit of a line."""
    (indptr, others, places), together = walk, units.shape[1] // 2 - 1
    for k in range(together):
        entry = indptr[line] + step * together + k
        there = entry < indptr[line + 1]
        entry = np.where(there, entry, 0)
        units[at, 2 * k] = np.where(there, places[entry], -1)
        units[at, 2 * k + 1] = np.where(there, others[entry], 0)


def lines_of(
    index: Index, transposed: bool, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A walk over squares of up to 32: (starts of lines, line of the other operand, place of each).

    A square begins at value 32 * place, and goes on from row to row of its block.
    """
    walk = index.rows if transposed else index.columns
    cut = max(size // WIDTH, 1)
    lengths = np.diff(walk.indptr).repeat(cut) * cut
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    line = np.repeat(np.arange(lengths.size), lengths)
    step = np.arange(line.size) - indptr[line]
    entry = walk.indptr[line // cut] + step // cut
    mine, other = line % cut, step % cut
    row, column = (mine, other) if transposed else (other, mine)
    places = walk.blocks[entry].astype(np.int64) * (size * size // WIDTH) + row * size + column
    return indptr, walk.indices[entry].astype(np.int64) * cut + other, places


def _pieces(counts: np.ndarray, shares: int) -> tuple[np.ndarray, ...]:
    """(line, first unit within it, units, pieces of the line, share), per piece."""
    line = np.flatnonzero(counts)
    whole = counts[line]
    largest, share = np.argsort(-whole, kind="stable"), np.empty_like(line)
    share[largest], _ = dealt(whole[largest], shares)  # each to the share that has least
    total = int(counts.sum())
    fair = -(-total // shares)
    if np.bincount(share, whole, shares).max(initial=0) <= fair + TOGETHER:
        return line, np.zeros_like(line), whole, np.ones_like(line), share
    # All lines end to end, cut wherever a share is full.
    starts = np.cumsum(counts) - counts
    cuts = np.union1d(starts[line], np.arange(0, total, fair))
    of = np.searchsorted(starts[line], cuts, "right") - 1
    line, count = line[of], np.diff(np.append(cuts, total))
    return line, cuts - starts[line], count, np.bincount(of)[of], cuts // fair


def _numbers(line: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The place of each part when they are sorted by line and start."""
    numbers = np.empty(line.size, np.int64)
    numbers[np.lexsort((first, line))] = np.arange(line.size)
    return numbers
