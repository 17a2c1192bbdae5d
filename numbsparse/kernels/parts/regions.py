"""Which kept blocks of w are computed together in a weight-gradient: those that share tiles.

They are of block rows and columns that meet in many blocks, of a pair of rows that have many
columns in common, of one row, or of four columns that keep the same rows, as an LSTM's gates do.
Each way gives the number of the item of each block, in the order in which blocks are stored.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from numbsparse.device import CPU_THREADS
from numbsparse.device.waits import shown
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.deal import in_turn
from numbsparse.kernels.parts.groups import bits_set
from numbsparse.layout import Index

# Lines among which regions are looked for. More would not find better ones: a region has few
# lines, and what is left of many lines is as hard to fit together as what is left of few.
PART, MOST = 256, 384
SAID = "planning, parts of the grid"
LEAVES, KEPT_FOR_LEFT = 0.05, 20  # blocks that one left behind counts for, and the inverse
AT_A_TIME = 128  # lines among which the best one is looked for
INSIDE, NEVER = -(1 << 24), -(1 << 30)  # what a line inside gains; less than any line scores
IN_PAIRS = 128  # rows among which pairs are looked for
FOUR, ROWS_OF_FOUR = 4, 8  # columns that keep the same blocks; block rows of their products


def regions(index: Index, slots: int, pair: int, products: int) -> np.ndarray:
    """Block rows and columns with many kept blocks where they cross.

    A region has at most so many `slots`, for a tile of each line, and `products`, each of up to
    `pair` blocks of a row. They are looked for in parts of the grid, all cores at a time.
    """
    rows, columns = index.block_rows, index.block_columns
    down, across = (parts_of(len(walk.indptr) - 1) for walk in (index.rows, index.columns))
    wide, part = across.size + 1, np.searchsorted(across, columns, "right")
    part += np.searchsorted(down, rows, "right") * wide
    order, starts = in_turn(part, (down.size + 1) * wide)
    found = np.empty(columns.size, np.int64)

    def look(blocks: np.ndarray) -> int:
        """Number the regions of a part from 0 on; how many there are."""
        own, row = np.unique(rows[blocks], return_inverse=True)
        used, place = np.unique(columns[blocks], return_inverse=True)
        left = np.zeros((own.size, used.size), np.uint8)  # 1 where a block is in no region
        left[row, place] = 1
        region = np.empty(left.shape, np.int64)
        n = _grow_regions(left, slots, pair, products, region)
        found[blocks] = region[row, place]
        return n

    parts = [blocks for blocks in np.split(order, starts[1:-1]) if blocks.size]
    with ThreadPoolExecutor(CPU_THREADS) as pool:
        looking = [pool.submit(look, blocks) for blocks in parts]
        numbers = [part.result() for part in shown(looking, SAID)]
    for blocks, before in zip(parts, np.cumsum(numbers) - numbers, strict=True):
        found[blocks] += before
    return found


def parts_of(lines: int) -> np.ndarray:
    """Where parts of the lines end, but for the last: even ones of up to PART, or one of MOST."""
    parts = 1 if lines <= MOST else -(-lines // PART)
    return np.arange(1, parts) * lines // parts


def _grow_regions(
    left: np.ndarray, slots: int, pair: int, products: int, region: np.ndarray
) -> int:
    """Number regions from 0 on, until every block is in one; how many there are."""
    n, m = left.shape
    counts = np.concatenate([left.sum(1), left.sum(0)]).astype(np.int32)  # that are in no region
    gains, opens = np.empty((2, n + m), np.int32)
    scores = np.full((-(-(n + m) // AT_A_TIME), AT_A_TIME), NEVER, np.int32)
    lines, held = np.empty((2, slots), np.int64)
    arrays = counts, gains, opens, scores, lines, held, region
    return _grow(left, left.T.copy(), products, pair, *arrays)


@compiled(error_model="numpy")
def _grow(left, across, most, pair, counts, gains, opens, scores, lines, held, region):
    """A line is a row, or after those a column. The best one that fits is added, again and again:
    it gains many blocks and leaves few. Where none fits, a row is added that meets none inside.

    counts, gains, opens : of each line the blocks that are in no region, those that it gains if
        it is added, and the products that it adds; of a row those that it has
    lines, held : those inside, and how many blocks each has there
    """
    (n, m), slots, blocks, number = left.shape, lines.size, 0, 0
    for i in range(n):
        blocks += counts[i]
    while blocks > 0:
        inside, free = 0, most
        for line in range(n + m):
            gains[line] = opens[line] = 0
        while inside < slots:
            line = _best(gains, opens, counts, np.int32(free), scores)
            if line < 0:  # the first row, or one more
                line = 0
                for i in range(n):
                    if gains[i] == 0 and (gains[line] != 0 or counts[i] > counts[line]):
                        line = i
                if gains[line] != 0 or counts[line] == 0 or free == 0 or inside > slots - 2:
                    break
            gained = gains[line]
            lines[inside], held[inside] = line, gained
            gains[line] = INSIDE
            inside += 1
            if line < n:
                free -= opens[line]
                opening = np.int32(0 if pair > 1 and gained % pair else 1)
                own, of_columns, of_opens = left[line], gains[n:], opens[n:]
                for j in range(m):
                    of_columns[j] += own[j]
                    of_opens[j] += own[j] * opening
                for k in range(inside - 1):
                    if lines[k] >= n:
                        held[k] += left[line, lines[k] - n]
            else:
                own = across[line - n]
                for i in range(n):
                    gains[i] += own[i]
                    opens[i] = (gains[i] + pair - 1) >> pair - 1  # pair is 1 or 2
                for k in range(inside - 1):
                    if lines[k] < n and across[line - n, lines[k]]:
                        odd = pair > 1 and held[k] % pair
                        free -= 0 if odd else 1
                        held[k] += 1
                        if pair > 1:  # its last product fits now, or never
                            turns = np.int32(1 if odd else -1)
                            own, of_opens = left[lines[k]], opens[n:]
                            for j in range(m):
                                of_opens[j] += own[j] * turns
        for k in range(inside):
            for other in range(inside):
                i, j = lines[k], lines[other] - n
                if i < n and j >= 0 and left[i, j]:
                    region[i, j] = number
                    left[i, j] = across[j, i] = 0
                    counts[i] -= 1
                    counts[n + j] -= 1
                    blocks -= 1
        number += 1
    return number


@compiled(error_model="numpy")
def _best(gains, opens, counts, free, scores):
    """The first line that scores most of those that gain blocks and fit; -1 for none.

    The score, gains + LEAVES * (gains - counts), is compared in whole numbers, some lines at a
    time. Of lines that score the same, rounding decides, as float32 of what they leave has it.
    """
    flat, most = scores.reshape(-1), np.int32(NEVER)
    for line in range(gains.size):
        score = np.int32((1 + KEPT_FOR_LEFT) * gains[line] - counts[line])
        fits = (gains[line] > 0) & (opens[line] <= free)
        flat[line] = score if fits else np.int32(NEVER)
    for line in range(flat.size):
        most = max(most, flat[line])
    if most == NEVER:
        return -1
    best, at = -np.inf, -1
    for first in range(len(scores)):
        top = np.int32(NEVER)
        for k in range(AT_A_TIME):
            top = max(top, scores[first, k])
        for k in range(AT_A_TIME if top == most else 0):
            if scores[first, k] == most:
                line = first * AT_A_TIME + k
                left = np.float32(LEAVES) * np.float32(counts[line])
                score = (1 + LEAVES) * gains[line] - left
                if score > best:
                    best, at = score, line
    return at


def pieces_of_rows(index: Index, most: int, most_of_pair: int, least: int | None) -> np.ndarray:
    """Even pieces of the block rows, of at most so many blocks.

    Pairs of rows with at least `least` columns in common precede them, those with the most first,
    each row with up to `most_of_pair` of its blocks; of None there are no pairs.
    """
    indptr, columns = index.rows.indptr.astype(np.int64), index.rows.indices.astype(np.int64)
    items, least = np.empty(columns.size, np.int64), indptr[-1] + 1 if least is None else least
    rows, common = np.empty((2, IN_PAIRS), np.int64), np.empty((IN_PAIRS, IN_PAIRS), np.int64)
    left = np.empty((IN_PAIRS + 1, int(columns.max(initial=0)) // 64 + 1), np.uint64)
    sizes = least, most_of_pair, most
    _take_rows(indptr, columns, *sizes, rows[0], rows[1], common, left, items)
    return items


@compiled(error_model="numpy")
def _bit(column):
    return np.uint64(1) << np.uint64(column % 64)


@compiled(error_model="numpy")
def _take_rows(indptr, columns, least, most_of_pair, most, rows, tops, common, left, items):
    """`left` are bits, of some rows at a time; behind them, of a pair, what both have."""
    n, row, words = 0, 0, left.shape[1]
    while row < indptr.size - 1:
        count = 0
        while row < indptr.size - 1 and count < rows.size:
            if indptr[row] < indptr[row + 1]:
                rows[count] = row
                count += 1
            row += 1
        for k in range(count):
            for w in range(words):
                left[k, w] = 0
            for block in range(indptr[rows[k]], indptr[rows[k] + 1]):
                left[k, columns[block] // 64] |= _bit(columns[block])
        i, j = 0, count
        while count:
            for k in range(count):
                if j == count or k in (i, j):
                    for other in range(count):
                        shared = 0
                        for w in range(words if other != k else 0):
                            shared += bits_set(left[k, w] & left[other, w])
                        common[k, other] = common[other, k] = shared
            i = j = 0
            for k in range(count):
                top = 0
                for other in range(count):
                    top = max(top, common[k, other])
                tops[k] = top
                i = k if top > tops[i] else i
            if tops[i] < least:
                break
            while common[i, j] < tops[i]:
                j += 1
            both = 0
            for w in range(words):
                left[count, w] = 0
            for block in range(indptr[rows[i]], indptr[rows[i] + 1]):
                w, bit = columns[block] // 64, _bit(columns[block])
                if both < most_of_pair and left[i, w] & left[j, w] & bit != 0:
                    left[count, w] |= bit
                    both += 1
            for k in (i, j):
                own = both
                for block in range(indptr[rows[k]], indptr[rows[k] + 1]):
                    w, bit = columns[block] // 64, _bit(columns[block])
                    shared = left[count, w] & bit != 0
                    if shared or (left[k, w] & bit != 0 and own < most_of_pair):
                        own += 0 if shared else 1
                        left[k, w] ^= bit
                        items[block] = n
            n += 1
        for k in range(count):
            rest = 0
            for w in range(words):
                rest += bits_set(left[k, w])
            pieces, place = -(-rest // most), 0
            for block in range(indptr[rows[k]], indptr[rows[k] + 1]):
                w, bit = columns[block] // 64, _bit(columns[block])
                if left[k, w] & bit != 0:
                    long, longer = rest // pieces, rest % pieces  # the first ones have one more
                    piece = max(place // (long + 1), (place - longer) // long)
                    items[block] = n + piece
                    place += 1
            n += pieces


def in_fours(index: Index) -> tuple[bool]:
    """Whether columns 0 to 3 keep the same block rows, 4 to 7 do, and so on."""
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


def fours(index: Index) -> np.ndarray:
    """Pieces of the rows that a four keeps; the whole ones side by side, for their tiles of dy."""
    indptr, _, blocks = index.columns
    lengths = np.diff(indptr)
    pieces = -(-lengths[::FOUR] // ROWS_OF_FOUR)
    place = np.arange(blocks.size) - np.repeat(indptr[:-1], lengths)
    found = np.empty(blocks.size, np.int64)
    begin = np.repeat(np.cumsum(pieces) - pieces, FOUR)
    found[blocks] = np.repeat(begin, lengths) + place // ROWS_OF_FOUR
    return found
