"""Which regions a weight-gradient is computed in, which are the fastest, and in how many pieces.

A region is a panel of block rows by a run of block columns: so many that the slots of its warps,
one product of 16 x B each, are taken, or the shared memory that the features of x and dy take. Of
both only the groups of features that a block of the region needs are loaded.

As many blocks as the registers hold read least of x and dy. Where such regions are too few for all
multiprocessors there are smaller ones, of clusters or in pieces; or the last ones are cut.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import shared_memory
from numbsparse.kernels.cores import compiled, threads
from numbsparse.kernels.parts.groups import counted, steps_in_strips
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.strip import Region, blocks_of_step
from numbsparse.kernels.parts.swizzle import PERIOD
from numbsparse.layout import Index

MOST_PIECES = 32  # of a batch in large regions; small ones are as many as there are places, at most
# Microseconds (H200): of a large region, beside those that grow with the batch; of a second pass,
# by itself and for each piece, and how much of A_SUM its sums take. By blocks of a cluster: the
# part of the places that so large ones find, and microseconds until they have added their sums.
# With one piece and no clusters 2,048 to 8,192 rows took 1.0 to 1.9 times as long, 512 to 1,024
# rows of 1,024 and 2,048 features 1.4 to 1.8 times. In pieces of small regions 8,192 rows of 512
# and 1,024 features take 0.50 to 0.94 of the time.
# A second pass of matrices in blocks of 16 takes less: of products that are cut more for it 22 in
# float32 took 0.84 of the time at the mean, 1.08 at worst, two of 16 bits 0.79 and 1.05; with half
# of their sums' time, as in float32, those took up to 1.43 (drawn, H200).
A_REGION, SECOND_PASS = 4.5, (6.0, 0.0, 1.0)
SECOND_PASS_OF_16 = {2: (4.0, 0.0, 1.0), 4: (4.0, 0.0, 0.5)}
# Of pieces of small regions, which are added in turn; and rows that are not cut so. 4,096 to 16,384
# rows of 128 to 1,024 features took 0.64 to 0.86 of the time with what adds them now.
SMALL_PASS, UNCUT_ROWS = (2.0, 0.05, 2.0), 1023
SPLITS = {2: (1.0, 1.0), 4: (0.9, 1.6), 8: (0.91, 2.9)}
# More, where clusters take nearly all places: 120 to 132 blocks of threads, 128 to 384 rows, took
# 1.0 to 1.2 us longer than expected, 72 of them and 1,024 rows no longer. Large ones always: where
# that decides, 6 products took up to 1.19 times as long without it. One of two took 46 us of 2,048
# rows, in two pieces 54.
CROWDED, CROWDED_ROWS = 1.0, 512

Size = tuple[int, int, int]  # see `size_of`


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


class Way(NamedTuple):
    """A region, and microseconds: of a row of the batch; beside those of its rows; and of a row of
    a group that is copied, where that takes longer. Blocks of a cluster that has one, at most.

    What a second pass takes, see SECOND_PASS. Of small regions a place has one piece of the batch
    at most, and `spare` ones have none.
    """

    region: Region
    a_row: float
    alone: float = A_REGION
    a_group: float = 0.0
    together: int = 1
    again: tuple[float, float, float] = SECOND_PASS
    small: bool = False
    spare: int = 0
    meeting: float = 1.0  # how many times as long as elsewhere blocks of a cluster meet


Ways = tuple[Way, ...]  # to choose from, the large region first

# By bytes of a value and block size the part of the blocks that is kept, at most, and the region,
# found by trial on an H200. With AT_ONCE=1 2,048 rows of float32 took 1.10 to 1.12 times as long in
# blocks of 8, 1.06 in blocks of 16.
LARGE = {
    (2, 8): (
        (0.05, Region(12, 18, 36, 16, 3, 4)),
        (0.05, Region(12, 18, 27, 32, 2, 4)),
        (1, Region(12, 18, 26, 32, 2, 4)),
    ),
    (2, 16): (
        (0.05, Region(12, 11, 54, 16, 2, 4)),
        (1, Region(12, 11, 27, 16, 4, 4)),
        (1, Region(12, 11, 27, 32, 2, 4)),
    ),
    (4, 8): (
        (0.03, Region(12, 14, 54, 16, 2, 4, ITEM=4, AT_ONCE=2)),
        (0.07, Region(12, 18, 54, 16, 2, 4, ITEM=4, AT_ONCE=2)),
        (1, Region(12, 22, 36, 16, 3, 4, ITEM=4, AT_ONCE=2)),
    ),
    (4, 16): (
        (0.03, Region(16, 8, 108, 8, 2, 4, ITEM=4, AT_ONCE=2)),
        (0.12, Region(12, 12, 54, 16, 2, 4, ITEM=4)),
        (1, Region(12, 12, 36, 16, 3, 4, ITEM=4)),
    ),
}
# Where they save a round 14 products took 0.59 to 1.01 of the time, 0.85 at the mean (H200).
WIDER = {Region(12, 18, 26, 32, 2, 4): Region(14, 17, 26, 32, 2, 2)}
# Where those leave multiprocessors free: microseconds beside those of its rows, how many times as
# long as in proportion a row takes, and blocks of a cluster. Of those of half a large one there is
# one round where smaller ones take two: 4,096 features, density 0.1, 40 to 1,024 rows of 16 bits
# took 0.68 to 0.84 of the time without it, of float32 0.73 to 0.98 (H200). With two sizes between,
# of 16 bits, fewer places are left over: 34 products of 256 to 3,072 features and 128 to 8,192 rows
# that take them 0.62 to 1.27 of the time, 0.93 at the median.
SMALLER = {
    (2, 8): (
        (Region(12, 12, 24, 32, 2, 4), 4.2, 1.2, 1),
        (Region(8, 9, 16, 32, 3), 2.2, 1.25, 8),
        (Region(8, 6, 16, 32, 3), 2.2, 1.4, 8),
        (Region(8, 4, 16, 32, 3), 2.2, 1.64, 8),
    ),
    (2, 16): (
        (Region(8, 8, 24, 32, 2), 4.2, 1.4, 1),
        (Region(8, 5, 16, 32, 3), 2.2, 1.25, 8),
        (Region(8, 4, 16, 32, 3), 2.2, 1.25, 8),
        (Region(8, 2, 16, 32, 3), 2.2, 1.64, 8),
    ),
    (4, 8): (
        (Region(8, 16, 24, 16, 4, ITEM=4, AT_ONCE=2), 4.2, 1.2, 1),
        (Region(8, 8, 24, 16, 4, ITEM=4, AT_ONCE=2), 2.2, 1.25, 8),
    ),
    (4, 16): (
        (Region(8, 8, 24, 16, 4, ITEM=4), 4.2, 1.2, 1),
        (Region(8, 4, 24, 16, 4, ITEM=4), 2.2, 1.25, 8),
    ),
}
# Microseconds of a row of the batch in a region, and of a sum that is written and read again; of a
# row of a group that is copied, and of a transposed one.
A_ROW = {("highest", 8): 0.23, ("highest", 16): 0.19, ("high", 8): 0.16, ("high", 16): 0.13}
A_ROW_OF_16_BIT, A_SUM, A_GROUP = {8: 0.04, 16: 0.033}, 1.6e-6, (0.0013, 0.0025)
# Multiprocessors that pieces leave free, of images: of 64, 28 x 28, 128 to 128 features, blocks of
# 16, 132 pieces took 30.8 us, 126 25.6; of 32 of 56 x 56, 46.4 and 44.4 (H200). Why is not known.
SPARE = 6
# Blocks of clusters meet sooner there: of seven weight-gradients of images in blocks of 16 and 16
# bits (297 to 3,840 outputs) five then take clusters, or larger ones, in 0.69 to 0.97 of the time.
# Anything from 0.3 to 0.6 chooses so; other blocks, and float32, were not timed (H200).
MEETING_OF_IMAGES = 0.5


def ways_of(
    index: Index, B: int, columns: int, arithmetic: str, transposed: bool, of_images: bool
) -> Ways:
    """To compute a weight-gradient of so many columns of dy."""
    item = 4 if (arithmetic, B) in A_ROW else 2
    width = min(512, -(-columns // B) * B)
    kept, *_ = planned(index, steps_in_strips, B, False, width, 32, blocks_of_step(B, item))
    return ways_for(kept, B, arithmetic, transposed, of_images)


def ways_for(
    kept: float, B: int, arithmetic: str, transposed: bool, of_images: bool = False
) -> Ways:
    """Where so much is kept of the blocks of strips."""
    item = 4 if (arithmetic, B) in A_ROW else 2
    large, first = region_of(B, item, kept, transposed), 1 if of_images else 0
    row, again = A_ROW.get((arithmetic, B), A_ROW_OF_16_BIT[B]), SECOND_PASS
    if B == 16 and not of_images:
        again = SECOND_PASS_OF_16[item]
    found = [Way(large, row, together=1 if of_images else 2, again=again)]
    meeting = MEETING_OF_IMAGES if of_images and (item, B) == (2, 16) else 1.0
    costs = A_GROUP[transposed], SMALL_PASS, SPARE * first, meeting
    for smaller, *how in SMALLER[item, B][first:]:  # of images the first is not timed
        region = large if SIMULATED else fitted(smaller)
        found.append(small_way(found[0], region, *how, *costs))
    return tuple(found)


def small_way(large: Way, region: Region, alone: float, slower: float, *more: Any) -> Way:
    """Of a region whose rows take so many times as long as in proportion to those of the large one:
    `more` are blocks of a cluster, the time of a group and of a second pass, places to spare, and
    how long clusters meet."""
    a_row = slower * large.a_row * (region.CODES / large.region.CODES)
    together, a_group, again, *rest = more
    return Way(region, a_row, alone, a_group, together, again, True, *rest)


def region_of(B: int, item: int, kept: float, transposed: bool) -> Region:
    """As many blocks as the registers of a multiprocessor hold, if shared memory holds their x and
    dy; where few are kept near each other, more features of fewer rows or stages.

    Lines of a transposed operand are no shorter than 64 bytes: those are slow to fetch.
    """
    rows = 64 // item if transposed else 0
    if shared_memory() is None:
        return _region_in_the_simulator(B, item, kept, transposed)
    found = (region for most, region in LARGE[item, B] if kept <= most)
    return fitted(next(region for region in found if rows <= region.DEPTH))


def fitted(region: Region) -> Region:
    """With as many groups as shared memory holds."""
    limit = (shared_memory() or 0) - PERIOD - 16 * (region.STAGES + 1)  # and barriers
    if region.ITEM == 4:
        limit -= 16 * region.WARPS * region.SLOTS  # where the slots' operands are
    limit -= 16 * region.WARPS * region.SLOTS  # what gates leave
    groups = min(region.GROUPS, limit // (region.STAGES * region.GROUP_BYTES))
    return region._replace(GROUPS=groups)


def _region_in_the_simulator(B: int, item: int, kept: float, transposed: bool) -> Region:
    if item == 4:
        groups, depth = (4, 16) if kept > 0.2 else (8, 8)
        return Region(2, 4, groups, depth, 2, 1, 4, 1 if kept > 0.4 else 2)
    groups, depth = (5, 32) if kept > 0.2 or transposed else (8, 16)  # 5: odd, as on some cards
    return Region(2, 128 // B, groups, depth, 2)


def region_for(
    index: Index, B: int, widths: tuple[int, int], batch: int, ways: Ways, places: int
) -> tuple[Region, int]:
    """The region that takes least time, and into how many pieces of the batch those are cut that
    are left when all places have as many.

    What `fastest` finds.
    """
    sizes = partial(planned, index, size_of, B, widths)
    return fastest(sizes, B, batch, ways, places)


def fastest(
    size_of_region: Callable[[Region], Size], B: int, batch: int, ways: Ways, places: int
) -> tuple[Region, int]:
    """Of regions that are so many."""
    return soonest(size_of_region, B, batch, ways, places)[1:]


def soonest(
    size_of_region: Callable[[Region], Size], B: int, batch: int, ways: Ways, places: int
) -> tuple[float, Region, int]:
    """The same, after the microseconds that it takes.

    That is the large one; or, where that saves a round, the wider one, of a few more slots; or,
    where the large one leaves places free, a smaller one, which reads more of x and dy and has less
    to add up, maybe of a cluster or in pieces.
    """
    large, size = ways[0], size_of_region(ways[0].region)
    n, height, groups = size
    if wider := WIDER.get(large.region):
        fewer = ceil(n * large.region.CODES / wider.CODES)
        if ceil(fewer / places) < ceil(n / places):
            n, size, ways = fewer, (fewer, height, groups), (large._replace(region=wider),)
    ways = ways if n < places else ways[:1]
    sizes = (size, *(size_of_region(way.region) for way in ways[1:]))
    return _fastest(ways, sizes, B, batch, places)


def size_of(index: Index, B: int, widths: tuple[int, int], region: Region) -> Size:
    """(how many regions there are, the height of their panels, their groups of dy in all)."""
    sides = -(-widths[0] // B), -(-widths[1] // B)
    height, _, slots, groups = planned(index, regions_of_blocks, B, sides, region)
    return slots.size, height, groups


@lru_cache
def _fastest(
    ways: Ways, sizes: tuple[Size, ...], B: int, batch: int, places: int
) -> tuple[float, Region, int]:
    found = [
        each
        for way, size in zip(ways, sizes, strict=True)
        for each in times_of(way, size, B, batch, places)
    ]
    return min(found, key=lambda each: each[0])


def times_of(
    way: Way, size: Size, B: int, batch: int, places: int
) -> Iterator[tuple[float, Region, int]]:
    """(microseconds, the region, pieces): by pieces of the batch, and by blocks of a cluster."""
    region, (n, height, groups), (alone, each, part) = way.region, size, way.again
    high, (whole, rest) = height * region.LINES / region.DEPTH, divmod(n, places)
    a_row = max(way.a_row, way.a_group * (high + groups / max(n, 1)))
    most, sums = MOST_PIECES, region.CODES * 16 * B * A_SUM
    if way.small:
        cut = way.together > 1 and batch > UNCUT_ROWS
        most = max((places - way.spare) // max(n, 1), 1) if cut else 1
    for pieces in range(1, min(most, -(-batch // region.DEPTH)) + 1):
        time = whole * (way.alone + a_row * batch)
        time += ceil(rest * pieces / places) * (way.alone + a_row * batch / pieces)
        adding = alone + pieces * (each + rest * part * sums) if pieces > 1 else 0.0
        yield time + adding, region, pieces
    for blocks, (room, meeting) in SPLITS.items():
        if blocks <= way.together:
            crowded = n * blocks > 0.75 * places and batch <= CROWDED_ROWS
            meeting += CROWDED if crowded or not way.small else 0.0
            time = way.alone + a_row * batch / blocks + meeting * way.meeting
            yield ceil(n * blocks / (room * places)) * time, region._replace(SPLIT=blocks), 1


class Cuts(NamedTuple):
    """Regions that are whole, as many as fill all places; those that are left, and into how many
    pieces of the batch they are cut."""

    whole: int
    left: int
    pieces: int


def cuts_of(n: int, places: int, pieces: int) -> Cuts:
    """Of n regions."""
    left = n % places if pieces > 1 else 0
    return Cuts(n - left, left, pieces)


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
