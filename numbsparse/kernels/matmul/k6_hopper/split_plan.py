"""How forward and input_grad of float32 are cut, and what a block of threads does step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numbsparse.device import SIMULATED
from numbsparse.kernels.matmul.k6_hopper.steps import READ_AHEAD, Lengths, grouped
from numbsparse.layout import Index

DEPTH = 32  # terms of a sum in a step: 128 bytes of a row of x
BOX = 32  # rows in a line of a tile of x that lies feature by feature
ALIGNED = 256  # items: where tiles begin in shared memory
SHARED = 224 * 256  # items of shared memory for the stages


class Tile(NamedTuple):
    """A block of threads computes ROWS rows of y, in COLUMNS strips of N columns at once.

    A step brings into one stage of the ring a tile of x, ROWS x DEPTH, and an image of a part of a
    block for each strip that has one there.
    """

    B: int
    WARPGROUPS: int  # that multiply, 64 rows each

    @property
    def N(self) -> int:
        return min(self.B, 64)

    @property
    def COLUMNS(self) -> int:
        return 64 // self.N

    @property
    def PARTS(self) -> int:
        """Of a block along the sum."""
        return self.B // DEPTH

    @property
    def ACROSS(self) -> int:
        """Parts of a block across."""
        return self.B // self.N

    @property
    def ROWS(self) -> int:
        return 64 * self.WARPGROUPS

    @property
    def X_SIZE(self) -> int:
        return self.ROWS * DEPTH

    @property
    def IMAGE(self) -> int:
        """Items of an image: hi and lo."""
        return 2 * DEPTH * self.N

    @property
    def STAGE(self) -> int:
        return self.X_SIZE + self.COLUMNS * self.IMAGE

    @property
    def STAGES(self) -> int:
        return 2 if SIMULATED else SHARED // self.STAGE

    @property
    def WARPS(self) -> int:
        """That multiply; after them comes the one that fetches."""
        return 4 * self.WARPGROUPS

    @property
    def THREADS(self) -> int:
        return 32 * self.WARPS + (32 if SIMULATED else 128)

    @property
    def REGISTERS(self) -> tuple[int, int]:
        """Of a lane that multiplies, and of one that fetches.

        Five warpgroups begin with 96 each, three with 168: should all together want more, some
        would wait for ever.
        """
        return (112, 32) if self.WARPGROUPS == 4 else (200, 32)

    @property
    def RECORD(self) -> int:
        """Numbers that tell of a step: the tile of x, and an image for each strip."""
        return 1 + self.COLUMNS


def tile_of(size: int, batch: int, features: int, units: int) -> Tile:
    """With fewer rows where there would not be a tile for each unit."""
    if SIMULATED:
        return Tile(size, 1)
    tile = Tile(size, 4)
    enough = -(-batch // tile.ROWS) * -(-features // 64) >= units
    return tile if enough else Tile(size, 2)


def steps_of(index: Index, turned: bool, tile: Tile) -> tuple[Any, ...]:
    """(records, features, lengths) of the groups of strips of the output.

    features (groups, COLUMNS) : the first feature of each strip, -1 for none
    records (steps + READ_AHEAD, RECORD) : of each step the number of the tile of x, and of the
        images, -1 for none. A group without blocks has a step without images.
    """
    walk, others = (index.rows, index.columns) if turned else (index.columns, index.rows)
    n_inputs, n_lines = len(others.indptr) - 1, len(walk.indptr) - 1
    lines = grouped(walk, n_inputs, tile.COLUMNS)
    place = np.empty(n_lines, np.int64)
    place[lines[lines >= 0]] = np.flatnonzero(lines.reshape(-1) >= 0)
    group, column = np.divmod(np.repeat(place, np.diff(walk.indptr)), tile.COLUMNS)
    absent = np.setdiff1d(np.arange(len(lines)), group)
    met, at = np.unique(
        np.concatenate([group * n_inputs + walk.indices, absent * n_inputs]), return_inverse=True
    )
    kept = np.full((met.size, tile.COLUMNS), -1, np.int64)
    kept[at[: group.size], column] = walk.blocks
    starts = np.searchsorted(met // n_inputs, np.arange(len(lines) + 1))

    # Of each part of a block across in turn; within it each part along the sum.
    part, count = np.arange(tile.PARTS), met.size * tile.PARTS
    records = np.zeros((tile.ACROSS * count + READ_AHEAD, tile.RECORD), np.int32)
    for across in range(tile.ACROSS):
        own = records[across * count : (across + 1) * count].reshape(met.size, tile.PARTS, -1)
        own[..., 0] = (met % n_inputs)[:, None] * tile.PARTS + part
        images = (kept[:, None] * tile.ACROSS + across) * tile.PARTS + part[:, None]
        own[..., 1:] = np.where(kept[:, None] >= 0, images, -1)
    first = np.where(lines >= 0, lines * np.int64(tile.B), -1)
    features = np.concatenate(
        [np.where(first >= 0, first + a * tile.N, -1) for a in range(tile.ACROSS)]
    )
    of_all = [a * count + starts[:-1] * tile.PARTS for a in range(tile.ACROSS)]
    steps = np.concatenate([*of_all, [tile.ACROSS * count]])
    return records, features.astype(np.int32), Lengths(steps)
