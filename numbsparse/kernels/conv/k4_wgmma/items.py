"""What a block of threads sums in the weight-gradient: pairs of blocks of features, tap by tap.

A product has 64 rows: the features of one tap, of two, or of four, whose shifts in the box are at
equal distances. So many of them are a unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numbsparse.kernels.conv.k2_tensor_core.tiles import block_items
from numbsparse.kernels.conv.k4_wgmma.tiles import PIXELS
from numbsparse.kernels.conv.window import Pass, Three
from numbsparse.layout import Index

NONE = -1


def tap_items(
    index: Index, n_taps: int, of: Pass, box: Three, chunks: Any, B: int, parts: int, most: int
) -> tuple[np.ndarray, ...]:
    """(items (n, 3), unit_ptr (n + 1), unit_where, unit_blocks, origins (chunks, 3)), int32.

    An item is (row, column, chunk), and has at most `most` units, of PIXELS // B blocks each.
    A unit is the shift of its first tap in lines of the box, and 2^16 times the distance of its
    taps; NONE is no kept block.
    """
    *pairs, order, entry_ptr, entry_block, entry_shift, origins = block_items(
        index, n_taps, of, box, chunks, parts
    )
    items, where, blocks, counts = [], [], [], []
    for item in order:
        span = slice(entry_ptr[item], entry_ptr[item + 1])
        units = units_of(entry_shift[span].tolist(), entry_block[span].tolist(), PIXELS // B)
        for first in range(0, len(units), most):
            few = units[first : first + most]
            items.append([int(a[item]) for a in pairs])
            counts.append(len(few))
            where += [start | apart << 16 for start, apart, _ in few]
            blocks += [kept for _, _, kept in few]
    unit_ptr = np.append(0, np.cumsum(counts, dtype=np.int64))
    found = (
        np.reshape(items, (-1, 3)),
        unit_ptr,
        np.array(where),
        np.ravel(blocks),
    )
    return *(a.astype(np.int32) for a in found), origins


def units_of(
    shifts: list[int], blocks: list[int], together: int
) -> list[tuple[int, int, list[int]]]:
    """(first shift, distance, kept blocks) of each: the most taps at one distance come first."""
    left, units = dict(zip(shifts, blocks, strict=True)), []
    while left:
        first = min(left)
        apart = max(
            sorted({s - first for s in left} - {0}) or [0],
            key=lambda d: sum(first + k * d in left for k in range(together)),
        )
        taps = [first + k * apart for k in range(together if apart else 1)]
        kept = [left.pop(s, NONE) for s in taps]
        units.append((first, apart, kept + [NONE] * (together - len(kept))))
    return units
