"""Which kept blocks of a few lines are computed together.

They are of one block row, of a pair of rows that have many columns in common, or of four block
columns that keep the same rows, as an LSTM's gates do.
"""

from __future__ import annotations

import numpy as np

from numbsparse.kernels.cores import compiled
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import ALONE, Tile
from numbsparse.kernels.parts.groups import bits_set
from numbsparse.layout import Index

IN_PAIRS, LEAST_COMMON = 128, 3  # rows among which pairs are looked for; their columns in common
FOUR, ROWS_OF_FOUR = 4, 8  # columns that keep the same blocks; block rows of their products


def rows_of_blocks(index: Index, tile: Tile) -> np.ndarray:
    """Even pieces of the block rows, so that all of an item takes the same tile of x.

    At B = 64 pairs of rows precede them, those with the most columns in common first.
    """
    panels = tile.B // tile.PANEL
    free = tile.SLOTS // panels - 1  # for blocks of dy, besides x
    outs = tile.OUTS if tile.B == 128 else tile.GROUPS * tile.OUTS
    indptr, columns = index.rows.indptr.astype(np.int64), index.rows.indices.astype(np.int64)
    items, least = (
        np.empty(columns.size, np.int64),
        LEAST_COMMON if tile.B == 64 else indptr[-1] + 1,
    )
    rows, common = np.empty((2, IN_PAIRS), np.int64), np.empty((IN_PAIRS, IN_PAIRS), np.int64)
    left = np.empty((IN_PAIRS + 1, int(columns.max(initial=0)) // 64 + 1), np.uint64)
    sizes = least, tile.OUTS, tile.CLUSTER * min(outs, free)
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


@compiled(error_model="numpy")
def share_rows(
    order, starts, rows, columns, step, panels, cluster, loads, ends, arriving, places, outs
):
    """Of two rows: slots of both, then dy: what only the first has, both, only the second.

    Of one row: slots of x, then of the dy of its blocks, which are dealt to the cluster.
    """
    for item in range(starts.size - 1):
        first, end = starts[item], starts[item + 1]
        middle = first
        while middle < end and rows[middle] == rows[first]:
            middle += 1
        if middle < end:
            loads[item, 0, 0], loads[item, 0, 1] = rows[first], ALONE
            loads[item, 1, 0], loads[item, 1, 1] = rows[middle], 1 | ALONE
            slot = single = 2
            for which in range(3):
                for k in range(first if which < 2 else middle, middle if which < 2 else end):
                    begin, past = (middle, end) if which < 2 else (first, middle)
                    twin = begin
                    while twin < past and columns[twin] != columns[k]:
                        twin += 1
                    if (twin < past) == (which == 1):
                        loads[item, slot, 0], loads[item, slot, 1] = columns[k], slot | ALONE
                        slot += 1
                        _add_out(places, outs, item, which // 2, order[k])
                        if which == 1:
                            _add_out(places, outs, item, 1, order[twin])
                single = slot if which == 0 else single
            for group in range(2):
                places[item, group, 1] = group * step | step << 16
                places[item, group, 2] = (single if group else 2) * step | step << 16
            ends[item, 0], ends[item, 1], arriving[item] = 2, slot, slot
            continue
        busy = min(end - first, cluster)
        for rank in range(cluster):
            begin, past = _part(end - first, cluster, rank)
            share, copy = item * cluster + rank, 0
            for p in range(panels):
                if p % busy == rank:
                    loads[share, copy, 0] = rows[first] * panels + p
                    loads[share, copy, 1] = p | ((1 << busy) - 1) << 16
                    copy += 1
            ends[share, 0] = copy
            for slot in range(panels, panels * (1 + past - begin)):
                panel = columns[first + begin + slot // panels - 1] * panels + slot % panels
                loads[share, copy, 0], loads[share, copy, 1] = panel, slot | ALONE << rank
                copy += 1
            ends[share, 1] = copy
            arriving[share] = panels * (1 + past - begin) if begin < past else 0
            groups = outs.shape[1]
            for group in range(groups):
                if panels > 1:  # all blocks, but half of each
                    left, own, stop = group, 0, past - begin
                else:
                    left, (own, stop) = 0, _part(past - begin, groups, group)
                for k in range(own, stop):
                    _add_out(places, outs, share, group, order[first + begin + k])
                right = panels * (1 + (own if own < stop else 0))
                places[share, group, 1] = left * step | step << 16
                places[share, group, 2] = right * step | step << 16


@compiled(error_model="numpy")
def _add_out(places, outs, share, group, block):
    outs[share, group, places[share, group, 0]] = block
    places[share, group, 0] += 1


@compiled(error_model="numpy")
def _part(n, parts, k):
    """(begin, end) of part k of n things, the first parts being the longer ones."""
    each, longer = n // parts, n % parts
    begin = k * each + min(k, longer)
    return begin, begin + each + (1 if k < longer else 0)


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


@compiled(error_model="numpy")
def share_fours(order, starts, rows, columns, step, B, least, loads, ends, arriving, places, outs):
    """Slots of dy for the four columns, then one of x for each row."""
    for item in range(starts.size - 1):
        first, n = starts[item], (starts[item + 1] - starts[item]) // FOUR
        for k in range(n):
            loads[item, k, 0], loads[item, k, 1] = rows[first + FOUR * k], FOUR + k | ALONE
            for column in range(FOUR):
                block = order[first + FOUR * k + column]
                outs[item, column // 2, 2 * k + column % 2] = block
        for column in range(FOUR):
            loads[item, n + column, 0] = columns[first + column]
            loads[item, n + column, 1] = column | ALONE
        ends[item, 0], ends[item, 1], arriving[item] = n, n + FOUR, n + FOUR
        for group in range(2):
            places[item, group, 0] = -(-n * B // least)
            places[item, group, 1] = 2 * group * step | step << 16
            places[item, group, 2] = FOUR * step | step << 16
