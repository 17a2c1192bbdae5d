"""A recurrent weight of other blocks, as the kernels take it: of 32 x 32, copied from step to step.

Small blocks that fall into one of these are put together, with zeros where none is kept; larger
ones are cut. Of small ones a block's terms of the sum are grains from anywhere, see `gathered`.
Forward, the columns of a line are gate by gate, as its sums are; backward they are in the order of
memory, as the gates' gradient is.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.lstm.deal import B, few_of, gathered
from numbsparse.layout import Index


def parts_of(index: Index, size: int, transposed: bool, itemsize: int) -> tuple[np.ndarray]:
    """Where each part of the blocks of all reads begins among the values, or -1.

    A part is as much as a block of `size` gives to one of 32: (blocks, parts down * parts across).
    """
    few, side = few_of(transposed, itemsize), min(size, B)
    of = gathered(index, transposed, size, itemsize)
    part, line = np.arange(0, B, side), of.lines[:, None, None, None] * B
    items = of.units * (GATES if transposed else 1)  # along the sum, of a grain
    along = of.grains[:, :, None] * items + np.arange(0, items, side)
    there = np.repeat(of.there, items // side, axis=1)
    if transposed:
        row, column = line + part[:, None], along.reshape(-1, few, 1, part.size)
        there = there.reshape(column.shape)
    else:
        unit, gate = line + part, np.arange(GATES)[:, None, None]
        row, column = along.reshape(-1, 1, part.size, 1), unit // size * (GATES - 1) + gate
        column = unit + column * size
        there = there.reshape(row.shape)
    width = index.columns.indptr.size - 1
    names = index.block_rows.astype(np.int64) * width + index.block_columns
    wanted = row // size * width + column // size
    found = np.minimum(np.searchsorted(names, wanted), names.size - 1)
    there = there & (names[found] == wanted) & (column < width * size)
    at = np.where(there, found * size**2 + row % size * size + column % size, -1)
    return (at.reshape(-1, part.size**2),)


def as_blocks(values: DeviceArray, parts: DeviceArray) -> DeviceArray:
    """(blocks, 32, 32) of values (n, size, size), by `parts_of` them."""
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
