"""Which kept blocks of w a block of threads computes together, and in which order its warps do.

A region is a panel of block rows by a run of block columns: so many that the slots of its warps,
one product of 16 x B each, are taken, or the shared memory that the features of x and dy take. Of
both only the groups of 64 features that a block of the region needs are loaded. A slot is a block
of 16 x 16, or two blocks of 8 x 8 of one column. Slots stand column by column, so that most find
the dy of their column already in registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.region_runs import region_of_blocks
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE, rank_in_run
from numbsparse.layout import Index

NO_GROUP = -1
PLACE_BITS = 10
NEW_COLUMN = 1 << 3 * PLACE_BITS


def plan_regions(
    index: Index, B: int, sides: tuple[int, int], region: Region, places: int
) -> tuple[Any, ...]:
    """What `regions` reads.

    segments (segments, 4): region, which of how many pieces of the batch it sums over, and where
    its sums lie among those that a second pass adds up, or -1.
    groups (regions, GROUPS): twice the group, plus 1 where it is one of dy; or -1.
    codes (regions, WARPS, SLOTS): where both pieces of x and the first of dy stand in a row of a
    stage, in 10 bits each, and NEW_COLUMN where the slot before had another column.
    used (regions, WARPS): the slots that are taken, first ones first.
    blocks (regions, WARPS, SLOTS, 2): the stored blocks, or -1.
    cut (regions that are cut,): their numbers; and as a number how many pieces they are cut into.
    """
    rows, columns = (a.astype(np.int64) for a in (index.block_rows, index.block_columns))
    per_slot, of_group = 16 // B, region.FEATURES // B
    row_groups, column_groups = (-(-n // of_group) for n in sides)
    item, n = region_of_blocks(rows, columns, B, sides, region)

    # Blocks in the order of the slots.
    order = np.lexsort((rows, columns, item))
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

    codes = np.zeros((n, region.WARPS, region.SLOTS), np.uint32)
    blocks = np.full((n, region.WARPS, region.SLOTS, 2), -1, np.int32)
    where = (slot_item, warp, slot)
    second = np.zeros(slot_item.size, np.int64)
    second[:] = x_piece[begun] + (B == 16)
    second[at[~begun]] = x_piece[~begun]
    codes[where] = (
        x_piece[begun] | second << PLACE_BITS | dy_piece[begun] << 2 * PLACE_BITS | new * NEW_COLUMN
    )
    place = (*(a[at] for a in where), half)
    blocks[place] = order
    segments, cut, pieces = _segments(n, places)
    used = np.bincount(slot_item * region.WARPS + warp, minlength=n * region.WARPS)
    used = used.astype(np.int32)
    return segments, groups.reshape(-1), codes.reshape(-1), used, blocks.reshape(-1), cut, pieces


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
