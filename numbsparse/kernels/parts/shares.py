"""Lines of work cut into equal shares, one for each multiprocessor, and these into runs of warps.

A piece is the units of a line that one share holds. A line is cut only where shares of whole lines
would be uneven.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numbsparse.kernels.parts.deal import dealt

TOGETHER = 12  # units of a share that take as long as adding up the parts of lines


class Work(NamedTuple):
    """Units of all lines, in the order of the warps that take them, with gaps between warps.

    Per unit: its line, its number within the line, its place, its line's name (or -1 - part, where
    the line is cut), and the end of its piece. For all: places of a warp, how many of them each
    warp fills (below 0 where its first line began in an earlier one), and of each part the line,
    the line's first part and how many it has.
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
