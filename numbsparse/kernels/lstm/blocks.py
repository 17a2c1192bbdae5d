"""A recurrent weight of other blocks, as the kernels take it: of 32 x 32, copied from step to step.

Small blocks that fall into one of 32 x 32 are put together, with zeros where none is kept; larger
ones are cut. Forward, the columns of a line are gate by gate, as its sums are; backward they are in
the order of memory, as the gates' gradient is.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.lstm.deal import B
from numbsparse.layout import Index, Layout


def joined(index: Index, size: int, by_gate: bool) -> tuple[Layout, np.ndarray]:
    """The layout of 32 x 32 blocks, and where each of their parts begins among the values, or -1.

    A part is as much as a block of `size` gives to one of 32: (blocks, parts down * parts across).
    """
    rows, columns = index.rows.indptr.size - 1, index.columns.indptr.size - 1
    first = index.block_columns % GATES == 0
    top, left = index.block_rows[first] * size // B, index.block_columns[first] // GATES * size // B
    pattern = np.zeros((-(-rows * size // B), -(-columns // GATES * size // B)), bool)
    for i in range(-(-size // B)):
        for j in range(-(-size // B)):
            pattern[top + i, left + j] = True
    layout = Layout(np.repeat(pattern, GATES, axis=1))
    own, across = (
        a.astype(np.int64) for a in (layout.index.block_rows, layout.index.block_columns)
    )
    parts = np.arange(0, B, min(size, B))
    row, column = own[:, None] * B + parts, across[:, None] * B + parts
    if by_gate:
        unit = across[:, None] // GATES * B + parts
        column = unit + (unit // size * (GATES - 1) + across[:, None] % GATES) * size
    row, column = row[:, :, None], column[:, None, :]
    names = index.block_rows.astype(np.int64) * columns + index.block_columns
    wanted = row // size * columns + column // size
    found = np.minimum(np.searchsorted(names, wanted), names.size - 1)
    there = (names[found] == wanted) & (column < columns * size)
    at = found * size**2 + row % size * size + column % size
    return layout, np.where(there, at, -1).reshape(len(own), -1)


def as_blocks(values: DeviceArray, parts: DeviceArray) -> DeviceArray:
    """(blocks, 32, 32) of values (n, size, size), by the parts of `joined`."""
    out, size = empty((parts.shape[0], B, B), values.dtype), values.shape[1]
    words, parts_of_all = (a.span.view("uint32") for a in (values, out)), parts.span
    launch(
        copying_kernel(size, 4 // values.itemsize),
        blocks(out.nbytes // 4),
        THREADS,
        *words,
        parts_of_all,
    )
    return out


@cache
def copying_kernel(size: int, ITEMS: int) -> Any:
    """Of so many items a word."""
    SIDE, ACROSS, WORDS, LINE = min(size, B), B // min(size, B), B // ITEMS, size // ITEMS

    @cuda.jit
    def kernel(values, out, parts):
        i = int64(cuda.grid(1))
        if i < out.size:
            block, row, word = i // (B * WORDS), i // WORDS % B, i % WORDS
            part = (block * ACROSS + row // SIDE) * ACROSS + word // (SIDE // ITEMS)
            at = parts[part]
            own = at // ITEMS + row % SIDE * LINE + word % (SIDE // ITEMS)
            out[i] = values[own] if at >= 0 else uint32(0)

    return kernel
