"""Lines of work cut into equal shares, one for each multiprocessor, and these into runs of warps.

A piece is the units of a line that one share holds. A line is cut only where the last share then
ends so much sooner that it pays to add up pieces. All lines end to end, cut wherever a share is
full, took 1.14 times as long at the mean of 76 products of uneven lines, up to 2.0 (H200).
"""

from math import ceil
from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.deal import dealt
from numbsparse.layout import Index

ADDING, PIECE = 0.9, 0.27  # microseconds that it takes to add pieces up, and for each (H200)
# Microseconds of 16-bit tiles of so many rows: of a unit, and of what a warp leaves to the first
# one of its line, of 64 rows in global memory (fitted to 26 uneven layouts on an H200).
OF_UNIT, OF_SUMS = {32: 0.6, 64: 0.85}, {32: 0.06, 64: 0.28}
SEVERAL, SOONER = 4, 0.9  # such warps, and of the time: from there on tiles of 32 rows are taken
PIECES = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32  # into which the longest line may be cut


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


def longest_line(index: Index, transposed: bool, size: int, wide: int) -> tuple[int]:
    """Units that a line has at most, of `wide` features each."""
    starts = (index.rows if transposed else index.columns).indptr
    return (-(-int(np.diff(starts).max(initial=0)) * size // wide),)


def spread(counts: np.ndarray, shares: int, warps: int, unit: float) -> Work:
    """Cut lines of `counts` units into equal shares, and each share into equal runs.

    unit : microseconds that a warp takes for one
    """
    line, first, count, part_of, share = pieces_of(counts, shares, warps, unit)
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


def pieces_of(counts: np.ndarray, shares: int, warps: int, unit: float) -> tuple[np.ndarray, ...]:
    """(line, first unit within it, units, pieces of the line, share), per piece.

    Of some lengths of pieces, which are at least a share's part, that with which the last share is
    expected to end first.
    """
    lines, longest = np.flatnonzero(counts), int(counts.max(initial=0))
    whole, fair = counts[lines], max(-(-int(counts.sum()) // shares), 1)
    found: tuple[np.ndarray, ...] = ()
    least = np.inf
    for many in PIECES:
        most = max(-(-longest // many), fair)
        if end_of(most, many, warps, unit) < least:
            line, first, count, pieces = cut_at(whole, most)
            share, _ = dealt(count, shares, longest_first=True)  # each to the share that has least
            loads = np.bincount(share, count, shares)
            end = end_of(loads[share], pieces, warps, unit).max(initial=0.0)
            if end < least:
                found, least = (lines[line], first, count, pieces, share), end
    return found


def end_of(units: Any, pieces: Any, warps: int, unit: float) -> Any:
    """Microseconds until so many units are added up, and a line's pieces."""
    return -(-units // warps) * unit + (pieces > 1) * (ADDING + PIECE * pieces)


def longest_run(
    units: float, longest: int, shares: int, warps: int, unit: float, more: float = 0.0
) -> tuple[int, int, int]:
    """(units of a warp, warps that leave sums of a line to the first, pieces of the longest line).

    What `spread` comes to, from numbers alone. `more` : units that the fullest share has beyond its
    part where no line is cut.
    """
    fair = ceil(units / shares)
    loads = {many: max(fair + more * (many == 1), ceil(longest / many)) for many in PIECES}
    pieces = min(PIECES, key=lambda many: end_of(loads[many], many, warps, unit))
    each = max(ceil(loads[pieces] / warps), 1)
    return each, max(min(ceil(longest / (pieces * each)), warps) - 1, 0), pieces


def ends_sooner(batch: int, units: int, longest: int, places: int, warps: int) -> bool:
    """Whether 16-bit tiles of 32 rows do, whose warps leave sums for each other in shared memory:
    where several leave some of a line of up to so many units.

    These took 0.59 to 1.01 of the time at 7 of the layouts that it was fitted to, 0.79 at the mean,
    and 0.88 at another one; but up to 1.3 times as long in blocks of 8 (H200).
    """

    def shape_of(rows: int) -> tuple[int, float]:
        tiles = -(-batch // rows)
        shares = max(places // tiles, 1)
        each, others, cut = longest_run(units, longest, shares, warps, OF_UNIT[rows])
        rounds = -(-tiles * shares // places)
        of_warps = end_of(each * rounds, cut, 1, OF_UNIT[rows])
        return others, float(of_warps + others * OF_SUMS[rows])

    (_, time), (others, of_more) = shape_of(32), shape_of(64)
    return others >= SEVERAL and time < SOONER * of_more


def units_beyond(warps: int, unit: float) -> int:
    """How many more a share may have before it pays to cut lines in two."""
    return int((ADDING + 2 * PIECE) / unit * warps)


def cut_at(counts: np.ndarray, most: int) -> tuple[np.ndarray, ...]:
    """(line, first, units, pieces of the line): lines in pieces of `most` units, and a rest.

    >>> cut_at(np.array([5, 1]), 2)
    (array([0, 0, 0, 1]), array([0, 2, 4, 0]), array([2, 2, 1, 1]), array([3, 3, 3, 1]))
    """
    pieces = -(-counts // most)
    line = np.repeat(np.arange(counts.size), pieces)
    first = (np.arange(line.size) - (np.cumsum(pieces) - pieces)[line]) * most
    return line, first, np.minimum(counts[line] - first, most), pieces[line]
