"""What each block of threads multiplies, step by step, and where tiles take less time than strips.

A tile of w is 64 or 128 features by 128 columns of y. A step has one, and says in a record which
blocks are kept in it and where; a tile that keeps none has no step.
"""

from functools import lru_cache
from itertools import product as every
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import shared_memory
from numbsparse.kernels.parts.pieces import part_bytes
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.swizzle import PERIOD
from numbsparse.layout import Index

SQUARE, COLUMNS = 64, 128  # of w, whose rows have 128 bytes; of y
COUNT = COLUMNS // 2  # sums of a thread
FLOAT32 = np.dtype("float32")  # compared with in a quarter of the time that its name takes
FETCHERS, INSIDE_BITS = 4, 5  # warps; of a code
MOST_STAGES = 3 if SIMULATED else 8
ROOM = {1: float("inf"), 2: 1.0, 4: 0.76}  # of the multiprocessors, for clusters of that size
# Microseconds, fitted to an H200: of 64 features, and more for each 64 rows; of a tile beside them,
# and for each 64 rows where its sum is shared. Of 47 products it chose the fastest tile.
OF_STEP, OF_ROWS, OF_TILE, OF_SUMS = 0.24, 0.114, 4.0, 1.23
# By block size, of so many rows the part that is kept of tiles from which on this takes less time
# than strips do (H200, float16).
WORTH = {8: ((512, 0.18), (192, 0.22), (48, 0.3)), 16: ((192, 0.34), (48, 0.45))}


class Tile(NamedTuple):
    """What a kernel is made for."""

    B: int
    kind: str  # "f16" or "bf16"
    WARPGROUPS: int  # of 64 rows each
    SPLIT: int  # blocks of threads of a cluster that have a part of the sum each
    DEPTH: int  # features of a step, 64 or 128
    transposed: bool  # y = x @ w.T
    x_transposed: bool  # x is feature-major
    order: str  # of y, see `parts.store`

    @property
    def ROWS(self) -> int:
        return SQUARE * self.WARPGROUPS

    @property
    def W_START(self) -> int:
        return 2 * self.DEPTH * self.ROWS

    @property
    def STAGE_BYTES(self) -> int:
        return self.W_START + 2 * self.DEPTH * COLUMNS

    @property
    def RECORD(self) -> int:
        return record_of(self.B, self.DEPTH)

    @property
    def STAGES(self) -> int:
        """Of the ring; with two records for each."""
        limit = (shared_memory() or 228 * 1024) - PERIOD - 1024
        return min(limit // (self.STAGE_BYTES + 8 * self.RECORD), MOST_STAGES)

    @property
    def SHARED_BYTES(self) -> int:
        """The parts of a sum that is split are where the ring was."""
        parts = part_bytes(4 * self.WARPGROUPS, COUNT) if self.SPLIT > 1 else 0
        return max(self.STAGES * (self.STAGE_BYTES + 8 * self.RECORD), parts) + PERIOD


def record_of(B: int, depth: int) -> int:
    """Numbers of a step: a code for each block of a tile of w, its first feature, and zeros."""
    return COLUMNS * depth // B**2 + 4


def depth_of(warpgroups: int) -> int:
    """Features of a step: with many rows the ring has no room for more.

    With 64 two of 64 rows took 1.06 times as long in blocks of 8 (8,192 features, 128 rows), one up
    to 1.15 times in blocks of 16 (H200).
    """
    return 2 * SQUARE if warpgroups <= 2 else SQUARE


@lru_cache(1024)
def shape_of(batch: int, strips: int, steps: float, units: int) -> tuple[int, int]:
    """(warpgroups of a tile, blocks of threads that share its sum), for the least time."""

    def cost(warpgroups: int, split: int) -> float:
        blocks = strips * -(-batch // (SQUARE * warpgroups)) * split
        if blocks > units * ROOM[split]:
            return float("inf")
        of_tile = steps / split * (OF_STEP + OF_ROWS * warpgroups) + OF_TILE
        return -(-blocks // units) * of_tile + OF_SUMS * warpgroups * (split > 1)

    return min(every((1, 2, 3, 4), ROOM), key=lambda shape: cost(*shape))


def plan_tiles(
    index: Index, transposed: bool, features: int, B: int, depth: int
) -> tuple[Any, ...]:
    """(starts, records) of the steps of each strip of 128 columns of y.

    starts (strips + 1,) : where those of each begin
    records (steps, numbers) : of squares of 64 rows and columns of w the block in each cell, above
        how many of its features there are, in INSIDE_BITS, or 0; then the first feature. Squares
        below each other follow each other.
    """
    walk, along = index.rows if transposed else index.columns, SQUARE // B
    lines = walk.indptr.size - 1
    line, other = np.repeat(np.arange(lines), np.diff(walk.indptr)), walk.indices
    tiles, of_strip = tiles_of(index, transposed, B, depth)
    steps, step = np.unique(tiles, return_inverse=True)
    records = np.zeros((steps.size, record_of(B, depth)), np.int32)
    (row, down), (column, across) = (other, depth), (line, COLUMNS)
    if transposed:
        (row, down), (column, across) = (line, COLUMNS), (other, depth)
    cell = column % (across // B) // along * (down // B) + row % (down // B)
    cell = cell * along + column % along
    records[step, cell] = walk.blocks << INSIDE_BITS | np.clip(features - other * B, 0, B)
    records[:, -4] = steps % of_strip * depth
    starts = np.searchsorted(steps, np.arange(-(-lines * B // COLUMNS) + 1) * of_strip)
    return starts.astype(np.int32), records.reshape(-1)


def least_kept(product: str, block_size: int, dtype: Any, batch: int) -> float:
    """The part of `WORTH`; more than all where there is none.

    >>> least_kept("forward", 8, "float16", 512), least_kept("input_grad", 8, "bfloat16", 511)
    (0.18, 0.22)
    >>> least_kept("forward", 8, "float16", 47), least_kept("forward", 8, "float32", 512)
    (inf, inf)
    """
    if block_size in WORTH and product != "weight_grad" and dtype != FLOAT32:
        for rows, kept in WORTH[block_size]:
            if batch >= rows:
                return kept
    return float("inf")


def suits(product: str, block_size: int, dtype: Any, batch: int, index: Index) -> bool:
    """Whether so much of the tiles is kept that this is faster than strips."""
    least = least_kept(product, block_size, dtype, batch)
    if least > 1 or index.block_rows.size == 0:
        return False
    key = product == "input_grad", block_size
    known = index.plans.get((kept_of_tiles, key))  # `planned` asks which stream is current
    (kept,) = known or planned(index, kept_of_tiles, *key)
    return bool(kept >= least)


def kept_of_tiles(index: Index, transposed: bool, B: int) -> tuple[float]:
    """Which part of the blocks of tiles is kept, of those tiles that keep any."""
    tiles = tiles_of(index, transposed, B, SQUARE)[0]
    there = np.bincount(tiles, minlength=1)
    return (tiles.size * B**2 / (np.count_nonzero(there) * SQUARE * COLUMNS),)


def tiles_of(index: Index, transposed: bool, B: int, depth: int) -> tuple[np.ndarray, int]:
    """In which tile each block is, in the order of the walk over lines of y; tiles of a strip."""
    walk, others = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    line = np.repeat(np.arange(walk.indptr.size - 1), np.diff(walk.indptr))
    of_strip = -(-(others.indptr.size - 1) * B // depth)
    return line // (COLUMNS // B) * of_strip + walk.indices // (depth // B), of_strip
