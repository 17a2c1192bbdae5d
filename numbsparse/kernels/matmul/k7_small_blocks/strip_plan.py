"""Which features of x a strip of y needs, stage by stage, and which warp multiplies them by what.

A strip is a run of block columns (transposed, of block rows) with a warp for every 32 of its
columns. The groups of 32 features that any of its blocks keeps are lined up, gaps left out, and cut
into stages that fit shared memory with the blocks of w that need them. An mma takes a step of 16
products of a sum, two pieces of 8 features: both of one block of 16 x 16, or two blocks of 8 x 8 of
one column. Of float32 a step is a block. The steps of a stage are stored by warp, then by column.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import multiprocessors, shared_memory
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.cluster_sums import part_bytes
from numbsparse.kernels.parts.deal import Lengths, in_order, rank_in_run
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.swizzle import PERIOD
from numbsparse.layout import Index

PIECE = 8  # features in 16 bytes
WARP_COLUMNS = 32
COUNT_BITS = 6
MOST_STEPS = 256  # of a stage
INSIDE_BITS = 4
CHOICE = 32  # groups of which the next one is chosen
WIDTH = 32  # features that are fetched together: 64 or 128 bytes of a row of x
ROWS = 64
# By bytes of a value and block size, fitted to an H200: microseconds of a group in a warp, and
# more for each block. Blocks that share a sum, and the part of the multiprocessors that clusters of
# so many find free at once.
A_GROUP = {(2, 8): (0.0028, 0.0045), (2, 16): (0.0012, 0.0125)}
A_GROUP |= {(4, 8): (0.0036, 0.0184), (4, 16): (0.0014, 0.064)}
ROOM = {2: 1.0, 4: 0.75}
ALIGNED = 4  # steps: what says where they are is fetched by 16 bytes


class Strip(NamedTuple):
    """Block size, rows of y, warps that multiply; features that are fetched together, such groups
    and steps in a stage; stages of the ring; blocks of threads that share the groups of x, each for
    columns and warps of its own.

    A stage begins with how many steps each warp has and where they are; the values of w follow, and
    then the groups, ROWS lines of WIDTH features each, their pieces swizzled; of x that is
    feature-major boxes of WIDTH lines of 128 bytes along the batch. So what a warp reads ahead of
    the last step stays as long as the stage does.
    """

    B: int
    ROWS: int
    WARPS: int
    WIDTH: int
    GROUPS: int
    STEPS: int
    STAGES: int
    CLUSTER: int = 1
    FETCHERS: int = 4  # warps, at no cost: as many registers are left with one of them
    ITEM: int = 2  # bytes of a value
    SPLIT: int = 1  # blocks of threads of a cluster that have a part of the sum each

    @property
    def COLUMNS(self) -> int:
        """Block columns of a warp."""
        return WARP_COLUMNS // self.B

    @property
    def BLOCKS_A_STEP(self) -> int:
        """Blocks of a step: two of 8 x 8 fill the 16 terms of an mma of 16 bits."""
        return 16 // self.B if self.ITEM == 2 else 1

    @property
    def HEAD(self) -> int:
        """Words that say how many steps each warp has."""
        return -(-self.WARPS // ALIGNED) * ALIGNED

    @property
    def W_START(self) -> int:
        """Bytes of a stage before the values of w."""
        return 4 * (self.HEAD + self.STEPS)

    @property
    def STEP_BYTES(self) -> int:
        return self.ITEM * self.BLOCKS_A_STEP * self.B**2

    @property
    def X_START(self) -> int:
        return -(-(self.W_START + self.STEPS * self.STEP_BYTES) // PERIOD) * PERIOD

    @property
    def GROUP_BYTES(self) -> int:
        return self.ITEM * self.WIDTH * self.ROWS

    def BOX_ROWS(self, transposed: bool) -> int:
        """Rows of the batch in one copy of a group; of feature-major x those of a line."""
        return 128 // self.ITEM if transposed else self.ROWS

    @property
    def STAGE_BYTES(self) -> int:
        """With a group of zeros where a step may be half empty."""
        groups = self.GROUPS + (self.BLOCKS_A_STEP == 2)
        return self.X_START + groups * self.GROUP_BYTES

    @property
    def SLICES(self) -> int:
        """Blocks that store y of a sum that is split; of float32 a lane has rows of two tiles."""
        return min(self.SPLIT, 4 if self.ITEM == 2 else 2)

    @property
    def SHARED_BYTES(self) -> int:
        """The parts of a sum that is split are where the ring was."""
        parts = part_bytes(self.WARPS, self.ROWS) if self.SPLIT > 1 else 0
        return max(self.STAGES * self.STAGE_BYTES, parts) + PERIOD


def strip_of(index: Any, B: int, item: int, transposed: bool, sizes: tuple[int, int, int]) -> Strip:
    """For sizes (batch, features, columns).

    As wide as y is, up to 512 columns, of float32 352; and as many groups to a stage, with room
    for their steps, as leave three stages.

    Where a stage has few steps for a warp, and warps get ahead of each other, four; and two strips
    share their groups in a cluster if they need much the same. Where strips are too few for the
    GPU, they are narrower, and blocks of a cluster share the sum (`shared_out`).
    """
    limit = (shared_memory() or 65 * 1024) - 1024  # besides the ring there are barriers
    blocks_a_step = 16 // B if item == 2 else 1
    columns, widest = sizes[2], warps_for(sizes[2], item)
    warps, split = shared_out(sizes, B, item, index.block_rows.size)
    width = warps * WARP_COLUMNS
    kept, mean, most = planned(index, steps_in_strips, B, transposed, width, WIDTH, blocks_a_step)
    of_stage = (14, 8, 6, 4, 3, 2, 1) if item == 2 else (4, 2, 1)  # groups
    fetchers, stages, cluster = 4 if item == 2 else 1, 3, 1
    if item == 2 and kept < {8: 0.06, 16: 0.25}[B]:
        stages = 4 if B == 16 else 3
        in_two, *_ = planned(index, steps_in_strips, B, transposed, 2 * width, WIDTH, blocks_a_step)
        whole = split == 1 and warps == widest
        cluster = 2 if whole and columns >= 2 * width and in_two > 0.7 * kept else 1
    for groups in of_stage:
        steps = max(most, min(round(1.15 * groups * mean), MOST_STEPS))
        steps = -(-steps // ALIGNED) * ALIGNED
        strip = Strip(B, ROWS, warps, WIDTH, groups, steps, stages, cluster, fetchers, item, split)
        if limit >= strip.SHARED_BYTES:
            break
    strip = strip._replace(STAGES=2 if SIMULATED else (limit - PERIOD) // strip.STAGE_BYTES)
    return strip if warps == widest and split == 1 else filled(strip, limit)


@cache
def filled(strip: Strip, limit: int) -> Strip:
    """With as many steps as fit: so layouts have the same kernel. Of the widest strips each has its
    own, which took a seventh less time at B = 16 and density 0.1 (H200)."""
    more = strip._replace(STEPS=strip.STEPS + ALIGNED)
    while more.STEPS <= MOST_STEPS and limit >= more.SHARED_BYTES:
        strip, more = more, more._replace(STEPS=more.STEPS + ALIGNED)
    return strip


def shared_out(sizes: tuple[int, int, int], B: int, item: int, n_blocks: int) -> tuple[int, int]:
    """(warps of a strip, blocks of threads that share its sum), for the least time.

    A narrow strip takes less time for a group of features, but as many groups. Where blocks of a
    cluster share the groups, they add what they have in shared memory.
    """
    batch, features, columns = sizes
    of_x, of_block = A_GROUP[item, B]
    blocks = n_blocks * WIDTH * WARP_COLUMNS / (features * columns)  # of a warp in a group
    units, widest = multiprocessors(), warps_for(columns, item)

    def tiles_of(warps: int) -> int:
        return -(-columns // (warps * WARP_COLUMNS)) * -(-batch // ROWS)

    def cost(warps: int, split: int) -> float:
        tiles = tiles_of(warps)
        if split > 1 and tiles * split > units * ROOM[split]:
            return float("inf")
        group, adding = (of_x + of_block * blocks) * (warps + 1.5), 0.1 * warps * (split > 1)
        return -(-tiles * split // units) * (features / WIDTH / split * group + adding)

    if tiles_of(widest) >= 2 * units:
        return widest, 1
    widths = [widest] + [n for n in (8, 4) if n < widest]
    return min(((n, split) for n in widths for split in (1, *ROOM)), key=lambda how: cost(*how))


def warps_for(columns: int, item: int) -> int:
    """That multiply: with those that ask, each has the registers that its sums need."""
    if item == 4:
        return min(11, -(-columns // WARP_COLUMNS))
    most = 4 if SIMULATED else 8 if (shared_memory() or 0) < 160 * 1024 else 16
    warps = 1
    while warps < most and warps * WARP_COLUMNS < columns:
        warps *= 2
    return warps


def steps_in_strips(
    index: Index, B: int, transposed: bool, width: int, group_width: int, blocks_a_step: int
) -> tuple[float, float, int]:
    """Of the groups that strips of `width` columns need: the part of their blocks that is kept, and
    the steps of a group, on average if all are full, and at most."""
    walk = index.rows if transposed else index.columns
    indptr, indices = walk.indptr.astype(np.int64), walk.indices.astype(np.int64)
    n_groups = int(indices.max(initial=0)) * B // group_width + 1
    steps = np.zeros((-(-(indptr.size - 1) // (width // B)), n_groups), np.int64)
    _count_steps(indptr, indices, width // B, group_width // B, blocks_a_step, steps)
    needed = int(np.count_nonzero(steps)) or 1
    kept = indices.size / (needed * (width // B) * (group_width // B))
    return kept, indices.size / blocks_a_step / needed, int(steps.max(initial=1))


@compiled(error_model="numpy")
def _count_steps(indptr, indices, lines, inputs, blocks_a_step, steps):
    """Of each strip of so many lines and group of so many inputs, which a line meets in a run."""
    for line in range(indptr.size - 1):
        run, group = 0, -1
        for k in range(indptr[line], indptr[line + 1]):
            run = run + 1 if indices[k] // inputs == group else 0
            group = indices[k] // inputs
            steps[line // lines, group] += run % blocks_a_step == 0


def plan_strips(index: Index, transposed: bool, features: int, strip: Strip) -> tuple[Any, ...]:
    """What `strips` and `pack` read; strips with more blocks first.

    lengths : where the stages of each strip begin.
    lines (strips, columns): the block columns that each warp takes, or -1.
    groups (stages + 1, groups of a stage): the groups of features, or -1.
    begins (stages + 1, blocks of a cluster), and 1: where the steps of each begin.
    words : HEAD of each block of each stage, before those of its steps. First for each warp the
        steps of each column, in 6 bits each, and above them those of the warps before; and for each
        step where its two pieces are among the groups, in bytes and 16 bits each; after the last
        group, zeros.
    of_w (steps, 2): the two pieces of w: the stored block times its pieces, plus the piece; below
        that, in INSIDE_BITS, how many of its features there are, 0 where there is no piece.
    """
    walk, B = index.rows if transposed else index.columns, strip.B
    lines, per_block = walk.indptr.size - 1, strip.WARPS * strip.COLUMNS
    n_warps, width = strip.WARPS * strip.CLUSTER, per_block * strip.CLUSTER
    n_strips = -(-lines // width)
    kept = np.zeros((n_strips, width), np.int64)
    kept.reshape(-1)[:lines] = np.diff(walk.indptr)
    order = np.argsort(-kept.sum(1), kind="stable")
    place = _dealt(kept.reshape(-1, per_block), strip).reshape(n_strips, width)
    of_warps = np.argsort(place, axis=1)[order] + order[:, None] * width

    line = np.repeat(np.arange(lines), np.diff(walk.indptr))
    of, column = np.divmod(line, width)
    rank, column = np.argsort(order)[of], place[of, column]
    shape = n_strips, -(-features // strip.WIDTH), width
    stage, at, firsts, groups = _gathered(rank, column, walk.indices, shape, strip)

    warp, slot = np.divmod(column, strip.COLUMNS)
    key = (stage * n_warps + warp) * 4 + slot
    by_step = in_order(key)
    key, stage, warp, at, row, block = (
        a[by_step] for a in (key, stage, warp, at, walk.indices, walk.blocks)
    )
    half = rank_in_run(key) % strip.BLOCKS_A_STEP
    begun = half == 0
    counts: np.ndarray = np.bincount(key[begun], minlength=(firsts[-1] + 1) * n_warps * 4)
    of_warp: np.ndarray = counts.reshape(-1, strip.WARPS, 4).sum(2)
    taken = of_warp.sum(1)
    begins = np.append(0, np.cumsum(-(-taken // ALIGNED) * ALIGNED))
    gaps = begins[:-1] - np.cumsum(taken) + taken
    step = np.cumsum(begun) - 1 + gaps[stage * strip.CLUSTER + warp // strip.WARPS]

    pieces = np.full((begins[-1], 2), strip.GROUPS * strip.WIDTH // PIECE, np.int64)
    of_w = np.zeros((begins[-1], 2), np.int64)
    for i in range(B // PIECE):
        pieces[step, half + i] = at + i
        inside = np.clip(features - row * B - i * PIECE, 0, PIECE)
        piece = block.astype(np.int64) * (B // PIECE) + i
        of_w[step, half + i] = piece << INSIDE_BITS | inside
    group, within = np.divmod(pieces, strip.WIDTH // PIECE)
    places = (group * strip.GROUP_BYTES + within * strip.ITEM * PIECE).astype(np.uint32)
    before = of_warp.cumsum(axis=1) - of_warp
    in_columns: np.ndarray = counts.reshape(*of_warp.shape, 4) << COUNT_BITS * np.arange(4)
    head = np.zeros((len(of_warp), strip.HEAD), np.uint32)
    head[:, : strip.WARPS] = in_columns.sum(2) + before * (1 << 4 * COUNT_BITS)
    words = np.insert(
        places[:, 0] | places[:, 1] << 16, np.repeat(begins[:-1], strip.HEAD), head.reshape(-1)
    )
    return (
        Lengths(firsts),
        np.where(of_warps < lines, of_warps, -1).astype(np.int32),
        groups,
        begins.astype(np.int32),
        words.astype(np.uint32),
        of_w.reshape(-1),
    )


def _dealt(kept: np.ndarray, strip: Strip) -> np.ndarray:
    """The place of each column of each block of threads, by rank in the cluster, warp and slot.

    The longest are dealt to the warps in turn, there and back.
    """
    rank = np.argsort(np.argsort(-kept, axis=1, kind="stable"), axis=1)
    slots, warps = np.divmod(rank, strip.WARPS)
    warps = np.where(slots % 2 == 0, warps, strip.WARPS - 1 - warps)
    block = np.arange(len(kept))[:, None] % strip.CLUSTER
    return (block * strip.WARPS + warps) * strip.COLUMNS + slots


def _gathered(
    strip_of: np.ndarray,
    column: np.ndarray,
    rows: np.ndarray,
    shape: tuple[int, int, int],
    strip: Strip,
) -> tuple[np.ndarray, ...]:
    """(stage, piece in the stage) of each block; firsts and groups as in `plan_strips`."""
    n_strips, n_groups, width = shape
    group, within = np.divmod(rows * strip.B, strip.WIDTH)
    flat = (strip_of * n_groups + group) * width + column
    counts = np.bincount(flat, minlength=n_strips * n_groups * width).reshape(shape)
    needed = counts.any(2)
    which, wanted = np.nonzero(needed)
    position = np.cumsum(needed, axis=1) - 1
    n_warps = strip.WARPS * strip.CLUSTER
    load = (strip_of * n_groups + position[strip_of, group]) * n_warps + column // strip.COLUMNS
    loads: np.ndarray = np.bincount(load, minlength=n_strips * n_groups * n_warps)
    order = _evened(loads.reshape(n_strips, n_groups, n_warps), needed.sum(1))
    position = np.take_along_axis(order, position, axis=1)
    lined_up = np.zeros_like(counts)
    lined_up[which, position[which, wanted]] = counts[which, wanted]
    stage_of, place_of, n_stages = _cut(lined_up, needed.sum(1), strip)

    firsts = np.append(0, np.cumsum(n_stages))
    groups = np.full((firsts[-1] + 1, strip.GROUPS), -1, np.int32)
    at = position[which, wanted]
    groups[firsts[which] + stage_of[which, at], place_of[which, at]] = wanted
    at = position[strip_of, group]
    piece = (place_of[strip_of, at] * strip.WIDTH + within) // PIECE
    return firsts[strip_of] + stage_of[strip_of, at], piece, firsts, groups.reshape(-1)


def _evened(loads: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(strips, groups): places for the groups of each strip, such that its warps keep step.

    loads (strips, groups, warps) : the blocks that a warp meets in a group
    lengths (strips,) : how many of the groups count

    The next group is the one of a few that leaves the blocks so far most even among the warps: they
    can only be as far apart as the ring is long.
    """
    places = np.zeros(loads.shape[:2], np.int64)
    mean = loads.sum(1) / np.maximum(lengths, 1)[:, None]
    few, ahead, sums = np.empty(CHOICE, np.int64), np.empty(loads.shape[2]), np.empty(8)
    _choose(loads, lengths, mean, few[: loads.shape[1]], ahead, sums, places)
    return places


@compiled(error_model="numpy")
def _choose(loads, lengths, mean, few, ahead, sums, places):
    """`few` are the groups to choose from, and each warp is `ahead` of the mean."""
    warps = loads.shape[2]
    for strip in range(len(loads)):
        for warp in range(warps):
            ahead[warp] = 0
        for k in range(few.size):
            few[k] = k
        for k in range(lengths[strip]):
            best, least = 0, np.inf
            for which in range(few.size):
                group = few[which]
                if group < lengths[strip]:
                    for lane in range(8):
                        sums[lane] = 0
                    for warp in range(warps - warps % 8):  # in NumPy's order: roundings decide
                        after = ahead[warp] + loads[strip, group, warp] - mean[strip, warp]
                        sums[warp & 7] += after * after
                    cost = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + (
                        (sums[4] + sums[5]) + (sums[6] + sums[7])
                    )
                    for warp in range(warps - warps % 8, warps):
                        after = ahead[warp] + loads[strip, group, warp] - mean[strip, warp]
                        cost += after * after
                    if cost < least:
                        best, least = which, cost
            group = few[best]
            for warp in range(warps):
                ahead[warp] = ahead[warp] + loads[strip, group, warp] - mean[strip, warp]
            places[strip, group] = k
            few[best] = few.size + k


def _cut(
    counts: np.ndarray, lengths: np.ndarray, strip: Strip
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The stage of each group of each strip, its place there, and the stages of each strip.

    A stage takes groups while there is room for them and for their steps. All strips go on
    together, a stage at a time; counts are (strips, groups, columns).
    """
    stage_of, place_of = np.zeros((2, *counts.shape[:2]), np.int64)
    n_stages = np.zeros(len(counts), np.int64)
    how = strip.GROUPS, strip.STEPS, strip.BLOCKS_A_STEP, strip.CLUSTER
    blocks = np.empty(counts.shape[2], np.int64)
    _fill(counts, lengths, *how, blocks, stage_of, place_of, n_stages)
    return stage_of, place_of, n_stages


@compiled(error_model="numpy")
def _fill(
    counts, lengths, most, room, blocks_a_step, cluster, blocks, stage_of, place_of, n_stages
):
    """`blocks` are those of each column in the stage."""
    each = blocks.size // cluster
    for strip in range(len(counts)):
        place = most
        for group in range(lengths[strip]):
            for new in range(2):
                if new or place == most:
                    n_stages[strip] += 1
                    place = 0
                    for column in range(blocks.size):
                        blocks[column] = 0
                longest = 0
                for part in range(cluster):
                    steps = 0
                    for column in range(part * each, (part + 1) * each):
                        blocks[column] += counts[strip, group, column]
                        steps += (
                            blocks[column] + blocks_a_step - 1 >> blocks_a_step - 1
                        )  # of one or two
                    longest = max(longest, steps)
                if place == 0 or longest <= room:
                    break
            stage_of[strip, group], place_of[strip, group] = n_stages[strip] - 1, place
            place += 1
