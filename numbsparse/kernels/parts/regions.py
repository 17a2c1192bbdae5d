"""Which kept blocks of w are computed together in a weight-gradient: those that share tiles.

They are of block rows and columns that meet in many blocks, or of one row. Each way gives the
number of the item of each block, in the order in which blocks are stored.
"""

from __future__ import annotations

import numpy as np

from numbsparse.device.waits import shown
from numbsparse.kernels.cores import compiled, threads
from numbsparse.layout import Index

# Lines among which regions are searched for. More would not find better ones: a region has few
# lines, and what is left of many lines is as hard to fit together as what is left of few.
PART, MOST = 256, 384
SAID = "planning, parts of the grid"
KEPT_FOR_LEFT = 20  # blocks left behind that cancel one gained
LINES = 1024  # more than a part has
INSIDE, NEVER = -(1 << 16), -(1 << 30)  # what a line inside gains; less than any line scores
FOUR = 4


def regions(index: Index, slots: int, pair: int, products: int) -> np.ndarray:
    """Block rows and columns with many kept blocks where they cross.

    A region has at most `slots` slots, for a tile of each line, and `products` products, each of up
    to `pair` blocks of a row. They are searched for in parts of the grid, on all cores.
    """
    walk = index.rows.indptr, index.rows.indices
    down, across = (parts_of(side.indptr.size - 1) for side in (index.rows, index.columns))
    numbers = np.zeros((down.size - 1, across.size - 1), np.int64)
    found = np.empty(index.rows.indices.size, np.int64)
    parts = list(np.ndindex(numbers.shape))

    def look(part: tuple[int, int]) -> None:
        numbers[part] = _grow(*walk, down, across, *part, slots, pair, products, found)

    if len(parts) == 1:
        look(parts[0])
        return found
    looking = [threads().submit(look, part) for part in parts]
    for part in shown(looking, SAID):
        part.result()
    before = np.cumsum(numbers).reshape(numbers.shape) - numbers
    _number(*walk, down, across, before, found)
    return found


def parts_of(lines: int) -> np.ndarray:
    """Where parts of the lines begin, and the last one ends: of up to PART, or one of MOST."""
    parts = 1 if lines <= MOST else -(-lines // PART)
    return np.arange(parts + 1) * lines // parts


@compiled(error_model="numpy")
def _number(indptr, columns, down, across, before, found):
    """Number the regions of all parts together: those `before` a part come first."""
    for i in range(down.size - 1):
        for row in range(down[i], down[i + 1]):
            j = 0
            for block in range(indptr[row], indptr[row + 1]):
                while columns[block] >= across[j + 1]:
                    j += 1
                found[block] += before[i, j]


@compiled(error_model="numpy")
def _grow(indptr, columns, down, across, of_rows, of_columns, slots, pair, most, found):
    """Number the regions of a part from 0 on, until every block is in one; how many there are.

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
    blocks = number = 0
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
    while blocks > 0:
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
        for k in range(rows):
            i = inside[0, k]
            for other in range(wide):
                j = inside[1, other]
                if left[i, j]:
                    found[places[i, j]] = number
                    left[i, j] = transposed[j, i] = 0
                    counts[i] -= 1
                    counts[n + j] -= 1
                    blocks -= 1
        number += 1
    return number


@compiled(error_model="numpy")
def _add(numbers, own, by):
    for k in range(own.size):
        numbers[k] = np.int32(numbers[k] + own[k] * by)


@compiled(error_model="numpy")
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


@compiled(error_model="numpy")
def _apart(gains, counts, n):
    """The first row that has most blocks, of those that meet none inside; -1 for none."""
    best = np.int32(0)
    for row in range(n):
        apart = gains[row] == 0 and counts[row] > 0
        best = max(best, np.int32(counts[row] * LINES + LINES - 1 - row) if apart else np.int32(0))
    return LINES - 1 - best % LINES if best else -1


def pieces_of_rows(index: Index, most: int) -> np.ndarray:
    """Even pieces of the block rows, of at most `most` blocks, the first ones the longer."""
    indptr = index.rows.indptr.astype(np.int64)
    lengths = np.diff(indptr)
    pieces = -(-lengths // most)
    starts, each = np.cumsum(pieces) - pieces, np.maximum(pieces, 1)
    place = np.arange(indptr[-1]) - np.repeat(indptr[:-1], lengths)
    short, longer = (np.repeat(a, lengths) for a in (lengths // each, lengths % each))
    piece = np.maximum(place // (short + 1), (place - longer) // np.maximum(short, 1))
    return np.repeat(starts, lengths) + piece


def in_fours(index: Index) -> tuple[bool]:
    """Whether columns 0 to 3 keep the same block rows, 4 to 7 do, and so on, as an LSTM's gates."""
    indptr, rows, _ = index.columns
    lengths = np.diff(indptr)
    if lengths.size == 0 or lengths.size % FOUR:
        return (False,)
    lengths = lengths.reshape(-1, FOUR)
    if (lengths != lengths[:, :1]).any():
        return (False,)
    # Column by column, their rows are one list after another: those of a four are one list four
    # times over.
    place = np.arange(rows.size) - np.repeat(indptr[:-1], lengths.ravel())
    first = np.repeat(indptr[:-1:FOUR], lengths.sum(1))
    return (bool((rows == rows[first + place]).all()),)
