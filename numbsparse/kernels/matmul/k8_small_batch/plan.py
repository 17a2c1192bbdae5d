"""The work of a layout, cut once into equal shares: one for each multiprocessor.

A unit is what a warp multiplies at once: 32 features of the sum for one line of up to 32 output
features; a larger block is cut into squares of 32, and smaller blocks of a line are taken together,
32 features of them. `parts.shares` says which warp takes which; the parts of a line that was cut
are added in their order by whichever finishes last.
"""

from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.plans import scratch
from numbsparse.kernels.parts.shares import spread
from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.layout import Index

READ_AHEAD = 16  # units that a warp may look at behind its last


class Lines(NamedTuple):
    """Where the parts of a plan for forward or input_grad start, in an array of int32.

    It begins with the units, places for `each` of a warp: (place, line of x) for each block of a
    unit, line of y, end of its piece.
    """

    counts: Any  # units of each warp; below 0 where its first line began in an earlier one
    cuts: Any  # per part of a cut line: its line, the line's first part and how many it has
    empty: Any  # lines without a unit; and one more, which is looked at and not taken


def plan_lines(
    index: Index,
    transposed: bool,
    size: int,
    shares: int,
    warps: int,
    part: int,
    slots: int = 0,
    tiles: int = 1,
    unit: float = 0.3,
) -> tuple[np.ndarray, int, Lines, int, np.ndarray, np.ndarray]:
    """(plan, units of a warp, where the parts of the plan start, empty lines, partials, tickets).

    The lines of y are the block columns, or of w.T the block rows, in parts of up to 32 features;
    lines of x are numbered the same way. A place is -1 where a unit has fewer than others; a line
    of y that was cut is named by -1 - part. A part is `part` float32 of the partials, which has
    those of each of the `tiles` of the batch, and after them `slots` more. `unit` as in `spread`.
    """
    indptr, xs, places = lines_of(index, transposed, size)
    together = max(WIDTH // size, 1)
    counts = -(-np.diff(indptr) // together)
    work = spread(counts, shares, warps, unit)
    units = np.zeros((shares * warps * work.each + READ_AHEAD, 2 * together + 2), np.int32)
    name_blocks(units, work.units, indptr, xs, places)
    empty = np.flatnonzero(counts == 0)
    arrays = [np.ravel(part) for part in (units, work.filled, work.cuts, np.append(empty, 0))]
    begin = Lines(*np.cumsum([part.size for part in arrays])[:-1].tolist())
    plan = np.concatenate(arrays, dtype=np.int32, casting="unsafe")
    parts = max(len(work.cuts), 1) * tiles
    partials, tickets = scratch((parts + slots) * part, np.float32), scratch(parts, np.int32)
    return plan, work.each, begin, empty.size, partials, tickets


@compiled()
def name_blocks(units, work, indptr, others, places):
    """Write (place, line of the other operand) of each block of units, and what ends a record.

    work (n, 5) : of each unit its line, its number there, where it is, and the last two numbers
    """
    together = units.shape[1] // 2 - 1
    for unit in range(len(work)):
        line, at = work[unit, 0], work[unit, 2]
        for k in range(together):
            entry = indptr[line] + work[unit, 1] * together + k
            there = entry < indptr[line + 1]
            units[at, 2 * k] = places[entry] if there else -1
            units[at, 2 * k + 1] = others[entry] if there else 0
        units[at, 2 * together], units[at, 2 * together + 1] = work[unit, 3], work[unit, 4]


def lines_of(
    index: Index, transposed: bool, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A walk over squares of up to 32: (starts of lines, line of the other operand, place of each).

    A square begins at value 32 * place, and goes on from row to row of its block.
    """
    walk = index.rows if transposed else index.columns
    cut = max(size // WIDTH, 1)
    indptr = np.zeros((walk.indptr.size - 1) * cut + 1, np.int64)
    xs, places = np.empty((2, walk.indices.size * cut * cut), np.int32)
    _cut_squares(*walk, cut, size, transposed, indptr, xs, places)
    return indptr, xs, places


@compiled()
def _cut_squares(starts, others, blocks, cut, size, transposed, indptr, xs, places):
    at = 0
    for line in range(indptr.size - 1):
        mine = line % cut
        for entry in range(starts[line // cut], starts[line // cut + 1]):
            for other in range(cut):
                row, column = (mine, other) if transposed else (other, mine)
                xs[at] = others[entry] * cut + other
                places[at] = blocks[entry] * (size * size // WIDTH) + row * size + column
                at += 1
        indptr[line + 1] = at
