"""What one cluster of blocks of threads computes together: kept blocks that share tiles.

A tile is read from L2 once for the whole cluster, so an item should have many kept blocks on few
lines: pieces of a block row (`rows_of_blocks`), pairs of block rows (`pairs_of_rows`), block rows
and columns with many kept blocks where they cross (`regions`), or four block columns that keep the
same rows (`fours`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heapreplace
from typing import NamedTuple

import numpy as np

from numbsparse.layout import Index


class Tile(NamedTuple):
    """How the work of a block of threads is cut: GROUPS warpgroups of UNITS products each."""

    B: int
    GROUPS: int
    UNITS: int
    SIZES: tuple[int, ...]  # columns of a product
    DEPTH: int  # rows of the batch in a step
    STAGES: int
    SLOTS: int  # panels in a stage
    CLUSTER: int
    LOADERS: int = 4  # warps that ask for copies
    RESIDENT: int = 1  # blocks of threads on a multiprocessor
    REGISTERS: tuple[int, int] = (0, 0)  # of a thread that asks for copies, and one that multiplies

    @property
    def PANEL(self) -> int:
        """Features of a panel, the box of one copy."""
        return min(self.B, 64)

    @property
    def PANEL_BYTES(self) -> int:
        return 2 * self.PANEL * self.DEPTH

    @property
    def PAIR(self) -> int:
        """Kept blocks that the 64 rows of a product make."""
        return max(64 // self.B, 1)

    @property
    def OUTS(self) -> int:
        """Kept blocks that a warpgroup computes or has a part in."""
        return self.PAIR * self.UNITS * max(self.SIZES) // self.B

    @property
    def MOST(self) -> int:
        """Kept blocks that a block of threads computes at once."""
        return self.GROUPS * self.OUTS


RUNS = (1, 2, 4)  # panels that one copy may bring
MAPS = 1 + len(RUNS)  # tensor maps of an operand: of each run, and of the panel at its edge
OPERANDS = 2


class Share(NamedTuple):
    """What one block of threads of a cluster does in an item."""

    x_loads: list[tuple[int, int]]  # (panel of the matrix, slot | ranks << 16)
    dy_loads: list[tuple[int, int]]
    arriving: int  # panels, from here and from the others
    counts: np.ndarray  # (GROUPS,) products of a warpgroup, or the number of its size
    where: np.ndarray  # (GROUPS, 2 UNITS) their factors lie; see `ptx.wgmma_units`
    outs: np.ndarray  # (GROUPS, OUTS) kept blocks, -1 where there is none

    @property
    def blocks(self) -> int:
        return np.unique(self.outs[self.outs >= 0]).size

    def copies(self, edges: tuple[tuple[int, bool], ...]) -> list[tuple[int, int]]:
        """What to ask for: (panel, slot | map << 8 | ranks << 16), neighbours in one copy.

        `edges` says of x and dy how many panels are whole, and whether a part of one follows.
        """
        found = []
        for operand, loads in enumerate((self.x_loads, self.dy_loads)):
            (whole, part), k = edges[operand], 0
            while k < len(loads):
                panel, code = loads[k]
                run, which = 1, MAPS * operand
                if panel == whole and part:
                    panel, which = 0, which + len(RUNS)
                else:
                    ahead = loads[k : k + max(RUNS)]
                    same = [(p - k, c - k) for k, (p, c) in enumerate(ahead) if p < whole]
                    run = max(n for n in RUNS if n == 1 or same[:n] == [(panel, code)] * n)
                    which += RUNS.index(run)
                found.append((panel, code | which << 8))
                k += run
        return found


# Microseconds as measured on an H200; only their ratios decide.


def copying(panels: int, tile: Tile) -> float:
    """Until the panels of a step are in one multiprocessor, and the next step begins."""
    start, row = (0.3, 0.55e-3) if tile.B == 32 else (0.25, 0.6e-3)
    return start + panels * tile.DEPTH * row


def from_l2(panels: int, tile: Tile) -> float:
    """Until the L2 cache has given the panels of a step to all multiprocessors."""
    return panels * tile.PANEL_BYTES / 8.5e6


def last_end(times: Iterable[float], places: int) -> float:
    """When the last one ends, if each begins in turn, where a place gets free first."""
    ends = [0.0] * places
    for time in times:
        heapreplace(ends, ends[0] + time)
    return max(ends)


def rows_of_blocks(index: Index, tile: Tile) -> Iterator[list[Share]]:
    """Even pieces of the block rows, so that all of an item takes the same tile of x."""
    indptr, columns, _ = index.rows
    for row in np.flatnonzero(np.diff(indptr)):
        yield from pieces_of_row(tile, int(row), columns, np.arange(indptr[row], indptr[row + 1]))


def pieces_of_row(
    tile: Tile, row: int, columns: np.ndarray, blocks: np.ndarray
) -> Iterator[list[Share]]:
    """Items of some kept blocks of a block row."""
    if blocks.size:
        count = -(-blocks.size // (tile.CLUSTER * _blocks_in(tile)))
        for piece in np.array_split(blocks, count):
            yield _piece_of_row(tile, row, columns, piece)


def _blocks_in(tile: Tile) -> int:
    """Kept blocks that one block of threads can compute."""
    panels = tile.B // tile.PANEL
    room = tile.SLOTS // panels - 1  # without x
    outs = tile.OUTS if tile.B == 128 else tile.GROUPS * tile.OUTS
    return min(outs, room)


def _piece_of_row(tile: Tile, row: int, columns: np.ndarray, blocks: np.ndarray) -> list[Share]:
    panels, step = tile.B // tile.PANEL, tile.PANEL_BYTES >> 4
    parts = np.array_split(blocks, tile.CLUSTER)
    busy = [rank for rank, part in enumerate(parts) if part.size]
    mask = sum(1 << rank for rank in busy)
    shares = []
    for rank, part in enumerate(parts):
        x_loads = [
            (row * panels + p, p | mask << 16) for p in range(panels) if busy[p % len(busy)] == rank
        ]
        dy_loads = [
            (int(columns[block]) * panels + p, panels * (1 + k) + p | 1 << rank + 16)
            for k, block in enumerate(part)
            for p in range(panels)
        ]
        counts = np.zeros(tile.GROUPS, np.int32)
        where = np.zeros((tile.GROUPS, 2 * tile.UNITS), np.int32)
        outs = np.full((tile.GROUPS, tile.OUTS), -1, np.int32)
        every = np.arange(part.size)
        dealt = [every] * tile.GROUPS if tile.B == 128 else np.array_split(every, tile.GROUPS)
        for group, own in enumerate(dealt):
            outs[group, : own.size], counts[group] = part[own], own.size
            x_panel = group if tile.B == 128 else 0
            first = panels * (1 + (own[0] if own.size else 0))
            where[group] = np.array([x_panel, first]) * step | step << 16
        arriving = (panels + len(dy_loads)) if part.size else 0
        shares.append(Share(x_loads, dy_loads, arriving, counts, where, outs))
    return shares
