"""Which kept blocks of w a block of threads computes together, and in which order its warps do.

A region is a panel of block rows by a run of block columns: so many that the slots of its warps,
one product of 16 x B each, are taken, or the shared memory that the features of x and dy take. Of
both only the groups of features that a block of the region needs are loaded. A slot is a block of
16 x 16, or two blocks of 8 x 8 of one column. Slots are in order of columns, so that most find the
dy of their column already in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.cores import compiled
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE
from numbsparse.kernels.parts.deal import in_order, rank_in_run
from numbsparse.kernels.parts.swizzle import PERIOD
from numbsparse.layout import Index

LINE = 128  # bytes of a group in a row of the batch
NO_GROUP = -1
PLACE_BITS = 10
NEW_COLUMN = 1 << 3 * PLACE_BITS
WIDE = 4  # groups of a wide box
IS_WIDE, IS_DY = 1, 2  # bits of a box: the number of its map
PLACE_AT, GROUP_AT = 2, 10  # the bits from which on it holds its place and its first group


class Region(NamedTuple):
    """Warps that multiply, slots of a warp, groups of features, rows of a stage of x and dy, stages
    of the ring; warps that request them from the copy engine; bytes of a value; and slots that are
    multiplied at once, of which a warp has a multiple.

    A group is DEPTH lines of FEATURES; of a transposed operand FEATURES lines of DEPTH rows of the
    batch. There are slots for all blocks of a column that a group of x may have.
    """

    WARPS: int
    SLOTS: int
    GROUPS: int
    DEPTH: int
    STAGES: int
    FETCHERS: int = 2
    ITEM: int = 2
    AT_ONCE: int = 1

    @property
    def FEATURES(self) -> int:
        """Of a group."""
        return LINE // self.ITEM

    @property
    def GROUP_BYTES(self) -> int:
        return LINE * self.DEPTH

    @property
    def STAGE_BYTES(self) -> int:
        return self.GROUPS * self.GROUP_BYTES

    @property
    def SHARED_BYTES(self) -> int:
        return self.STAGES * self.STAGE_BYTES + PERIOD


def plan_boxes(
    index: Index, B: int, widths: tuple[int, int], region: Region, places: int
) -> tuple[Any, ...]:
    """As `plan_regions`, with boxes (regions, GROUPS) instead of groups: -1 after the last.

    A box has a place in the stage, counted in groups.
    """
    sides = -(-widths[0] // B), -(-widths[1] // B)
    segments, groups, *rest = plan_regions(index, B, sides, region, places)
    groups = groups.reshape(-1, region.GROUPS).astype(np.int64)
    # A wide box has whole groups only, so that what is beyond the edge is 0.
    whole = np.array([width // region.FEATURES for width in widths])
    group, side = groups >> 1, groups & 1
    wideable = (groups >= 0) & (group < whole[side])
    follows = np.zeros(groups.shape, bool)
    follows[:, 1:] = wideable[:, 1:] & wideable[:, :-1] & (np.diff(groups, axis=1) == 2)
    at = np.arange(region.GROUPS)
    begins = np.maximum.accumulate(np.where(follows, 0, at), axis=1)
    breaks = np.where(follows, region.GROUPS, at)
    ends = np.full_like(breaks, region.GROUPS)  # of runs of neighbours
    ends[:, :-1] = np.minimum.accumulate(breaks[:, :0:-1], axis=1)[:, ::-1]
    within = at - begins
    wide = wideable & (at - within % WIDE + WIDE <= ends)
    bits = group << GROUP_AT | at << PLACE_AT | wide * IS_WIDE | side * IS_DY
    boxes = np.where(groups < 0, -1, bits)
    boxes[wide & (within % WIDE > 0)] = -1  # loaded with the ones before
    order = np.argsort(boxes < 0, axis=1, kind="stable")
    return segments, np.take_along_axis(boxes, order, 1).astype(np.int32), *rest


def plan_regions(
    index: Index, B: int, sides: tuple[int, int], region: Region, places: int
) -> tuple[Any, ...]:
    """What `regions` reads, but for boxes.

    segments (segments, 4): region, which of how many pieces of the batch it sums over, and where
    its sums are among those that a second pass adds up, or -1.
    groups (regions, GROUPS): twice the group, plus 1 where it is one of dy; or -1.
    codes (regions, WARPS, SLOTS): where both pieces of x and the first of dy are in a row of a
    stage, in 10 bits each, and NEW_COLUMN where the slot before had another column.
    used (regions, WARPS): the slots that are taken, first ones first.
    blocks (regions, WARPS, SLOTS, 2): the stored blocks, or -1.
    cut (regions that are cut,): their numbers; and as a number how many pieces they are cut into.
    """
    rows, columns = (a.astype(np.int64) for a in (index.block_rows, index.block_columns))
    per_slot, of_group = 16 // B, region.FEATURES // B
    row_groups, column_groups = (-(-n // of_group) for n in sides)
    item, n = _region_of_blocks(rows, columns, B, sides, region)

    # Blocks in the order of the slots.
    order = in_order(columns, item)
    item, rows, columns = item[order], rows[order], columns[order]
    column_of_item = item * sides[1] + columns
    half = rank_in_run(column_of_item) % per_slot
    begun = half == 0
    at = np.cumsum(begun) - 1  # the slot of each block
    slot_item = item[begun]
    slots = np.bincount(slot_item, minlength=n)
    warp, slot = _shared_out(rank_in_run(slot_item), slots[slot_item], region.WARPS)
    new = (rank_in_run(column_of_item)[begun] == 0) | (slot == 0)

    xs, x_width, x_place = _lined_up(item, rows // of_group, n, row_groups)
    dys, _, dy_place = _lined_up(item, columns // of_group, n, column_groups)
    groups = np.full((n, region.GROUPS), NO_GROUP, np.int32)
    groups[xs[0], xs[2]] = 2 * xs[1]
    groups[dys[0], x_width[dys[0]] + dys[2]] = 2 * dys[1] + 1
    x_piece = (x_place * region.FEATURES + rows % of_group * B) // PIECE
    dy_piece = ((x_width[item] + dy_place) * region.FEATURES + columns % of_group * B) // PIECE

    codes = np.zeros(n * region.WARPS * region.SLOTS, np.uint32)
    blocks = np.full(2 * codes.size, -1, np.int32)
    where = (slot_item * region.WARPS + warp) * region.SLOTS + slot
    second = x_piece[begun] + (B == 16)
    second[at[~begun]] = x_piece[~begun]
    codes[where] = (
        x_piece[begun] | second << PLACE_BITS | dy_piece[begun] << 2 * PLACE_BITS | new * NEW_COLUMN
    )
    blocks[2 * where[at] + half] = order
    segments, cut, pieces = _segments(n, places)
    used = np.bincount(slot_item * region.WARPS + warp, minlength=n * region.WARPS)
    used = used.astype(np.int32)
    return segments, groups.reshape(-1), codes, used, blocks, cut, pieces


def _region_of_blocks(
    rows: np.ndarray, columns: np.ndarray, B: int, sides: tuple[int, int], region: Region
) -> tuple[np.ndarray, int]:
    """The region of each block, and how many there are.

    Panels have the height with the fewest bytes and products of all regions.
    """

    of_group, per_slot = region.FEATURES // B, 16 // B
    n_groups, capacity = -(-sides[0] // of_group), region.WARPS * region.SLOTS
    counts = np.bincount(rows // of_group * sides[1] + columns, minlength=n_groups * sides[1])
    before = np.vstack([0 * counts[: sides[1]], counts.reshape(n_groups, -1).cumsum(0)])
    best: tuple[float, int, int] = (np.inf, 0, 0)
    for height in range(1, min(region.GROUPS * 3 // 4, n_groups) + 1):
        panels = np.append(np.arange(0, n_groups, height), n_groups)
        taken = -(-np.diff(before[panels], axis=0) // per_slot)
        if taken.max() <= capacity:
            runs = np.zeros(taken.shape, np.int64)
            n, groups = _run(taken, of_group, region.GROUPS - height, capacity, runs)
            cost = n * capacity * (B // 8 + 4.5) + (groups + n * height) * 32
            if cost < best[0]:
                best, chosen = (cost, height, n), runs
    _, height, n = best
    return chosen[rows // (height * of_group), columns], n


@compiled(error_model="numpy")
def _run(taken, of_group, widest, capacity, runs):
    """Number the region of each panel and column; how many there are, and groups of dy in all.

    Neighbouring columns fill it, until their slots are too many, or their groups.
    """
    n = groups = 0
    for panel in range(len(taken)):
        slots, wide, last = capacity, 0, -1
        for column in range(taken.shape[1]):
            if taken[panel, column]:
                group = column // of_group
                slots += taken[panel, column]
                if slots > capacity or (group != last and wide == widest):
                    n, slots, wide, last = n + 1, taken[panel, column], 0, -1
                if group != last:
                    groups, wide, last = groups + 1, wide + 1, group
                runs[panel, column] = n - 1
    return n, groups


def _shared_out(slot: np.ndarray, slots: np.ndarray, n_warps: int) -> tuple[np.ndarray, np.ndarray]:
    """(warp, slot of the warp): equal runs, but for one."""
    warp = ((slot + 1) * n_warps - 1) // slots
    return warp, slot - slots * warp // n_warps


def _lined_up(
    item: np.ndarray, group: np.ndarray, n: int, n_groups: int
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    """The groups of each region as (region, group, place), their number, and each block's place."""
    needed = np.zeros((n, n_groups), bool)
    needed[item, group] = True
    place = np.cumsum(needed, axis=1) - 1
    which, wanted = np.nonzero(needed)
    return (which, wanted, place[which, wanted]), needed.sum(1), place[item, group]


def _segments(n: int, places: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Whole regions, as many as fill all multiprocessors; the rest are cut over the batch."""
    rest = n % places

    def time(pieces: int) -> float:
        return -(-rest * pieces // places) * (1 / pieces + 0.02)

    pieces = min(range(1, 33), key=time) if rest else 1
    whole = n - rest if pieces > 1 else n
    cut = np.arange(whole, n)
    segments = np.zeros((whole + cut.size * pieces, 4), np.int32)
    segments[:whole] = np.stack([np.arange(whole), 0 * np.arange(whole)] * 2, axis=1)
    segments[:whole, 2:] = 1, -1
    piece, which = np.divmod(np.arange(cut.size * pieces), max(cut.size, 1))
    segments[whole:, 0], segments[whole:, 1] = whole + which, piece
    segments[whole:, 2], segments[whole:, 3] = pieces, which * pieces + piece
    return segments.reshape(-1), cut.astype(np.int32), pieces
