"""How the lines of a product walk the taps and the blocks: worked out once per layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numbsparse.kernels.conv.window import Pass, Window
from numbsparse.kernels.matmul import plans
from numbsparse.layout import Index


class Entries(NamedTuple):
    """Every kept block seen from its outputs: line, tap, other block, stored block; by line."""

    line: np.ndarray
    tap: np.ndarray
    other: np.ndarray
    block: np.ndarray
    lines: int

    def of(self, taps: tuple[int, ...]) -> Entries:
        """Those of some taps, which then count by their place among these."""
        number = np.full(max((*taps, *self.tap.tolist()), default=0) + 1, -1)
        number[list(taps)] = np.arange(len(taps))
        kept = number[self.tap] >= 0
        return Entries(
            self.line[kept], number[self.tap[kept]], self.other[kept], self.block[kept], self.lines
        )

    def indptr(self) -> np.ndarray:
        return np.searchsorted(self.line, np.arange(self.lines + 1))


def entries(index: Index, n_taps: int, product: str, parts: int = 1) -> Entries:
    """Of a product's lines: out-blocks for forward, in-blocks for input_grad; sorted by other, tap.

    `index` is one of NumPy arrays, with block rows (tap, in_block). With `parts` each block stands
    for parts x parts smaller ones, whose numbers are (block * parts + row) * parts + column.
    """
    in_blocks = (index.rows.indptr.size - 1) // n_taps
    tap, row = np.divmod(index.block_rows, in_blocks)
    block, down, across = np.indices((tap.size, parts, parts)).reshape(3, -1)
    tap, row = tap[block], row[block] * parts + down
    column, block = index.block_columns[block] * parts + across, np.arange(block.size)
    line, other = (row, column) if product == "input_grad" else (column, row)
    order = np.lexsort((tap, other, line))
    lines = in_blocks if product == "input_grad" else index.columns.indptr.size - 1
    return Entries(line[order], tap[order], other[order], block[order], lines * parts)


def line_walk(index: Index, n_taps: int, product: str, of: Pass) -> tuple[Any, ...]:
    """(indptr, taps, others, blocks, offsets), int32: the entries of each line, and each tap's
    offsets (taps, 3)."""
    found = entries(index, n_taps, product).of(of.taps)
    offsets = np.array(of.offsets, np.int32).reshape(-1, 3)
    arrays = (found.indptr(), found.tap, found.other, found.block, offsets)
    return tuple(array.astype(np.int32) for array in arrays)


def planned(index: Index, window: Window, make: Callable[..., tuple[Any, ...]], *key: Any) -> Any:
    """make(index, taps, *key) where the index is: once per layout and key, and as long as it."""
    return plans.planned(index, make, window.taps, *key)
