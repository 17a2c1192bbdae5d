"""Where taps share boxes of pixels in a weight-gradient of `k6_strips`: tiles, and regions of w.

What a region loads is what limits it, and in boxes it loads a pixel once for all taps of a chunk.
Of float32 lanes read at places of their own, which no box shifts: there each tap has its own.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.conv.window import Boxes, Pass, boxes_of_chunks, even_chunks, spread_of
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import SPARE, Way, fitted, small_way
from numbsparse.kernels.parts.groups import counted
from numbsparse.kernels.parts.pixels import UNEVEN, Images, tile_that_fits
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.strip import LINE, Region
from numbsparse.layout import Index

# Taps share boxes where this part of the pixels is loaded, at most, and so many at once; up to how
# many features it was timed.
WORTH, LARGEST, MOST_FEATURES = 0.75, 200, 384
ROWS, A_TILE = 32, 32  # of a stage; pixels that are loaded while one is multiplied
# Rows that lanes read at once: in one line of a box no two share banks. Tiles of 4 x 8 took 0.66 to
# 0.83 of the time of tap by tap, once 1.09; of 4 x 7 and 2 x 14 1.09 to 1.25, once 0.78; at a
# stride of 2, where boxes are of pixels of one parity, 1.0 to 1.2 (H200).
ROWS_AT_ONCE = 8
A_LINE, SECOND_PASS = 0.003, (2.0, 0.03, 2.0)  # microseconds of a line that is loaded; as there
# By block size microseconds of a row in the first region; warps and their slots, microseconds, how
# many times as long a row takes in proportion, and blocks of a cluster at most.
A_ROW = {8: 0.031, 16: 0.019}
REGIONS: Any = {
    8: (((12, 14), 3.0, 1.0, 2), ((8, 9), 2.2, 1.13, 8), ((8, 4), 2.2, 1.48, 8)),
    16: (((8, 8), 2.2, 1.0, 4), ((8, 4), 2.2, 1.04, 8), ((8, 2), 2.2, 1.37, 8)),
}
if SIMULATED:
    SMALL = (((2, 24), 1.0, 1.0, 8), ((2, 12), 1.0, 1.0, 8))
    REGIONS = dict.fromkeys(REGIONS, SMALL)


@lru_cache(1024)
def boxes_of_weight_grad(
    of: Pass, batch: int, item: int, features: int
) -> tuple[Any, Boxes | None]:
    """How outputs are cut into tiles, and the boxes that taps share, if it pays."""
    counts, seen = of.view.counts, len(of.seen[0])
    if item > 2 or seen == 1 or max(of.view.scale) > 1 or features > MOST_FEATURES:
        return None, None
    chunks = even_chunks(of)
    spread, part = spread_of(chunks), len(chunks) / seen
    tile = tile_that_fits(batch, counts, ROWS, A_TILE, UNEVEN, spread)
    box: Any = tuple(t + s for t, s in zip(tile[1:], spread, strict=True))
    rows, pixels = int(np.prod(tile)), tile[0] * int(np.prod(box))
    full = rows == ROWS and tile[3] % ROWS_AT_ONCE == 0
    if full and part * pixels <= WORTH * rows and pixels <= LARGEST:
        return tile, boxes_of_chunks(chunks, box)
    return None, None


def ways_of(index: Any, B: int, x: Images, columns: int) -> tuple[Way, ...]:
    """Regions that hold the blocks of a column in any group, with groups for their part of the
    features; none where taps share no boxes."""
    if x.shared is None:
        return ()
    shared, of_group, found = x.shared, LINE // 2 * x.shared.shifts, list[Way]()
    box = max(shared.room, ROWS)
    slots, most = planned(index, slots_in_groups, B, of_group // B)
    x_groups, dy_groups = x.shape[1] // of_group, -(-columns // (LINE // 2))
    for (warps, each), *how in REGIONS[B]:
        if warps * each >= most:
            high = -(-x_groups // max(-(-slots // (warps * each)), 1))
            groups = max(high + dy_groups, -(-4 * high // 3))  # x has three quarters at most
            region = Region(warps, each, groups, ROWS, 2, 4, BOX=box, SHIFTS=shared.shifts)
            region = in_stages(region, B)
            found = found or [Way(region, A_ROW[B])]
            found.append(small_way(found[0], region, *how, A_LINE, SECOND_PASS, SPARE))
    return tuple(found)


def in_stages(region: Region, B: int) -> Region:
    """With up to four stages, as there is room, that hold the sums of a block of a cluster."""
    sums = 16 * B * region.WARPS * (4 * region.SLOTS + 2)
    for stages in (2,) if SIMULATED else (4, 3, 2):
        groups = max(region.GROUPS, -(-sums // (stages * region.GROUP_BYTES)))
        wanted = region._replace(GROUPS=groups, STAGES=stages)
        if SIMULATED or fitted(wanted) == wanted:
            return wanted
    return fitted(wanted)


def slots_in_groups(index: Index, B: int, of_group: int) -> tuple[int, int]:
    """(slots of all columns, the most of one column in a group of so many block rows)."""
    n, columns = index.rows.indptr.size - 1, index.columns.indptr.size - 1
    lines, shift = np.arange(columns)[None], of_group.bit_length() - 1
    counts = counted(index.columns, lines, -(-n // of_group), shift)[0]
    slots = -(-counts.sum(0, dtype=np.int64) // (16 // B))
    return int(slots.sum()), -(-int(counts.max()) // (16 // B))
