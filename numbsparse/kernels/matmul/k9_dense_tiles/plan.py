"""What each block of threads multiplies, step by step, and where tiles take less time than strips.

A tile of w is 64 or 128 features by 64 or 128 columns of y. A step has one, and says in a record
which blocks are kept in it and where; a tile that keeps none has no step.
"""

from functools import lru_cache
from itertools import product as every
from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.card import shared_memory
from numbsparse.kernels.parts.pieces import part_bytes, parts_at
from numbsparse.kernels.parts.plans import planned_numbers
from numbsparse.kernels.parts.stored_blocks import INSIDE_BITS
from numbsparse.kernels.parts.swizzle import PERIOD
from numbsparse.layout import Index

SQUARE, COLUMNS = 64, (128, 64)  # of w, whose rows have 128 bytes; of y
FLOAT32 = np.dtype("float32")  # compared with in a quarter of the time that its name takes
MOST_STAGES = 3 if SIMULATED else 8
ROOM = {1: float("inf"), 2: 1.0, 4: 0.76}  # of the multiprocessors, for clusters of that size
# Microseconds, fitted to an H200: of 64 features, by the columns of a tile and its rows in 64s, and
# more for each of these; of a tile beside them, and its rows in 64s; and for each where two or four
# blocks share its sum. Tiles of 64 columns take fewer rows less time: of 64 and 256 rows 0.64 to
# 0.84 of what those of 128 took, with 256 to 1,024 features and a quarter of the blocks.
OF_STEP = {128: (0.19, 0.19, 0.24, 0.24), 64: (0.11, 0.11, 0.15, 0.15)}
OF_ROWS = {128: 0.114, 64: 0.075}
OF_TILE, OF_HEIGHT, OF_SUMS = 4.0, 0.1, {1: 0.0, 2: 0.45, 4: 1.1}
# By block size, of so many rows the part that is kept of tiles from which on this takes less time
# than strips do (H200, float16).
WORTH = {8: ((512, 0.18), (192, 0.22), (48, 0.3)), 16: ((192, 0.34), (48, 0.45))}
# The same of blocks of 16 where neither side has more features, from so many rows on: 768 to 4,096
# rows of a quarter took 0.82 to 1.02 of the time that strips do, of 2,048 features 0.91 to 1.25.
SMALL_SIDE, SMALL_FROM, SMALL_WORTH = 1024, 768, 0.24


class Tile(NamedTuple):
    """What a kernel is made for."""

    B: int
    kind: str  # "f16" or "bf16"
    WARPGROUPS: int  # of 64 rows each
    SPLIT: int  # blocks of threads of a cluster that have a part of the sum each
    DEPTH: int  # features of a step, 64 or 128
    COLUMNS: int  # of y, 64 or 128
    transposed: bool  # y = x @ w.T
    x_transposed: bool  # x is feature-major
    order: str  # of y, see `parts.store`
    FREE: bool = False  # whether parts of a sum meet in stages that are not filled

    @property
    def ROWS(self) -> int:
        return SQUARE * self.WARPGROUPS

    @property
    def FETCHERS(self) -> int:
        """Warps that copy w. Each waits for itself most of the time: of up to 128 rows eight took
        0.87 to 1.0 of the time that four did (H200)."""
        return 8 if self.WARPGROUPS <= 2 and self.DEPTH == 2 * SQUARE else 4

    @property
    def COUNT(self) -> int:
        """Sums of a thread."""
        return self.COLUMNS // 2

    @property
    def W_START(self) -> int:
        return 2 * self.DEPTH * self.ROWS

    @property
    def W_BYTES(self) -> int:
        return 2 * self.DEPTH * self.COLUMNS

    @property
    def STAGE_BYTES(self) -> int:
        return self.W_START + self.W_BYTES

    @property
    def RECORD(self) -> int:
        return record_of(self.B, self.DEPTH, self.COLUMNS)

    @property
    def STAGES(self) -> int:
        """Of the ring; with two records for each."""
        limit = (shared_memory() or 228 * 1024) - PERIOD - 1024
        return min(limit // (self.STAGE_BYTES + 8 * self.RECORD), MOST_STAGES)

    @property
    def PART_BYTES(self) -> int:
        """Of the parts of a slice of a sum that is split."""
        return part_bytes(4 * self.WARPGROUPS, self.COUNT) if self.SPLIT > 1 else 0

    @property
    def PARTS_AT(self) -> int:
        """Where in the ring these are: in its last stages, or where it was."""
        return parts_at(self.STAGES, self.STAGE_BYTES, self.PART_BYTES) if self.FREE else 0

    @property
    def SHARED_BYTES(self) -> int:
        return max(self.STAGES * (self.STAGE_BYTES + 8 * self.RECORD), self.PART_BYTES) + PERIOD


def record_of(B: int, depth: int, columns: int) -> int:
    """Numbers of a step: a code for each block of a tile of w, its first feature, and zeros."""
    return columns * depth // B**2 + 4


def depth_of(warpgroups: int) -> int:
    """Features of a step: with many rows the ring has no room for more.

    With 64 two of 64 rows took 1.06 times as long in blocks of 8 (8,192 features, 128 rows), one up
    to 1.15 times in blocks of 16 (H200).
    """
    return 2 * SQUARE if warpgroups <= 2 else SQUARE


@lru_cache(1024)
def shape_of(batch: int, features: int, steps: float, units: int) -> tuple[int, int, int]:
    """(warpgroups of a tile, blocks of threads that share its sum, columns), for the least time
    that so many features of y take."""

    def cost(warpgroups: int, split: int, columns: int) -> float:
        blocks = -(-features // columns) * -(-batch // (SQUARE * warpgroups)) * split
        if blocks > units * ROOM[split] or (split, columns) == (4, SQUARE):
            return float("inf")
        of_step = OF_STEP[columns][warpgroups - 1] + OF_ROWS[columns] * warpgroups
        of_tile = steps / split * of_step + OF_TILE + OF_HEIGHT * warpgroups
        return -(-blocks // units) * of_tile + OF_SUMS[split] * warpgroups

    return min(every((1, 2, 3, 4), ROOM, COLUMNS), key=lambda shape: cost(*shape))


def plan_tiles(
    index: Index, transposed: bool, features: int, B: int, depth: int, across: int
) -> tuple[Any, ...]:
    """(starts, records, most) of the steps of each strip of so many columns of y.

    starts (strips + 1,) : where those of each begin
    records (steps, numbers) : of squares of 64 rows and columns of w the block in each cell, above
        how many of its features there are, in INSIDE_BITS, or 0; then the first feature. Squares
        below each other follow each other.
    most : steps of a strip
    """
    walk, along = index.rows if transposed else index.columns, SQUARE // B
    lines = walk.indptr.size - 1
    line, other = np.repeat(np.arange(lines), np.diff(walk.indptr)), walk.indices
    tiles, of_strip = tiles_of(index, transposed, B, depth, across)
    steps, step = np.unique(tiles, return_inverse=True)
    records = np.zeros((steps.size, record_of(B, depth, across)), np.int32)
    (row, down), (column, wide) = (other, depth), (line, across)
    if transposed:
        (row, down), (column, wide) = (line, across), (other, depth)
    cell = column % (wide // B) // along * (down // B) + row % (down // B)
    cell = cell * along + column % along
    records[step, cell] = walk.blocks << INSIDE_BITS | np.clip(features - other * B, 0, B)
    records[:, -4] = steps % of_strip * depth
    starts = np.searchsorted(steps, np.arange(-(-lines * B // across) + 1) * of_strip)
    return starts.astype(np.int32), records.reshape(-1), int(np.diff(starts).max(initial=0))


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


def suits(
    product: str, block_size: int, dtype: Any, batch: int, index: Index, part: float = 1.0
) -> bool:
    """Whether so much of the tiles is kept, times `part`, that this is faster than strips."""
    least = least_kept(product, block_size, dtype, batch)
    if least > 1 or index.block_rows.size == 0:
        return False
    side = block_size * (max(index.rows.indptr.size, index.columns.indptr.size) - 1)
    if block_size == 16 and side <= SMALL_SIDE and batch >= SMALL_FROM:
        least = SMALL_WORTH
    (kept,) = planned_numbers(index, kept_of_tiles, product == "input_grad", block_size)
    return bool(kept * part >= least)


def kept_of_tiles(
    index: Index, transposed: bool, B: int, columns: int = COLUMNS[0]
) -> tuple[float]:
    """Which part of the blocks of tiles is kept, of those tiles that keep any."""
    tiles = tiles_of(index, transposed, B, SQUARE, columns)[0]
    there = np.bincount(tiles, minlength=1)
    return (tiles.size * B**2 / (np.count_nonzero(there) * SQUARE * columns),)


def tiles_of(
    index: Index, transposed: bool, B: int, depth: int, across: int
) -> tuple[np.ndarray, int]:
    """In which tile each block is, in the order of the walk over lines of y; tiles of a strip."""
    walk, others = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    line = np.repeat(np.arange(walk.indptr.size - 1), np.diff(walk.indptr))
    of_strip = -(-(others.indptr.size - 1) * B // depth)
    return line // (across // B) * of_strip + walk.indices // (depth // B), of_strip
