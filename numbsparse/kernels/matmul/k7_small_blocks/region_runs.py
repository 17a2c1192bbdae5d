"""Which blocks make a region: a panel of block rows by a run of block columns.

As many as fill the slots of its warps, or the shared memory that its features of x and dy take.
"""

from __future__ import annotations

import numpy as np

from numbsparse.kernels.matmul.k7_small_blocks.region import Region


def region_of_blocks(
    rows: np.ndarray, columns: np.ndarray, B: int, sides: tuple[int, int], region: Region
) -> tuple[np.ndarray, int]:
    """The region of each block, and how many there are.

    Panels have the height with the fewest bytes and products of all regions.
    """

    of_group = region.FEATURES // B

    def cost(height: int) -> float:
        slots = _slots(rows, columns, height * of_group, B, sides)
        if slots.max() > region.WARPS * region.SLOTS:
            return np.inf
        _, n, groups = _runs(slots, height, of_group, region)
        return n * region.WARPS * region.SLOTS * (B // 8 + 4.5) + (groups + n * height) * 32

    most = min(region.GROUPS * 3 // 4, -(-sides[0] // of_group))
    height = min(range(1, most + 1), key=cost)
    slots = _slots(rows, columns, height * of_group, B, sides)
    runs, n, _ = _runs(slots, height, of_group, region)
    return runs[rows // (height * of_group), columns], n


def _slots(
    rows: np.ndarray, columns: np.ndarray, height: int, B: int, sides: tuple[int, int]
) -> np.ndarray:
    """(panels of so many block rows, block columns): the slots that they take."""
    n_panels, width = -(-sides[0] // height), sides[1]
    panel = rows // height
    counts = np.bincount(panel * width + columns, minlength=n_panels * width)
    return (-(-counts // (16 // B))).reshape(n_panels, width)


def _runs(
    slots: np.ndarray, height: int, of_group: int, region: Region
) -> tuple[np.ndarray, int, int]:
    """The region of each panel and block column, their number, and that of their groups of dy."""
    regions_of = np.zeros(slots.shape, np.int64)
    n = n_groups = 0
    for panel, taken in enumerate(slots):
        (columns,) = np.nonzero(taken)
        if columns.size:
            group = columns // of_group
            nth = np.cumsum(np.diff(group, prepend=group[0]) > 0)  # of those that are needed
            run = _run_of(taken[columns], nth, region.GROUPS - height, region)
            regions_of[panel, columns] = n + run
            n_groups += nth[-1] + 1 + np.count_nonzero((np.diff(run) > 0) & (np.diff(nth) == 0))
            n += run[-1] + 1
    return regions_of, n, n_groups


def _run_of(taken: np.ndarray, nth: np.ndarray, widest: int, region: Region) -> np.ndarray:
    """The run of each column."""
    capacity, ends = region.WARPS * region.SLOTS, np.cumsum(taken)
    run, first, count = np.zeros(taken.size, np.int64), 0, 0
    while first < taken.size:
        room = np.searchsorted(ends, capacity + (ends[first - 1] if first else 0), side="right")
        last = min(int(room), int(np.searchsorted(nth, nth[first] + widest)))
        run[first:last] = count
        first, count = last, count + 1
    return run
