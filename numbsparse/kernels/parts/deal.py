"""Who computes what: pieces of work dealt to places that run side by side, worked out on the host.

Pieces come in an order, the longest first where that is free to choose, and each goes to the place
that is free first.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapreplace

import numpy as np

from numbsparse.layout import Index

TILE_STEPS = 3  # what a tile costs beside its steps


def dealt(costs: Iterable[float], places: int) -> tuple[np.ndarray, float]:
    """(the place of each piece, when the last place ends)."""
    free = [(0.0, place) for place in range(places)]
    owners = []
    for cost in costs:
        time, place = free[0]
        owners.append(place)
        heapreplace(free, (time + cost, place))
    return np.array(owners, np.int64), max(free)[0]


def in_turn(owners: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """(pieces place by place, each place's in their order; where each place begins)."""
    order = np.argsort(owners, kind="stable")
    return order, np.searchsorted(owners[order], np.arange(places + 1)).astype(np.int32)


class Lengths:
    """Where the steps of each group begin; the same object for every launch with a layout."""

    def __init__(self, starts: np.ndarray):
        self.starts, self.steps = starts[:-1], np.diff(starts)


def schedule(
    index: Index, lengths: Lengths, row_tiles: int, units: int, together: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """(tiles, starts): what each unit computes in turn, (group, tile of rows, first step, end).

    A unit is a block of threads or a cluster, and all run at once. Rows change slowly, so that
    their x stays in the L2 cache; within them the longest group comes first. Tiles of `together`
    neighbouring rows follow one another, so that blocks of w stay there too.
    """
    groups = np.argsort(-lengths.steps, kind="stable").tolist()
    tiles = np.array(
        [
            (group, rows)
            for top in range(0, row_tiles, together)
            for group in groups
            for rows in range(top, min(top + together, row_tiles))
        ]
    )
    steps, places = lengths.steps[tiles[:, 0]], min(units, len(tiles))
    owners, _ = dealt((steps + TILE_STEPS).tolist(), places)
    first = lengths.starts[tiles[:, 0]]
    order, starts = in_turn(owners, places)
    return np.column_stack([tiles, first, first + steps])[order].astype(np.int32), starts
