"""How the weight-gradient is cut: regions of a few tiles of x and of dy.

A tile is 32 features wide. A block of threads takes up to XT tiles of x that
are neighbours, up to YT tiles of dy, and every kept cell where one of these meets one of those: a
cell is a block of w, or a part of one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numbsparse.layout import Index

WIDTH = 32  # of a tile


class Region(NamedTuple):
    """What a block of threads takes: all cells that meet in a tile of dy have to fit in."""

    XT: int  # tiles of x
    YT: int  # tiles of dy
    CELLS: int  # a warp
    WARPS: int
    NT: int  # rows of the batch in a step
    STAGES: int
    PER_SM: int  # blocks of threads that a multiprocessor holds

    @property
    def threads(self) -> int:
        return self.WARPS * 32

    @property
    def tiles(self) -> int:
        return self.XT + self.YT

    @property
    def stage(self) -> int:
        """Items of a stage."""
        return self.tiles * self.NT * WIDTH

    @property
    def capacity(self) -> int:
        return self.CELLS * self.WARPS


def cell_side(B: int) -> int:
    return min(B, WIDTH)


def regions(index: Index, B: int, region: Region) -> tuple[Any, ...]:
    """(tiles, cells, targets), int32, a row for each region; the fullest regions come first.

    tiles (XT + YT) : the first feature of each tile, -1 where there is none
    cells (CELLS * WARPS) : a cell's first column among the tiles of x and, times 2^16, of dy; or -1
    targets (CELLS * WARPS) : where a cell begins in dvalues seen as rows of a cell's width, or -1
    """
    side = cell_side(B)
    rows, columns, target = _cells(index, B, side)
    panel, tile = rows * side // (region.XT * WIDTH), columns * side // WIDTH
    order = np.lexsort((rows, columns, panel))
    rows, columns, target, panel, tile = (a[order] for a in (rows, columns, target, panel, tile))
    group_starts = np.flatnonzero(_changes(panel, tile))
    of_region, starts = _fill(group_starts, panel, rows.size, region)
    count = starts.size
    sizes = np.diff(np.append(starts, rows.size))
    rank = np.empty(count, np.int64)  # the fullest first
    rank[np.argsort(-sizes, kind="stable")] = np.arange(count)

    group_of_cell = np.cumsum(_changes(panel, tile)) - 1
    y_tile = group_of_cell - group_of_cell[starts][of_region]
    x_tile = rows * side // WIDTH - panel * region.XT
    at = rank[of_region]
    tiles = np.full((count, region.XT + region.YT), -1, np.int32)
    tiles[at, x_tile] = rows * side // WIDTH * WIDTH
    tiles[at, region.XT + y_tile] = tile * WIDTH

    number = np.arange(rows.size) - starts[of_region]
    slot = number % region.WARPS * region.CELLS + number // region.WARPS
    cells = np.full((count, region.capacity), -1, np.int32)
    x_at = x_tile * WIDTH + rows * side % WIDTH
    y_at = y_tile * WIDTH + columns * side % WIDTH
    cells[at, slot] = x_at | y_at << 16
    targets = np.full((count, region.capacity), -1, np.int32)
    targets[at, slot] = target
    return tiles, cells, targets


def _cells(index: Index, B: int, side: int) -> tuple[np.ndarray, ...]:
    """The row and column of each cell, counted in cells, and where it begins."""
    parts = B // side
    row, column = (a.reshape(-1) for a in np.indices((parts, parts)))
    block = np.arange(index.block_rows.size)[:, None]
    rows = (index.block_rows[:, None] * np.int64(parts) + row).reshape(-1)
    columns = (index.block_columns[:, None] * np.int64(parts) + column).reshape(-1)
    return rows, columns, ((block * B + row * side) * parts + column).reshape(-1)


def _changes(*keys: np.ndarray) -> np.ndarray:
    """Where a run of equal keys begins."""
    begins = np.ones(keys[0].size, bool)
    begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return begins


def _fill(
    group_starts: np.ndarray, panel: np.ndarray, n_cells: int, region: Region
) -> tuple[np.ndarray, np.ndarray]:
    """Runs of groups, a group being the cells of one tile of dy, that fit into one region."""
    ends = np.append(group_starts[1:], n_cells)[: group_starts.size]
    starts: list[int] = []
    tiles = room = 0
    before = -1
    for start, end, of_panel in zip(
        group_starts.tolist(), ends.tolist(), panel[group_starts].tolist(), strict=True
    ):
        tiles, room = tiles + 1, room - (end - start)
        if of_panel != before or tiles > region.YT or room < 0:
            starts.append(start)
            tiles, room, before = 1, region.capacity - (end - start), of_panel
    begins = np.zeros(n_cells, np.int64)
    begins[starts] = 1
    return np.cumsum(begins) - 1, np.array(starts, np.int64)
