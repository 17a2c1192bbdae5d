"""Which features of x a strip of y needs, stage by stage, and which warp multiplies them by what.

A strip is a run of block columns (transposed, of block rows) with a warp for every 32 of its
columns. The groups of 32 features that any of its blocks keeps are lined up, gaps left out, and cut
into stages that fit shared memory with the blocks of w that need them. An mma takes a step of 16
products of a sum, two pieces of 8 features: both of one block of 16 x 16, or two blocks of 8 x 8 of
one column. Of float32 a step is a block. The steps of a stage are stored by warp, then by column.
"""

from functools import cache, lru_cache
from itertools import product as every
from math import exp
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import multiprocessors, shared_memory
from numbsparse.kernels.cores import compiled
from numbsparse.kernels.parts.deal import Lengths, cut_into_stages, lines_of_strips
from numbsparse.kernels.parts.groups import counted, steps_in_strips
from numbsparse.kernels.parts.packed import COUNT_BITS
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.stored_blocks import INSIDE_BITS
from numbsparse.kernels.parts.strip import ALIGNED, WARP_COLUMNS, Strip, blocks_of_step
from numbsparse.kernels.parts.swizzle import PIECE
from numbsparse.layout import Index

MOST_STEPS = 256  # of a stage
PLACE_BITS = 16  # of a place in the groups of a stage
WIDTH = 32  # features that are fetched together
# Of rows of 16 bits twice as many, 128 bytes of a row, unless so many more are fetched: 4,096 to
# 8,192 features, densities of 0.02 to 0.1 and 128 to 256 rows took 0.89 to 0.93 of the time (H200).
WIDE, WORTH = 64, 1.5
ROWS, HEIGHTS = 64, (48, 64, 80)  # of a tile; at most, of those that have as many each
# And of blocks of 16 and 16 bits where a warp has so many in a group, whose values lanes copy for
# each tile: 20 products of a quarter of the blocks, 192 to 8,192 rows, took 0.68 to 0.99 of the
# time, one 1.19; of a tenth 0.86 to 1.18, of a twentieth 1.11 to 1.49 (H200).
HIGH, HIGH_FROM = 128, 0.8
LOW = (32, *HEIGHTS)  # of few features
# Two strips of a cluster share their groups where x has so many bytes, as many strips need it, less
# of w is kept, and none has so many times as many blocks as on average: the other one waits for it.
# Of 98 drawn products (16 bits, 16 MB and more; H200) 42 take 1.11 times as long apart, the others
# 0.95; of 40 of other seeds 24 take 1.07, the others 0.95. Of 64 others half are uneven: 0.91.
PAIRED_FROM, PAIRED_STRIPS = (0, 2) if SIMULATED else (22 * 2**20, 6)
PAIRED_KEPT, UNEVEN = (1.0, 99.0) if SIMULATED else (0.11, 1.25)
BEHIND = 34 * 1024  # bytes for barriers, and for a group that is read behind a ring of boxes
NARROW = 8  # warps of a strip that leave registers for more than ROWS
# Of 16 bits, few rows and features: of a group for each warp and 64 rows, more for each block of a
# warp, warps beside those, what a block takes of 32 rows; what sums of two, three and four blocks
# add; and more where tiles are more than half of the multiprocessors, and those of the next kernel
# find no room. 512 and 1,024 features, 64 and 256 rows took 0.73 to 1.02 of the time (H200); with
# the others' costs and as low tiles 20 drawn products that differ 0.89 to 1.22, 1.06 at the mean.
COSTS_OF_FEW = {
    8: (0.0056, 0.0092, 0.0, 0.9, (0.0, 0.94, 1.72, 1.84), 1.6),
    16: (0.0065, 0.0172, 1.15, 0.79, (0.0, 0.77, 1.4, 1.62), 1.2),
}
FEW = 1024  # rows and features, of both sides
# Groups of a stage, by bytes of a value and features of a group.
OF_STAGE = {(2, WIDTH): (14, 8, 6, 4, 3, 2, 1), (2, WIDE): (7, 4, 3, 2, 1), (4, WIDTH): (4, 2, 1)}
# The same where blocks share steps, by features of a group: of few kept blocks the more features a
# stage has, the fewer steps have one block alone.
OF_ODD = {WIDTH: (14, *range(12, 0, -1)), WIDE: range(7, 0, -1)}
PACK_FROM = 512  # rows
# Rows times features, by block size: for fewer no launch that packs pays. 1,024 and
# 4,096 rows of 256 to 1,024 features took 0.57 to 0.78 and 0.70 to 0.94 of the time, and the last
# ones of blocks of 16 0.86 to 1.04 (H200).
PACK_MUCH = {8: 2**22, 16: 2**21}
# Rows of float32: of 64 rows, 8,192 features and a quarter of the blocks of 16, 59 us instead of 83
# as they are stored; of 512, 325 instead of 358 if packed. Before, packing pays from so many rows
# times features on: 130 us instead of 158 with 12,288 features and 256 rows; and where less is
# kept, for each row of a block: 28 us instead of 33 at 192 rows (H200).
PACK_FLOAT32_FROM, PACK_LARGE_FROM = 256, 3 * 2**20
SPARSE, PACK_SPARSE_FROM = 0.04, 3 * 2**15

Sizes = tuple[int, int, int]  # batch, features, columns of y


class Costs(NamedTuple):
    """Microseconds (H200): of a group for each warp and 64 rows, and more for each block of these;
    warps beside those. And of a warp to add up parts of sums, and more for each part; and of the
    multiprocessors the part that clusters of 2, 3 and 4 blocks find free at once.

    Of float32 a group takes its time whoever reads it; and in place of `beside` is how many times
    as long a block takes where a scheduler has one warp.
    """

    of_rows: float
    of_block: float
    beside: float
    of_sums: float
    of_part: float
    room: tuple[float, float, float]


COSTS = {  # by bytes of a value and block size
    (2, 8): Costs(0.005, 0.003, 4.0, 0.4, 0.0, (1.0, 0.75, 0.76)),
    (2, 16): Costs(0.0035, 0.0131, 4.0, 0.34, 0.0, (1.0, 0.75, 0.76)),
    (4, 8): Costs(0.06, 0.037, 1.0, 0.0, 0.0625, (1.0, 0.89, 0.0)),
    (4, 16): Costs(0.008, 0.067, 1.31, 0.0, 0.215, (1.0, 0.89, 0.0)),
}


def strip_of(
    index: Any, B: int, item: int, transposed: bool, sizes: Sizes,
    gated: str = "", even: bool = False, x_transposed: bool = False,
) -> Strip:  # fmt: skip
    """For sizes (batch, features, columns); `gated` is that of a strip; see `even_rows`.

    As wide as y is, up to 512 columns, of float32 384; and as many groups to a stage, with room
    for their steps, as leave three stages.

    Where a stage has few steps for a warp, and warps get ahead of each other, four; and two strips
    share their groups in a cluster if they need much the same of a large x, and keep little of w,
    as many blocks each. Where strips are too few for the GPU, they are narrower, and blocks of a
    cluster share the sum (`shared_out`).
    """
    batch, features, columns = sizes
    widest = warps_for(columns, item)
    warps, split, rows = shared_out(sizes, B, item, index.block_rows.size, multiprocessors(), even)
    width = warps * WARP_COLUMNS
    group, (kept, mean, most) = groups_of(index, B, item, transposed, width, not x_transposed)
    packed = is_packed(sizes, B, item, index.block_rows.size)
    fetchers, stages, cluster = 1 if item == 4 and packed and warps < 12 else 4, 3, 1
    if item == 2 and kept < {8: 0.06, 16: 0.25}[B]:
        in_two, *_ = planned(index, steps_in_strips, B, transposed, 2 * width, group, 16 // B)
        alike = split == 1 and warps == widest and columns >= 2 * width and in_two > 0.7 * kept
        large = item * batch * features >= PAIRED_FROM and columns > (PAIRED_STRIPS - 1) * width
        sparse = index.block_rows.size * B**2 < PAIRED_KEPT * features * columns
        paired = large and sparse and planned(index, uneven, transposed, width // B)[0] < UNEVEN
        stages, packed = 4 if B == 16 else 3, packed or (alike and (paired or B == 16))
        cluster = 2 if alike and paired and (B == 16 or not gated) else 1
    ragged = gated != "" and features % B != 0
    how = stages, cluster, fetchers, item, split, packed, gated, ragged
    base, alone = Strip(B, rows, warps, group, 0, 0, *how), warps == widest and split == 1
    strip, limit = fitted(base, mean, most, alone and base.BLOCKS_A_STEP == 2)
    return strip if alone else filled(strip, limit)


def groups_of(
    index: Any, B: int, item: int, transposed: bool, width: int, wide: bool
) -> tuple[int, tuple[float, float, int]]:
    """Features that strips of that width fetch together, WIDE where they may be and it pays; and
    what `steps_in_strips` finds of such groups."""
    how = B, transposed, width
    found = planned(index, steps_in_strips, *how, WIDTH, blocks_of_step(B, item))
    if item == 2 and wide:
        of_wide = planned(index, steps_in_strips, *how, WIDE, blocks_of_step(B, item))
        if found[0] < WORTH * of_wide[0]:
            return WIDE, of_wide
    return WIDTH, found


def uneven(index: Index, transposed: bool, columns: int) -> tuple[float]:
    """How many times as many blocks as on average a strip of so many block columns has."""
    starts = (index.rows if transposed else index.columns).indptr
    strips = np.diff(starts[np.append(np.arange(0, starts.size - 1, columns), starts.size - 1)])
    return (float(strips.max() / max(strips.mean(), 1)),)


def fitted(base: Strip, mean: float, most: int, odd: bool = False) -> tuple[Strip, int]:
    """With groups, of `mean` and `most` steps, and stages; how many bytes there are for these.

    With `odd` steps of one block are counted too: where numbers of blocks are Poisson
    distributed, so many columns have an odd one. At B = 8 and density 0.02 stages without room for
    them, and no clusters, took 1.4 times as long (8,192 features and rows, float16, H200).
    """
    shared = 65 * 1024 if SIMULATED else ((shared_memory() or 0) + 1024) // base.BESIDE - 1024
    limit = shared - 1024  # besides the ring there are barriers
    columns = base.WARPS * base.COLUMNS
    for groups in OF_ODD[base.WIDTH] if odd else OF_STAGE[base.ITEM, base.WIDTH]:
        needed = groups * mean
        needed += columns * (1 - exp(-4 * needed / columns)) / 4 if odd else 0
        steps = max(most, min(round(1.15 * needed), MOST_STEPS))
        steps = -(-steps // ALIGNED) * ALIGNED
        strip = base._replace(GROUPS=groups, STEPS=steps)
        if limit >= strip.SHARED_BYTES and groups * strip.GROUP_BYTES < 1 << PLACE_BITS:
            break
    stages = 2 if SIMULATED else (limit - strip.BEHIND) // strip.STAGE_BYTES
    return strip._replace(STAGES=stages), limit


def is_packed(sizes: Sizes, B: int, item: int, n_blocks: int) -> bool:
    """Whether w is packed, and no lane copies it: up to 512 rows up to 1.5 times as long (H200)."""
    batch, features, columns = sizes
    if item == 4:
        sparse = n_blocks * B**2 <= SPARSE * features * columns
        large = batch * features >= (PACK_SPARSE_FROM * B if sparse else PACK_LARGE_FROM)
        return batch > PACK_FLOAT32_FROM or large
    return batch > PACK_FROM and batch * features > PACK_MUCH[B]


@cache
def filled(strip: Strip, limit: int) -> Strip:
    """With as many steps as fit: so layouts have the same kernel. Of the widest strips each has its
    own, which took a seventh less time at B = 16 and density 0.1 (H200)."""
    more = strip._replace(STEPS=strip.STEPS + ALIGNED)
    while more.STEPS <= MOST_STEPS and limit >= more.SHARED_BYTES:
        strip, more = more, more._replace(STEPS=more.STEPS + ALIGNED)
    return strip


@lru_cache(1024)
def shared_out(
    sizes: Sizes, B: int, item: int, n_blocks: int, units: int,
    even: bool = False, costs: Costs | None = None,
) -> tuple[int, int, int]:  # fmt: skip
    """(warps of a strip, blocks of threads that share its sum, rows of a tile), for the least time
    on so many multiprocessors.

    A narrow strip takes less time for a group of features, but as many groups. Where blocks of a
    cluster share the groups, they add what they have in shared memory. Tiles of the batch that are
    even may have other heights: what counts is how many tiles each multiprocessor has in turn. With
    64 rows alone 48 to 160 rows took 1.12 to 1.32 times as long (H200).
    """
    batch, features, columns = sizes
    of_rows, of_block, beside, of_sums, of_part, room = costs or COSTS[item, B]
    blocks = n_blocks * WIDTH * WARP_COLUMNS / (features * columns)  # of a warp in a group
    widest = warps_for(columns, item)
    few = item == 2 and costs is None and max(sizes) <= FEW
    most_rows = LOW if few else HEIGHTS
    if not few and (B, item) == (16, 2) and costs is None and blocks >= HIGH_FROM:
        most_rows = (*HEIGHTS, HIGH)
    most = (shared_memory() or 2**20) - BEHIND

    def cost(rows: int, warps: int, split: int) -> float:
        tiles, high = -(-columns // (warps * WARP_COLUMNS)) * -(-batch // rows), rows / ROWS
        parts = Strip(B, rows, warps, WIDTH, 0, 0, 0, ITEM=item, SPLIT=split)
        if split > 1 and (tiles * split > units * room[split - 2] or most < parts.PART_BYTES):
            return float("inf")
        if few:
            return _cost_of_few(B, tiles, features / WIDTH, blocks, rows, warps, split, units)
        if item == 4:
            block = of_block * warps * (beside if warps < NARROW else 1)
            group = of_rows * (2 + high) / 3 + block * blocks * (high + 0.3) / 1.3
        else:
            group = (of_rows * high + of_block * blocks) * (warps + beside)
        adding = (of_sums + of_part * split) * warps * high * (split > 1)
        return -(-tiles * split // units) * (features / WIDTH / split * group + adding)

    whole = -(-columns // (widest * WARP_COLUMNS)) * -(-batch // ROWS)
    if whole >= (16 if even and item == 4 else 2) * units:
        return widest, 1, ROWS
    heights = {-(-batch // (16 * -(-batch // most))) * 16 for most in most_rows} if even else ()
    narrow = item == 4 and not is_packed(sizes, B, item, n_blocks)  # lanes that copy take registers
    ways = [
        (rows, warps, split)
        for rows, warps, split in every((ROWS, *sorted(heights)), (widest, 8, 4), (1, 2, 3, 4))
        if rows >= min(batch, most_rows[0])
        and warps <= (widest if rows <= ROWS and not narrow else min(widest, NARROW))
        and (rows <= ROWS or warps <= NARROW * 8 // B or item == 2)
    ]
    rows, warps, split = min(ways, key=lambda way: cost(*way))
    return warps, split, rows


def _cost_of_few(
    B: int, tiles: int, groups: float, blocks: float, rows: int, warps: int, split: int, units: int
) -> float:
    """Of few features, whose tiles have so many groups, and a warp so many blocks in each."""
    of_rows, of_block, beside, low, of_sums, late = COSTS_OF_FEW[B]
    if rows == LOW[0] and split > 2:  # more than there are rows for
        return float("inf")
    group = of_rows * rows / ROWS + of_block * blocks * (low if rows <= LOW[0] else 1)
    of_tile = groups / split * group * (warps + beside) + of_sums[split - 1]
    return -(-tiles * split // units) * of_tile + (late if 2 * tiles * split > units else 0.0)


def warps_for(columns: int, item: int) -> int:
    """That multiply: beside those that fetch, each has the registers that its sums need."""
    if item == 4:
        needed = -(-columns // WARP_COLUMNS)
        return needed if needed <= 4 else 8 if needed <= 8 or SIMULATED else 12
    most = 4 if SIMULATED else 8 if (shared_memory() or 0) < 160 * 1024 else 16
    return min(most, 1 << (-(-columns // WARP_COLUMNS) - 1).bit_length())


def freed(strip: Strip, lengths: Lengths) -> Strip:
    """Where no part of a sum fills the last stages, there the parts meet."""
    free = strip._replace(FREE=strip.SPLIT > 1)
    fits = -(-lengths.most // strip.SPLIT) * strip.STAGE_BYTES <= free.PARTS_AT
    return free if fits else strip


def plan_strips(index: Index, transposed: bool, features: int, strip: Strip) -> tuple[Any, ...]:
    """What `strips` read; strips with more blocks first.

    lengths : where the stages of each strip begin.
    words : HEAD of each block of each stage, before those of its steps. First for each warp the
        steps of each column, in 6 bits each, and above them those of the warps before; and for each
        step where its two pieces are among the groups, in bytes and 16 bits each; after the last
        group, zeros.
    codes (steps, blocks of a step): the stored block; below that, in INSIDE_BITS, how many of its
        features there are, 0 where there is no block.
    begins (stages + 1, blocks of a cluster), and 1: where the steps of each begin.
    groups (stages + 1, groups of a stage): the groups of features, or -1.
    lines (strips, columns): the block columns that each warp takes, or -1.
    """
    walk, n_warps = index.rows if transposed else index.columns, strip.WARPS * strip.CLUSTER
    lines = lines_of_strips(walk.indptr, strip.WARPS, strip.COLUMNS, strip.CLUSTER, strip.TOGETHER)
    shift = (strip.SPAN // strip.B).bit_length() - 1
    counts = counted(walk, lines, -(-features // strip.SPAN), shift)
    stages, places = np.empty((2, *counts.shape[:2]), np.int32)
    groups = np.full((stages.size + 1, strip.GROUPS), -1, np.int32)
    blocks = np.zeros((stages.size + 1, lines.shape[1]), np.int32)
    how = strip.GROUPS, strip.STEPS, strip.BLOCKS_A_STEP, strip.CLUSTER
    firsts = cut_into_stages(counts, n_warps, *how, blocks, stages, places, groups)
    groups, blocks = groups[: firsts[-1] + 1], blocks[: firsts[-1] + 1]

    # Where the steps of each stage begin, and those of each of its columns, and what heads say.
    steps = -(-blocks // strip.BLOCKS_A_STEP).reshape(-1, strip.WARPS * strip.COLUMNS)
    before, n, head = np.cumsum(steps, 1) - steps, len(steps), np.arange(strip.HEAD)
    begins = np.append(0, np.cumsum(-(-steps.sum(1) // ALIGNED) * ALIGNED))
    at = (begins[:-1, None] + before).astype(np.int32).reshape(blocks.shape)
    heads = np.zeros((n, strip.HEAD), np.int64)
    heads[:, : strip.WARPS] = before[:, :: strip.COLUMNS] << 4 * COUNT_BITS
    for k in range(strip.COLUMNS):
        heads[:, : strip.WARPS] |= steps[:, k :: strip.COLUMNS] << COUNT_BITS * k
    nowhere = strip.GROUPS * strip.GROUP_BYTES
    words = np.full(begins[-1] + heads.size, nowhere << 16 | nowhere, np.uint32)
    words[(begins[:-1] + strip.HEAD * np.arange(n))[:, None] + head] = heads
    codes = np.zeros((begins[-1], strip.BLOCKS_A_STEP), np.int32)
    sizes = features, strip.B, shift, strip.ITEM, strip.BLOCKS_A_STEP, strip.HEAD
    column = np.arange(lines.shape[1]) // (strip.WARPS * strip.COLUMNS)
    places *= strip.GROUP_BYTES
    _write(*walk, lines, stages, places, at, column, sizes, words, codes)
    own = np.where(lines < walk.indptr.size - 1, lines, -1).astype(np.int32)
    codes, groups = codes.reshape(-1), groups.reshape(-1)
    return Lengths(firsts), words, codes, begins.astype(np.int32), groups, own


@compiled()
def _write(indptr, indices, stored, lines, stages, places, at, block_of, sizes, words, codes):
    """Of each block its pieces; `at` is the first step of each column of each stage.

    Steps of a column take its blocks in turn: `seen` counts those of the stages.
    """
    features, B, shift, item, blocks_a_step, head = sizes
    clusters = block_of[-1] + 1
    seen = np.zeros(at.shape, np.int32)
    for strip in range(len(lines)):
        for column in range(lines.shape[1]):
            line, cluster = lines[strip, column], block_of[column]
            if line < indptr.size - 1:
                for k in range(indptr[line], indptr[line + 1]):
                    group = indices[k] >> shift
                    stage = stages[strip, group]
                    nth = seen[stage, column]
                    seen[stage, column] = nth + 1
                    half = nth & (blocks_a_step - 1)  # of one or two
                    step = at[stage, column] + (nth >> (blocks_a_step - 1))
                    word = step + head * (1 + stage * clusters + cluster)
                    first = indices[k] * B
                    within = first - (group << shift) * B
                    codes[step, half] = stored[k] << INSIDE_BITS | min(max(features - first, 0), B)
                    for i in range(B // PIECE):
                        place = places[strip, group] + (within + i * PIECE) * item
                        bits = 16 * (half + i)
                        words[word] = words[word] & ~(0xFFFF << bits) | place << bits
