"""Which kept blocks of w are computed together in a weight-gradient: those that share tiles.

They are of block rows and columns that meet in many blocks, or of one row.
"""

from typing import NamedTuple

import numpy as np

from numbsparse.device.waits import shown
from numbsparse.kernels.cores import compiled, inner, threads
from numbsparse.kernels.parts.deal import even_pieces
from numbsparse.layout import Index

# Lines among which regions are searched for. More would not find better ones: a region has few
# lines, and what is left of many lines is as hard to fit together as what is left of few.
PART, MOST = 256, 384
SAID = "planning, parts of the grid"
KEPT_FOR_LEFT = 20  # blocks left behind that cancel one gained
LINES = 1024  # more than a part has
INSIDE, NEVER = -(1 << 16), -(1 << 30)  # what a line inside gains; less than any line scores


class Items(NamedTuple):
    """Kept blocks that are computed together."""

    order: np.ndarray  # the blocks, item by item, those of an item as they are stored
    starts: np.ndarray  # (items + 1,): where those of an item begin
    lines: np.ndarray  # (items,): its rows and columns


def regions(index: Index, slots: int, pair: int, sizes: list[int]) -> list[Items]:
    """Block rows and columns with many kept blocks where they cross; for each of the sizes.

    A region has at most `slots` slots, for a tile of each line, and products as its size says, each
    of up to `pair` blocks of a row. They are searched for in parts of the grid, on all cores.
    """
    walk = index.rows.indptr, index.rows.indices
    down, across = (parts_of(side.indptr.size - 1) for side in (index.rows, index.columns))
    parts = list(np.ndindex(down.size - 1, across.size - 1))

    def look(size: int, part: tuple[int, int]) -> tuple[np.ndarray, ...]:
        return _grow(*walk, down, across, *part, slots, pair, size)  # type: ignore[no-any-return]

    ways = [(size, part) for size in sizes for part in parts]
    if len(ways) == 1:
        found = [look(*ways[0])]
    else:
        looking = [threads().submit(look, *way) for way in ways]
        found = [part.result() for part in shown(looking, SAID)]
    each = len(parts)
    return [_together(found[k : k + each]) for k in range(0, len(found), each)]


def _together(parts: list[tuple[np.ndarray, ...]]) -> Items:
    order, counts, lines = (np.concatenate(of_parts) for of_parts in zip(*parts, strict=True))
    return Items(order, np.append(0, np.cumsum(counts)), lines)


def parts_of(lines: int) -> np.ndarray:
    """Where parts of the lines begin, and the last one ends: of up to PART, or one of MOST."""
    parts = 1 if lines <= MOST else -(-lines // PART)
    return np.arange(parts + 1) * lines // parts


@compiled()
def _grow(indptr, columns, down, across, of_rows, of_columns, slots, pair, most):
    """`Items` of a part, with how many blocks each has, until every block is in one.

    A line is a row, or after those a column. The best one that fits is added, again and again:
    it gains many blocks and leaves few. Where none fits, a row is added that meets none inside.

    counts, gains, opens : of each line the blocks that are in no region, those that it gains if
        it is added, and the products that it adds; of a row those that it has
    inside, held : the rows and the columns inside, and how many blocks each row has there
    """
    first, n = down[of_rows], down[of_rows + 1] - down[of_rows]
    left_of, m = across[of_columns], across[of_columns + 1] - across[of_columns]
    left, transposed = np.zeros((n, m), np.uint8), np.zeros((m, n), np.uint8)  # 1: in no region
    places = np.empty((n, m), np.int32)  # of the blocks
    counts = np.zeros(n + m, np.int32)
    gains, opens = np.empty_like(counts), np.empty_like(counts)
    gained, opened = gains[n:], opens[n:]  # of the columns
    inside, held = np.empty((2, slots), np.int64), np.empty(slots, np.int64)
    blocks = number = done = 0
    for i in range(n):
        begin, end = indptr[first + i], indptr[first + i + 1]
        begin += np.searchsorted(columns[begin:end], left_of)
        while begin < end and columns[begin] < left_of + m:
            j = columns[begin] - left_of
            left[i, j] = transposed[j, i] = 1
            places[i, j] = begin
            counts[i] += 1
            counts[n + j] += 1
            blocks, begin = blocks + 1, begin + 1
    order, sizes, lines = (
        np.empty(blocks, np.int64), np.empty(blocks, np.int64), np.empty(blocks, np.int64),
    )  # fmt: skip
    while done < blocks:
        rows = wide = 0
        free = most
        gains[:] = 0
        opens[:] = 0
        while rows + wide < slots:
            line = _best(gains, opens, counts, np.int32(free))
            if line < 0:  # the first row, or one more
                line = _apart(gains, counts, n)
                if line < 0 or free == 0 or rows + wide > slots - 2:
                    break
            if line < n:
                free -= opens[line]
                inside[0, rows], held[rows] = line, gains[line]
                _add(gained, left[line], np.int32(1))
                if pair == 1 or held[rows] % pair == 0:  # one more would open a product
                    _add(opened, left[line], np.int32(1))
                rows += 1
            else:
                own = transposed[line - n]
                inside[1, wide] = line - n
                wide += 1
                for i in range(n):
                    gains[i] = np.int32(gains[i] + own[i])
                    opens[i] = np.int32((gains[i] + pair - 1) >> pair - 1)  # pair is 1 or 2
                for k in range(rows):
                    if own[inside[0, k]]:
                        odd = pair > 1 and held[k] % pair
                        free -= 0 if odd else 1
                        held[k] += 1
                        if pair > 1:  # its last product fits now, or never
                            _add(opened, left[inside[0, k]], np.int32(1 if odd else -1))
            gains[line] = INSIDE
        _rise(inside[0, :rows])
        _rise(inside[1, :wide])
        first_block, without = done, 0
        for k in range(rows):
            i, before = inside[0, k], done
            for other in range(wide):
                j = inside[1, other]
                if left[i, j]:
                    order[done] = places[i, j]
                    left[i, j] = transposed[j, i] = 0
                    counts[i] -= 1
                    counts[n + j] -= 1
                    done += 1
            without += done == before
        sizes[number], lines[number] = done - first_block, rows - without + wide
        number += 1
    return order, sizes[:number], lines[:number]


@inner()
def _rise(numbers):
    for k in range(1, numbers.size):
        number, at = numbers[k], k
        while at > 0 and numbers[at - 1] > number:
            numbers[at] = numbers[at - 1]
            at -= 1
        numbers[at] = number


@compiled()
def _add(numbers, own, by):
    for k in range(own.size):
        numbers[k] = np.int32(numbers[k] + own[k] * by)


@compiled()
def _best(gains, opens, counts, free):
    """The first line of highest score among those that gain blocks and fit; -1 for none.

    The score is KEPT_FOR_LEFT * gains - (counts - gains).
    """
    best = np.int32(NEVER)
    for line in range(gains.size):
        score = np.int32((1 + KEPT_FOR_LEFT) * gains[line] - counts[line])
        fits = (gains[line] > 0) & (opens[line] <= free)
        best = max(best, np.int32(score * LINES - line) if fits else np.int32(NEVER))
    return -1 if best == NEVER else -best % LINES


@compiled()
def _apart(gains, counts, n):
    """The first row that has most blocks, of those that meet none inside; -1 for none."""
    best = np.int32(0)
    for row in range(n):
        apart = gains[row] == 0 and counts[row] > 0
        best = max(best, np.int32(counts[row] * LINES + LINES - 1 - row) if apart else np.int32(0))
    return LINES - 1 - best % LINES if best else -1


def pieces_of_rows(index: Index, most: int) -> Items:
    """Even pieces of the block rows, of at most `most` blocks, the first ones the longer."""
    lengths = np.diff(index.rows.indptr).astype(np.int64)
    counts = even_pieces(lengths, most)[2]
    return Items(np.arange(lengths.sum()), np.append(0, np.cumsum(counts)), 1 + counts)
