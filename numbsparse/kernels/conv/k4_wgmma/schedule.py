"""Which block of threads computes which line of which tile, worked out once for every layout."""

from __future__ import annotations

from heapq import heapreplace
from typing import Any

import numpy as np

from numbsparse.kernels.conv.k2_tensor_core.tiles import line_units
from numbsparse.kernels.conv.window import Pass, Three
from numbsparse.layout import Index

START = 4  # what a line of a tile costs beside its taps, in taps


def line_items(
    index: Index,
    n_taps: int,
    product: str,
    of: Pass,
    box: Three,
    chunks: Any,
    tiles: int,
    places: int,
    parts: int,
) -> tuple[np.ndarray, ...]:
    """(*line_units, items (n, 2), item_ptr (blocks + 1)): each item is (tile, line).

    Blocks of threads run side by side, one in each of the places. Tiles change slowly, so that all
    lines of one, on many multiprocessors, find its pixels in the L2 cache and write whole rows of
    y there; each item goes to the block that is free first.
    """
    units = line_units(index, n_taps, product, of, box, chunks, parts)
    unit_ptr, entry_ptr = units[0], units[4]
    taps = np.diff(entry_ptr[unit_ptr])
    lines = np.argsort(-taps, kind="stable").tolist()
    own: list[list[tuple[int, int]]] = [[] for _ in range(min(places, tiles * len(lines)))]
    free = [(0, block) for block in range(len(own))]
    for tile in range(tiles):
        for line in lines:
            time, block = free[0]
            own[block].append((tile, line))
            heapreplace(free, (time + int(taps[line]) + START, block))
    items = np.array([item for of_block in own for item in of_block], np.int32)
    item_ptr = np.cumsum([0, *map(len, own)], dtype=np.int32)
    return *units, items, item_ptr
