"""What a block of threads computes of a weight-gradient: worked out once for every layout.

Kept blocks that share tiles of x and dy make an item, of a block of threads or a cluster; how they
are chosen say `weight_grad_shares`, for 16-bit values, and `weight_grad_items`, for float32. The
GPU runs items as places get free, in the order of the plan: largest first, and at the end those
that do not fill all places once more, cut over the batch. Only these leave sums to be added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from numbsparse.kernels.parts.deal import dealt

RUNS = (1, 2, 4)  # panels that one copy may bring
MAPS = 1 + len(RUNS)  # tensor maps of an operand: of each run, and of the panel at its edge
OPERANDS = 2
ROOMS = 2  # steps of images of float32 that there is room for
TO_START = 4.0  # microseconds until a block of threads multiplies, and while it writes
TO_ADD = 16.0  # for a launch that adds what was cut

Edges = tuple[tuple[int, bool], ...]  # of x and dy: whole panels, and whether a part of one follows
Tables = tuple[np.ndarray, ...]  # heads, loads, places, outs


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
    ITEM: int = 2  # bytes of a value
    STRIPS: int = 0  # of dy, of float32: an item has so many at most

    @property
    def PANEL(self) -> int:
        """Features of a panel, the box of one copy."""
        return 32 if self.ITEM == 4 else min(self.B, 64)

    @property
    def PANEL_BYTES(self) -> int:
        return self.ITEM * self.PANEL * self.DEPTH

    @property
    def N(self) -> int:
        """Columns of the largest product."""
        return max(self.SIZES)

    @property
    def PAIR(self) -> int:
        """Kept blocks that the 64 rows of a product make."""
        return max(64 // self.B, 1)

    @property
    def OUTS(self) -> int:
        """Kept blocks that a warpgroup computes or has a part in; of float32 parts of 32 x 32."""
        if self.ITEM == 4:
            return self.UNITS * 2 * self.N // self.PANEL
        return self.PAIR * self.UNITS * self.N // self.B

    @property
    def MOST(self) -> int:
        """Kept blocks that a block of threads computes at once."""
        return self.GROUPS * self.OUTS

    @property
    def X_PANELS(self) -> int:
        """Of an item of float32: two for each product."""
        return 2 * self.UNITS * self.GROUPS

    @property
    def PART(self) -> int:
        """Rows and columns of what one of `outs` names."""
        return 32 if self.ITEM == 4 else self.B

    @property
    def THREADS(self) -> int:
        return 128 * self.GROUPS + 32 * self.LOADERS

    @property
    def IMAGE(self) -> int:
        """Bytes of the image of a strip of float32: hi and lo."""
        return 2 * 4 * self.DEPTH * self.N

    @property
    def SHARED_BYTES(self) -> int:
        if self.ITEM == 4:
            return 1024 * 225
        return 1024 + self.STAGES * self.SLOTS * self.PANEL_BYTES


def last_end(times: Iterable[float], places: int) -> float:
    """When the last one ends, if each begins in turn, where a place gets free first."""
    return dealt(times, places)[1]


def cut(
    times: list[float], sums: int, places: int, steps: int, least: float, rate: float
) -> tuple[float, int, int]:
    """(end, items that stay whole, pieces of each other one): what ends first on so many places.

    times : microseconds of a step of each item, longest first
    sums : that the items leave which do not fill all places once more
    least : microseconds that the copies take, however items are cut
    rate : sums of a microsecond, to memory and back
    """
    whole = len(times) // places * places
    of_all = [time * steps for time in times]
    best = (float("inf"), 0, 1)
    for pieces in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32):
        if pieces > max(steps // 4, 1):
            break
        parts = of_all[:whole] + [time / pieces for time in of_all[whole:]] * pieces
        end = max(least, last_end([time + TO_START for time in parts], places))
        if pieces > 1:
            end += TO_ADD + sums * pieces / rate
        best = min(best, (end, whole, pieces))
    return best


def cut_up(
    tables: Tables, whole: int, pieces: int, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """(heads, loads, places, outs, what was cut, pieces): the tables of what each block does.

    tables : of each block of threads, if nothing is cut
        heads : copies, panels that arrive, and what else the kernel wants to know
        loads (., 2) : see `coded`
        places (GROUPS, .) : where the factors of a warpgroup's products lie
        outs (GROUPS, OUTS) : what they make, or -1
    heads then have before these the first step and the steps, and after two of them whether sums
    are left: then outs are places among the sums of `what was cut`, piece after piece.
    """
    heads, loads, places, outs = tables
    whole, pieces = (whole, pieces) if pieces > 1 else (len(heads), 0)
    rest = np.arange(whole, len(heads))
    of = np.concatenate([np.arange(whole), np.tile(rest, pieces)])
    piece = np.repeat(np.arange(pieces), rest.size)
    first, last = piece * steps // max(pieces, 1), (piece + 1) * steps // max(pieces, 1)
    span = np.zeros((of.size, 3), np.int32)  # first step, steps, whether sums are left
    span[:, 1] = steps
    span[whole:] = np.stack([first, last - first, np.ones_like(first)], 1)
    kept, outs = np.unique(outs[rest][outs[rest] >= 0]), outs[of]
    tail = outs[whole:]
    base = (piece * kept.size)[:, None, None]
    outs[whole:] = np.where(tail >= 0, base + np.searchsorted(kept, tail), -1)
    heads = np.column_stack([span[:, :2], heads[of, :2], span[:, 2], heads[of, 2:]])
    return heads, loads[of], places[of], outs, kept.astype(np.int32), pieces
