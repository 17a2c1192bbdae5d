"""Which kept blocks of w a block of threads computes together, and in which order its warps do.

A region is a panel of block rows by a run of block columns: so many that the slots of its warps,
one product of 16 x B each, are taken, or the shared memory that the features of x and dy take. Of
both only the groups of features that a block of the region needs are loaded. A slot is a block of
16 x 16, or two blocks of 8 x 8 of one column. Slots are in order of columns, so that most find the
dy of their column already in registers.
"""

from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.cores import compiled, threads
from numbsparse.kernels.parts.groups import counted
from numbsparse.kernels.parts.pixels import WIDTHS, boxes_of
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.shifted import BOX_BITS
from numbsparse.kernels.parts.swizzle import PERIOD, PIECE
from numbsparse.layout import Index

LINE = 128  # bytes of a group in a row of the batch
NO_GROUP = -1
PLACE_BITS = 10
PLACE = (1 << PLACE_BITS) - 1
NEW_COLUMN = 1 << 3 * PLACE_BITS


class Region(NamedTuple):
    """Warps that multiply, slots of a warp, groups of features, rows of a stage of x and dy, stages
    of the ring; warps that request them from the copy engine; bytes of a value; slots that are
    multiplied at once, of which a warp has a multiple; and blocks of threads, a cluster, that sum
    over a part of the batch each.

    A group is DEPTH lines of FEATURES; of a transposed operand FEATURES lines of DEPTH rows of the
    batch. Where taps share boxes (`pixels.Shared`) it has room for BOX lines, and its features
    count once for each of SHIFTS lines. There are slots for all blocks of a column that a group of
    x may have.
    """

    WARPS: int
    SLOTS: int
    GROUPS: int
    DEPTH: int
    STAGES: int
    FETCHERS: int = 2
    ITEM: int = 2
    AT_ONCE: int = 1
    SPLIT: int = 1
    BOX: int = 0
    SHIFTS: int = 1

    @property
    def FEATURES(self) -> int:
        """Of a group."""
        return LINE // self.ITEM

    @property
    def LINES(self) -> int:
        """That a group has room for."""
        return self.BOX or self.DEPTH

    @property
    def GROUP_BYTES(self) -> int:
        return LINE * self.LINES

    @property
    def CODES(self) -> int:
        """Of the slots of all warps."""
        return self.WARPS * self.SLOTS

    @property
    def STAGE_BYTES(self) -> int:
        return self.GROUPS * self.GROUP_BYTES

    @property
    def SHARED_BYTES(self) -> int:
        return self.STAGES * self.STAGE_BYTES + PERIOD


class Sums(NamedTuple):
    """What a kernel is made for."""

    B: int
    arithmetic: str  # "float16", "bfloat16", "highest" or "high"
    region: Region
    x_transposed: bool  # feature-major
    dy_transposed: bool
    of_images: bool = False
    gated: bool = False  # whether a warp may have far fewer slots than there are

    @property
    def TILES(self) -> int:
        """Of 16 x 8 sums in a slot, four to a lane."""
        return self.B // 8


def plan_boxes(
    index: Index, B: int, widths: tuple[int, int], region: Region, offsets: Any = None
) -> tuple[Any, ...]:
    """As `plan_regions`. With the `offsets` of taps x are images: then behind the groups of a
    region, what `pixels` knows of each."""
    sides = -(-widths[0] // B), -(-widths[1] // B)
    groups, *rest = plan_regions(index, B, sides, region)
    if offsets is not None:
        a_tap = widths[0] // len(offsets) // (region.FEATURES * region.SHIFTS)
        of_x = boxes_of(groups >> 1, offsets, a_tap)
        of_dy = boxes_of(groups >> 1, ((0, 0, 0, 0),), WIDTHS)
        groups = np.hstack([groups, np.where(groups & 1, of_dy, of_x)])
    return groups, *rest


def plan_regions(index: Index, B: int, sides: tuple[int, int], region: Region) -> tuple[Any, ...]:
    """What `regions` reads.

    groups (regions, GROUPS): twice the group, plus 1 where it is one of dy; or -1.
    codes (regions, WARPS, SLOTS): where both pieces of x and the first of dy are in a row of a
    stage, in 10 bits each, and NEW_COLUMN where the slot before had another column. Of boxes that
    taps share in BOX_BITS each, of x by lines of BOX to a group.
    used (regions, WARPS): the slots that are taken, first ones first.
    blocks (regions, WARPS, SLOTS, 2): the stored blocks, or -1.
    """
    of_group = region.FEATURES // B
    row_groups, column_groups = -(-sides[0] // (of_group * region.SHIFTS)), -(-sides[1] // of_group)
    height, items, slots, _ = planned(index, regions_of_blocks, B, sides, region)
    n, group_of = slots.size, np.arange(sides[0]) // (of_group * region.SHIFTS)
    lines = tuple(index.columns), group_of, group_of // height, items
    xs, dys = np.zeros((n, row_groups), np.int16), np.zeros((n, column_groups), np.int16)
    groups = np.full((n, region.GROUPS), NO_GROUP, np.int32)
    _line_up(*lines, of_group, xs, dys, groups)

    codes = np.zeros((n, region.WARPS, region.SLOTS), np.int64 if region.BOX else np.uint32)
    blocks = np.full((*codes.shape, 2), -1, np.int32)
    used = np.zeros((n, region.WARPS), np.int32)
    taken, last, run = np.zeros(n, np.int64), np.full(n, -1), np.zeros(n, np.int64)
    rows, places = (of_group * many for many in (region.SHIFTS, region.BOX or 1))
    how = of_group, rows, places, BOX_BITS if region.BOX else PLACE_BITS, B
    _deal_slots(*lines, *how, xs, dys, slots, taken, last, run, codes, used, blocks)
    return groups, *(a.reshape(-1) for a in (codes, used, blocks))


def regions_of_blocks(
    index: Index, B: int, sides: tuple[int, int], region: Region
) -> tuple[int, np.ndarray, np.ndarray, int]:
    """(height, (panels, columns) the region of blocks there, slots of each region, groups of dy).

    Panels have the height with the fewest bytes and products of all regions.
    """
    per_slot, of_group = 16 // B, region.FEATURES // B
    rows, capacity = of_group * region.SHIFTS, region.WARPS * region.SLOTS
    n_groups = -(-sides[0] // rows)
    counts = counted(index.columns, np.arange(sides[1])[None], n_groups, rows.bit_length() - 1)
    before = np.vstack([np.zeros_like(counts[0, :1]), counts[0]]).astype(np.int32)
    for group in range(n_groups):  # the blocks of each column in the groups of block rows before
        before[group + 1] += before[group]
    best, chosen = np.inf, 1
    how, none = (per_slot, of_group, capacity), np.zeros((0, 0), np.int64)

    def tried(height: int) -> tuple[int, int]:
        found = _run(before, height, region.GROUPS - height, *how, none, none.reshape(-1))
        return found  # type: ignore[no-any-return]

    heights = range(1, min(region.GROUPS * 3 // 4, n_groups) + 1)
    for height, (n, groups) in zip(heights, threads().map(tried, heights), strict=True):
        high = height * region.LINES / region.DEPTH
        cost = n * capacity * (2 / per_slot + 4.5) + (groups + n * high) * 32
        if n >= 0 and cost < best:
            best, chosen = cost, height
    items = np.zeros((-(-n_groups // chosen), sides[1]), np.int64)
    slots = np.zeros(index.rows.indices.size, np.int64)
    n, groups = _run(before, chosen, region.GROUPS - chosen, *how, items, slots)
    return chosen, items, slots[:n], groups


@compiled()
def _run(before, height, widest, per_slot, of_group, capacity, items, slots):
    """(regions, or -1 where a column has too many blocks for one, groups of dy in all).

    Neighbouring columns of a panel of `height` groups fill a region, until their slots or groups
    are too many. items (panels, columns): the regions of blocks; slots : of each region; unless
    there is room for none.
    """
    n = groups = 0
    for top in range(0, len(before) - 1, height):
        above, below = before[top], before[min(top + height, len(before) - 1)]
        free, wide, new, left = 0, 0, True, 0  # whether the group of columns is a new one
        for column in range(above.size):
            if left == 0:
                new, left = True, of_group
            left -= 1
            taken = below[column] - above[column] + per_slot - 1 >> per_slot - 1  # 1 or 2
            if taken > capacity:
                return -1, 0
            if taken:
                if taken > free or (new and wide == widest):
                    n, free, wide, new = n + 1, capacity, 0, True
                if new:
                    groups, wide, new = groups + 1, wide + 1, False
                free -= taken
                if items.size:
                    slots[n - 1] += taken
                    items[top // height, column] = n - 1
    return n, groups


@compiled()
def _line_up(walk, group_of, panel_of, items, of_group, xs, dys, groups):
    """The groups of each region, those of x first, and in xs and dys the place of each."""
    indptr, rows, _ = walk
    for column in range(indptr.size - 1):
        for k in range(indptr[column], indptr[column + 1]):
            item = items[panel_of[rows[k]], column]
            xs[item, group_of[rows[k]]] = dys[item, column // of_group] = 1
    for item in range(len(groups)):
        place = 0
        for side, places in enumerate((xs, dys)):
            for group in range(places.shape[1]):
                if places[item, group]:
                    groups[item, place], places[item, group] = 2 * group + side, place
                    place += 1


@compiled()
def _deal_slots(
    walk, group_of, panel_of, items, of_group, of_rows, of_places, bits, B, xs, dys, slots, taken,
    last, run, codes, used, blocks,
):  # fmt: skip
    """Equal runs of the slots, but for one, to the warps of each region, column by column.

    of_rows, of_places : blocks of a group of x, and places for them in a stage
    taken, last, run : of each region so far, the slots, its last column, and the blocks of that
    """
    (indptr, rows, stored), per_slot, pieces = walk, 16 // B, B // PIECE
    n_warps = used.shape[1]
    for column in range(indptr.size - 1):
        own = column // of_group
        for k in range(indptr[column], indptr[column + 1]):
            row = rows[k]
            item, group = items[panel_of[row], column], group_of[row]
            run[item] = run[item] + 1 if last[item] == column else 0
            last[item], half = column, run[item] & (per_slot - 1)  # per_slot is 1 or 2
            taken[item] += 1 - half
            nth = taken[item] - 1
            warp = ((nth + 1) * n_warps - 1) // slots[item]
            slot = nth - slots[item] * warp // n_warps
            x = (xs[item, group] * of_places + row - group * of_rows) * pieces
            dy = (dys[item, own] * of_group + column - own * of_group) * pieces
            blocks[item, warp, slot, half] = stored[k]
            if half:
                codes[item, warp, slot] &= ~(((1 << bits) - 1) << bits)
                codes[item, warp, slot] |= x << bits
            else:
                new = run[item] == 0 or slot == 0
                second = x + (pieces - 1)
                codes[item, warp, slot] = x | second << bits | dy << 2 * bits | new << 3 * bits
                used[item, warp] += 1
