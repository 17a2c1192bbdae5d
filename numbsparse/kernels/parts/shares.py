"""Lines of work cut into equal shares, one for each multiprocessor, and these into runs of warps.

A piece is the units of a line that one share holds. A line is cut only where shares of whole lines
would be uneven: cut wherever a share is full, products of 8 to 64 rows took 1.2 to 2.0 times as
long (H200).
"""

from typing import NamedTuple

import numpy as np

from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.deal import dealt
from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.layout import Index

TOGETHER = 12  # units that take as long as adding up the parts of lines


class Work(NamedTuple):
    """Units of all lines, in the order of the warps that take them, with gaps between warps.

    units (n, 5): its line, its number within the line, its place, its line's name (or -1 - part,
    where the line is cut), and the end of its piece. For all: places of a warp, how many of them
    each warp fills (below 0 where its first line began in an earlier one), and of each part the
    line, the line's first part and how many it has.
    """

    units: np.ndarray
    each: int
    filled: np.ndarray
    cuts: np.ndarray


def longest_line(index: Index, transposed: bool, size: int) -> tuple[int]:
    """Units that a line has at most, of 32 features each."""
    starts = (index.rows if transposed else index.columns).indptr
    return (-(-int(np.diff(starts).max(initial=0)) * size // WIDTH),)


def spread(counts: np.ndarray, shares: int, warps: int) -> Work:
    """Cut lines of `counts` units into equal shares, and each share into equal runs."""
    line, first, count, part_of, share = _pieces(counts, shares, warps)
    order = np.lexsort((first, line, share))
    line, first, count, part_of, share = (a[order] for a in (line, first, count, part_of, share))

    loads = np.bincount(share, count, shares).astype(np.int64)
    each = max(-(-int(loads.max(initial=0)) // warps), 1)
    parts = np.flatnonzero(part_of > 1)
    parts, name = parts[np.lexsort((first[parts], line[parts]))], line.copy()
    name[parts] = -1 - np.arange(parts.size)
    units, filled = np.empty((int(loads.sum()), 5), np.int32), np.zeros(shares * warps, np.int32)
    _run(line, first, count, name, share, loads, warps, each, units, filled)

    cut_lines, begins, many = np.unique(line[parts], return_index=True, return_counts=True)
    return Work(units, each, filled, np.stack([cut_lines, begins, many], 1).repeat(many, 0))


@compiled()
def _run(line, first, count, name, share, loads, warps, each, units, filled):
    """The units of pieces in the order of shares, in equal runs of a share's warps.

    These differ by one unit at most, the longer ones first.
    """
    unit = place = left = run = 0
    for piece in range(count.size):
        of, begin = share[piece], unit
        if piece == 0 or of != share[piece - 1]:
            run, left = of * warps - 1, 0
        for k in range(count[piece]):
            if left == 0:
                run += 1
                left = loads[of] // warps + (run - of * warps < loads[of] % warps)
                place = run * each
                filled[run] = -left if k > 0 else left
            units[unit, 0], units[unit, 1], units[unit, 2] = line[piece], first[piece] + k, place
            unit, place, left = unit + 1, place + 1, left - 1
        for u in range(begin, unit):
            units[u, 3], units[u, 4] = name[piece], place


def _pieces(counts: np.ndarray, shares: int, least: int) -> tuple[np.ndarray, ...]:
    """(line, first unit within it, units, pieces of the line, share), per piece.

    A share of cut lines has `least` units: each warp one, and fewer pieces to be added up.
    """
    line = np.flatnonzero(counts)
    whole = counts[line]
    share, _ = dealt(whole, shares, longest_first=True)  # each to the share that has least
    total = int(counts.sum())
    fair = -(-total // shares)
    if np.bincount(share, whole, shares).max(initial=0) <= fair + TOGETHER:
        return line, np.zeros_like(line), whole, np.ones_like(line), share
    # All lines end to end, cut wherever a share is full.
    fair = max(fair, least)
    starts = np.cumsum(counts) - counts
    cuts = np.union1d(starts[line], np.arange(0, total, fair))
    of = np.searchsorted(starts[line], cuts, "right") - 1
    line, count = line[of], np.diff(np.append(cuts, total))
    return line, cuts - starts[line], count, np.bincount(of)[of], cuts // fair
