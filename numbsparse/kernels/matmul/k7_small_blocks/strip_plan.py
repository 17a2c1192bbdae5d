"""Which features of x a strip of y needs, stage by stage, and which warp multiplies them by what.

A strip is a run of block columns (of block rows, turned) with a warp for every 32 of its columns.
The groups of 32 features that any of its blocks keeps are lined up, gaps left out, and cut into
stages that fit shared memory with the blocks of w that meet them. An mma takes a step of 16
products of a sum, two pieces of 8 features: the halves of one block of 16 x 16, or two blocks of
8 x 8 of one column. The steps of a stage lie one after another, by warp, then by column.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numbsparse.layout import Index

GROUP = 32  # features that are fetched together: 64 bytes of a row of x
PIECE = 8  # features in 16 bytes
WARP_COLUMNS = 32
COUNT_BITS = 6
ALIGNED = 4  # steps: what says where they stand is fetched by 16 bytes


class Strip(NamedTuple):
    """Rows of y, warps, features of a stage of x, room for w, and stages in the ring.

    The room for w in a stage is counted in groups of features of which all blocks are kept.
    """

    ROWS: int
    WARPS: int
    FEATURES: int
    ROOM: int
    STAGES: int


def most_steps(B: int, strip: Strip) -> int:
    """Steps that a stage has room for."""
    return strip.ROOM * (WARP_COLUMNS // B) * strip.WARPS * (GROUP // 16)


def kept_in_strips(index: Index, B: int, turned: bool, width: int) -> tuple[float]:
    """The part of blocks that strips of `width` columns keep, of the groups that they need."""
    walk = index.rows if turned else index.columns
    line = np.repeat(np.arange(walk.indptr.size - 1), np.diff(walk.indptr))
    strip, group = line // (width // B), walk.indices * np.int64(B) // GROUP
    needed = np.unique(strip * (group.max(initial=0) + 1) + group).size
    return (line.size / max(needed * (width // B) * (GROUP // B), 1),)


def plan_strips(
    index: Index, B: int, turned: bool, features: int, strip: Strip
) -> tuple[np.ndarray, ...]:
    """What `strips` and `pack` read; strips with more blocks first.

    lefts (strips,): the first block column of each strip.
    places (strips, WARPS, columns of a warp): the block column of the strip that a warp takes.
    firsts (strips + 1,): where the stages of each strip begin.
    groups (stages + 1, groups of a stage): the groups of features, or -1.
    begins (stages + 2,): where the steps of each stage begin.
    counts (stages + 1, WARPS): the steps of each column of a warp, in 6 bits each, and above them
        those of the warps before.
    steps (steps,): where the two pieces of a step stand in a row of its stage, in 16 bits each; the
        place after the last feature is that of zeros.
    halves (steps, 2): the two pieces of w: the stored block times its pieces, plus the piece; or -1
    """
    walk = index.rows if turned else index.columns
    lines = walk.indptr.size - 1
    width = strip.WARPS * (WARP_COLUMNS // B)
    n_strips = -(-lines // width)
    kept = np.zeros((n_strips, width), np.int64)
    kept.reshape(-1)[:lines] = np.diff(walk.indptr)
    order = np.argsort(-kept.sum(1), kind="stable")
    warps, slots = _dealt(kept, strip.WARPS)
    places = np.argsort(warps * (width // strip.WARPS) + slots, axis=1)[order]

    line = np.repeat(np.arange(lines), np.diff(walk.indptr))
    of, column = np.divmod(line, width)
    rank = np.argsort(order)[of]
    shape = n_strips, -(-features // GROUP), width
    stage, piece, firsts, groups = _gathered(rank, column, walk.indices, shape, B, strip)

    warp, slot = warps[of, column], slots[of, column]
    key = (stage * strip.WARPS + warp) * 4 + slot
    by_step = np.argsort(key, kind="stable")
    key, stage, piece, block = (a[by_step] for a in (key, stage, piece, walk.blocks))
    half = rank_in_run(key) % (16 // B)
    begun = half == 0
    counts = np.bincount(key[begun], minlength=(firsts[-1] + 1) * strip.WARPS * 4)
    counts = counts.reshape(-1, strip.WARPS, 4)
    taken = counts.sum((1, 2))
    begins = np.append(0, np.cumsum(-(-taken // ALIGNED) * ALIGNED))
    step = np.cumsum(begun) - 1 + (begins[:-1] - np.cumsum(taken) + taken)[stage]

    pieces = np.full((begins[-1], 2), strip.FEATURES // PIECE, np.uint32)
    halves = np.full((begins[-1], 2), -1, np.int32)
    for i in range(B // PIECE):
        pieces[step, half + i] = piece + i
        halves[step, half + i] = block * (B // PIECE) + i
    before = np.cumsum(counts.sum(2), axis=1) - counts.sum(2)
    words = (counts << COUNT_BITS * np.arange(4)).sum(2) | before << 4 * COUNT_BITS
    return (
        (order * width).astype(np.int32),
        places.astype(np.int32).reshape(-1),
        firsts.astype(np.int32),
        groups,
        begins.astype(np.int32),
        words.astype(np.uint32).reshape(-1),
        (pieces[:, 0] * PIECE | pieces[:, 1] * PIECE << 16).astype(np.uint32),
        halves.reshape(-1),
    )


def _dealt(kept: np.ndarray, n_warps: int) -> tuple[np.ndarray, np.ndarray]:
    """(warp, slot) of each column: the longest are dealt in turn, there and back."""
    rank = np.argsort(np.argsort(-kept, axis=1, kind="stable"), axis=1)
    slots, warps = np.divmod(rank, n_warps)
    return np.where(slots % 2 == 0, warps, n_warps - 1 - warps), slots


def _gathered(
    strip_of: np.ndarray,
    column: np.ndarray,
    rows: np.ndarray,
    shape: tuple[int, int, int],
    B: int,
    strip: Strip,
) -> tuple[np.ndarray, ...]:
    """(stage, piece in the stage) of each block; firsts and groups as in `plan_strips`."""
    n_strips, n_groups, width = shape
    group, within = np.divmod(rows * B, GROUP)
    flat = (strip_of * n_groups + group) * width + column
    counts = np.bincount(flat, minlength=n_strips * n_groups * width).reshape(shape)
    needed = counts.any(2)
    which, wanted = np.nonzero(needed)
    position = np.cumsum(needed, axis=1) - 1
    lined_up = np.zeros_like(counts)
    lined_up[which, position[which, wanted]] = counts[which, wanted]
    stage_of, place_of, n_stages = _cut(lined_up, needed.sum(1), B, strip)

    firsts = np.append(0, np.cumsum(n_stages))
    groups = np.full((firsts[-1] + 1, strip.FEATURES // GROUP), -1, np.int32)
    at = position[which, wanted]
    groups[firsts[which] + stage_of[which, at], place_of[which, at]] = wanted
    at = position[strip_of, group]
    piece = (place_of[strip_of, at] * GROUP + within) // PIECE
    return firsts[strip_of] + stage_of[strip_of, at], piece, firsts, groups.reshape(-1)


def _cut(
    counts: np.ndarray, lengths: np.ndarray, B: int, strip: Strip
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The stage of each group of each strip, its place there, and the stages of each strip.

    A stage takes groups while there is room for them and for their steps. All strips go on
    together, a stage at a time; counts are (strips, groups, columns).
    """
    n_strips, most = counts.shape[0], strip.FEATURES // GROUP
    stage_of, place_of = np.zeros((2, *counts.shape[:2]), np.int64)
    n_stages, first = np.zeros((2, n_strips), np.int64)
    strips, window = np.arange(n_strips)[:, None], np.arange(most)
    while (first < lengths).any():
        at = np.minimum(first[:, None] + window, counts.shape[1] - 1)
        steps = (-(-np.cumsum(counts[strips, at], axis=1) // (16 // B))).sum(2)
        taken = np.minimum((steps <= most_steps(B, strip)).sum(1), lengths - first)
        mine = window < taken[:, None]
        who = np.broadcast_to(strips, mine.shape)[mine]
        stage_of[who, at[mine]] = n_stages[who]
        place_of[who, at[mine]] = np.broadcast_to(window, mine.shape)[mine]
        n_stages += taken > 0
        first += taken
    return stage_of, place_of, n_stages


def rank_in_run(key: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... along each run of equal keys."""
    at = np.arange(key.size)
    begins = np.append(True, key[1:] != key[:-1])[: key.size]
    return at - np.maximum.accumulate(np.where(begins, at, 0))
