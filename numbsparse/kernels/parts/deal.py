"""List scheduling: pieces of work dealt to places that run in parallel, worked out on the host.

Pieces are dealt in an order, the longest first where there is a choice (LPT), each to the place
that is free first.
"""

from typing import Any

import numpy as np

from numbsparse.kernels.cores import compiled
from numbsparse.layout import Index

TILE_STEPS = 3  # what a tile costs beyond its steps
CHOICE = 32  # groups of which the next one is chosen
MOST_OF_COLUMN = 63  # steps of a column in a stage


def dealt(costs: Any, places: int) -> tuple[np.ndarray, float]:
    """(the place of each piece, when the last place ends)."""
    owners, times, heap = np.empty(len(costs), np.int64), np.zeros(places), np.arange(places)
    return owners, _deal(np.asarray(costs, np.float64), times, heap, owners)


@compiled()
def _deal(costs, times, heap, owners):
    last = 0.0
    for piece in range(costs.size):
        owners[piece] = heap[0]
        last = max(last, give(times, heap, costs[piece]))
    return last


@compiled()
def give(times, heap, cost):
    """A piece to the place that is free first, of those the first one; when the piece ends.

    Places are a heap, with that place at its top.
    """
    place, time, at, below = heap[0], times[0] + cost, 0, 1
    while below < heap.size:
        other = below + 1
        if other < heap.size and (
            times[other] < times[below]
            or (times[other] == times[below] and heap[other] < heap[below])
        ):
            below = other
        if time < times[below] or (time == times[below] and place < heap[below]):
            break
        times[at], heap[at] = times[below], heap[below]
        at, below = below, 2 * below + 1
    times[at], heap[at] = time, place
    return time


def in_turn(owners: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces place by place, each place's in their order; where each place begins)."""
    order = np.argsort(owners.astype(np.min_scalar_type(places)), kind="stable")  # by digits
    counts = np.bincount(owners, minlength=places)
    return order, np.append(0, np.cumsum(counts)).astype(np.int32)


def even_pieces(lengths: np.ndarray, most: int, least: int = 0) -> tuple[np.ndarray, ...]:
    """(line, first, length, which, of how many): lines in even pieces of up to `most`.

    The first ones are the longer. A line has `least` pieces or more.

    >>> even_pieces(np.array([5, 1]), 2)[:3]
    (array([0, 0, 0, 1]), array([0, 2, 4, 0]), array([2, 2, 1, 1]))
    """
    pieces = np.maximum(-(-lengths // most), least)
    line = np.repeat(np.arange(lengths.size), pieces)
    nth, pieces = np.arange(line.size) - (np.cumsum(pieces) - pieces)[line], pieces[line]
    short, longer = np.divmod(lengths[line], pieces)
    return line, nth * short + np.minimum(nth, longer), short + (nth < longer), nth, pieces


class Lengths:
    """Where the steps of each group begin; the same object for every launch with a layout."""

    def __init__(self, starts: np.ndarray):
        self.starts, self.steps = starts[:-1], np.diff(starts)
        self.most = int(self.steps.max(initial=0))


def even_rows(batch: int, tiles: int) -> int:
    """Rows of each tile of the batch: the copy engine takes longer for those beyond it than others.

    Measured (H200): 33 rows in tiles of 32 took up to 1.45 times as long as 64, and 513 in tiles of
    128 up to 1.6 times as long as in even ones; float32 by k6 in blocks of 32 1.07 to 1.3 times as
    long, but in blocks of 64 0.66: there a last tile of few rows takes little. Of feature-major x a
    tile has whole lines of 128 bytes, which gained 1 to 9 %. What is behind the rows in a stage,
    sums of nobody, may be anything.
    """
    return -(-batch // tiles)


def schedule(
    index: Index, lengths: Lengths, row_tiles: int, units: int, parts: int = 1, together: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(tiles, starts): what each unit computes in turn, (group, tile of rows, first step, end).

    A unit is a block of threads or a cluster, and all run at once. Rows vary slowest, so that
    their x stays in the L2 cache; within them the longest group is first. Tiles of `together`
    neighbouring rows follow each other, so that blocks of w stay there too. Of several parts each
    unit has one: neighbours have the steps of a tile.

    >>> schedule(None, Lengths(np.array([0, 5])), 1, 2, parts=2)[0]
    array([[0, 0, 0, 2],
           [0, 0, 2, 5]], dtype=int32)
    """
    groups = np.argsort(-lengths.steps, kind="stable")
    shape = -(-row_tiles // together), groups.size, together, parts
    top, group, row, part = np.indices(shape).reshape(4, -1)
    group, row = groups[group], top * together + row
    first, steps = lengths.starts[group], lengths.steps[group]
    ends = [first + steps * k // parts for k in (part, part + 1)]
    tiles = np.column_stack([group, row, *ends])[row < row_tiles]
    places = len(tiles) if parts > 1 else min(units, len(tiles))
    owners, _ = dealt(tiles[:, 3] - tiles[:, 2] + TILE_STEPS, places)
    order, starts = in_turn(owners, places)
    return tiles[order].astype(np.int32), starts


@compiled(fastmath={"reassoc"})  # integers are exact in any order
def in_step(counts, warps, order):
    """The groups that warps need, in an order in which they keep step; how many.

    Of a few groups the next one is that after which warps have had the most even numbers of pieces,
    lest one waits for the ring: at B = 16 7 to 11 % less time with 8,192 features, at B = 8 1 %, in
    float32 0 to 4 % (H200). All numbers are integers, times `n`.

    counts (groups, columns) : pieces of each column, of which a warp has as many as any
    loads (groups, warps) : the pieces that a warp meets in a group
    ahead (warps,) : of the mean, after the next group, if that had none

    In loops alone: `sum` along an axis takes three seconds to compile.
    """
    n, each = 0, counts.shape[1] // warps
    loads, squares = np.zeros((len(counts), warps)), np.zeros(len(counts))
    needed, ahead, mean = np.empty(len(counts), np.int64), np.zeros(warps), np.zeros(warps)
    for group in range(len(counts)):
        for column in range(counts.shape[1]):
            loads[n, column // each] += counts[group, column]
        for warp in range(warps):
            squares[n] += loads[n, warp] ** 2
            mean[warp] += loads[n, warp]
        needed[n] = group
        n += 1 if squares[n] > 0 else 0
    few = np.empty(min(CHOICE, n), np.int64)
    for which in range(few.size):
        few[which] = which
    for k in range(n):
        best, least = 0, np.inf
        for warp in range(warps):
            ahead[warp] -= mean[warp]
        for which in range(few.size):
            if few[which] < n:
                cost = n * squares[few[which]]
                for warp in range(warps):
                    cost += 2 * ahead[warp] * loads[few[which], warp]
                if cost < least:
                    best, least = which, cost
        order[k] = needed[few[best]]
        for warp in range(warps):
            ahead[warp] += n * loads[few[best], warp]
        few[best] = few.size + k
    return n


def lines_of_strips(
    indptr: np.ndarray, warps: int, columns: int, cluster: int, together: int = 1
) -> np.ndarray:
    """(strips, columns): the lines of the warps of each strip, those with more blocks first.

    A strip is that of a cluster, whose blocks of threads have so many warps with so many columns.
    The longest are dealt to the warps in turn, there and back; neighbours stay `together`. What is
    beyond the last is none.
    """
    per_block, hands = warps * columns, warps * columns // together
    width = per_block * cluster
    kept = np.zeros((-(-(indptr.size - 1) // width), width), np.int64)
    kept.reshape(-1)[: indptr.size - 1] = np.diff(indptr)
    order = np.argsort(-kept.sum(1), kind="stable")
    longest = np.argsort(-kept.reshape(-1, hands, together).sum(2), axis=1, kind="stable")
    slot, warp = np.divmod(np.arange(hands), warps)
    warp = np.where(slot % 2 == 0, warp, warps - 1 - warp)
    in_block = np.empty_like(longest)
    in_block[:, warp * (columns // together) + slot] = longest
    in_block = (in_block[:, :, None] * together + np.arange(together)).reshape(-1, per_block)
    in_block += np.arange(len(in_block))[:, None] * per_block
    return in_block.reshape(kept.shape)[order]


@compiled()
def cut_into_stages(
    counts, warps, most, room, blocks_a_step, cluster, blocks, stages, places, groups
):
    """Where the stages of each strip begin: they take groups while there is room for their steps.

    blocks : of each column of a stage; stages, places : of each group of a strip; groups : of each
        stage
    """
    n_strips, n_groups, width = counts.shape
    order, each, stage = np.empty(n_groups, np.int64), width // cluster, -1
    firsts = np.zeros(n_strips + 1, np.int64)
    for strip in range(n_strips):
        place, shift = most, blocks_a_step - 1  # of one or two
        for k in range(in_step(counts[strip], warps, order)):
            group = order[k]
            own = counts[strip, group]
            for new in range(2):
                if new or place == most:
                    stage, place = stage + 1, 0
                longest, now = 0, blocks[stage]
                for part in range(cluster):
                    steps = 0
                    for column in range(part * each, (part + 1) * each):
                        of_column = now[column] + own[column] + shift >> shift
                        steps += of_column if of_column <= MOST_OF_COLUMN else room + 1
                    longest = max(longest, steps)
                if place == 0 or longest <= room:
                    break
            for column in range(width):
                now[column] += own[column]
            stages[strip, group], places[strip, group] = stage, place
            groups[stage, place] = group
            place += 1
        firsts[strip + 1] = stage + 1
    return firsts
