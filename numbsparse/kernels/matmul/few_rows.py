"""Products of a few rows on the CPU: the block's columns fill the vectors, not the batch.

The step is that of `k0_cpu`, with the parts exchanged,

    tile[r, v] += a[r] * b[v]      a: a feature of R rows of x,  b: a row of a block of w

so nothing is packed, and a weight is read once for R rows. Of w.T a row of a block is a column: a
block is first transposed in the registers, into a corner of the cache. An output is summed in the
same order as there.

Reads per output, from where w is: B * (blocks in the line) / R weights. That is the limit.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import from_dtype, literally, types

from numbsparse.kernels.cores import DONE, compiled, cores_for, inner, next_share, on_cores
from numbsparse.kernels.simd import (
    fetch_add,
    lanes,
    load,
    multiply_add,
    store,
    store_transposed,
    zeros,
)
from numbsparse.layout import Walk

MOST_ROWS = 4  # of a tile
SQUARE = 8  # rows that are transposed at once
WORTH = 16  # multiply-adds: reading a weight takes as long as so many
ALONE = np.zeros((0, 0), np.int64)  # the progress of a core that shares with nobody


@cache
def few(dtype: np.dtype) -> int:
    """The largest batch that is quicker so: of one vector a smaller one fills less than half."""
    return lanes(from_dtype(dtype)) // 2


def few_product(
    batch: int, values: np.ndarray, walk: Walk, transposed: bool
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """y[:, line] = sum over the line's blocks of x[:, other line] @ block, or its transpose.

    As a function of x, values and y of this batch and these shapes, which takes their dtypes for
    granted, and that all are aligned and `values` C-contiguous.
    """
    rows = min(1 << batch.bit_length() - 1, MOST_ROWS)
    tiles, kernel = -(-batch // rows), few_kernel(values.dtype, rows, values.shape[1])
    work, multiply_adds = tiles * (len(walk.indptr) - 1), WORTH * values.size * tiles
    if cores_for(multiply_adds) > 1:
        how = {"phases": 1, "work": work, "multiply_adds": multiply_adds}
        return lambda *arrays: on_cores(kernel, (transposed, *walk, *arrays), **how)
    (made,) = kernel.overloads.values()  # whose types Numba does not compare again
    return partial(made.entry_point, 0, ALONE, work, transposed, *walk)


@cache
def few_kernel(of: np.dtype, rows: int, size: int) -> Any:
    """A core's share of the lines, `rows` rows at a time, of blocks of `size`."""
    dtype = from_dtype(of)
    columns = min(size, 4 * lanes(dtype))
    high, wide = min(size, SQUARE), min(size, lanes(dtype))

    def read_only(axes: int, layout: str = "C", of: Any = dtype) -> Any:
        return types.Array(of, axes, layout, readonly=True)

    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        types.boolean,  # blocks are transposed
        *[read_only(1, of=types.int32)] * 3,  # indptr (lines + 1,), indices, blocks
        read_only(2, "A"),  # x (batch, features)
        read_only(3),  # values (n_blocks, B, B)
        dtype[:, :],  # y (batch, features of the lines)
    )

    @compiled(signature)
    def kernel(core, progress, share, transposed, indptr, indices, blocks, x, values, y):
        counts = progress[0] if len(progress) else np.zeros(2, np.int64)
        (batch, features), n_outputs, size = x.shape, y.shape[1], values.shape[1]
        x_row, x_feature = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
        y_row, y_feature = y.strides[0] // y.itemsize, y.strides[1] // y.itemsize
        corner, square = np.empty((rows, columns), y.dtype), np.empty((size, size), y.dtype)
        lines = len(indptr) - 1
        work = -(-batch // rows) * lines
        first, last = next_share(core, counts, share, work)
        while first < last:
            for number in range(first, last):
                line, top = number % lines, min(number // lines * rows, batch - rows)
                for left in range(0, size, columns):
                    tile = zeros(values, rows, columns)
                    for position in range(indptr[line], indptr[line + 1]):
                        other, start = indices[position] * size, blocks[position] * size * size
                        a, steps = top * x_row + other * x_feature, min(size, features - other)
                        if transposed:
                            transpose(values, start + left * size, square, columns, high, wide)
                            for step in range(steps):
                                b = (step * size,)
                                tile = multiply_add(tile, x, a, x_row, square, b, 0)
                                a += x_feature
                        else:
                            for step in range(steps):
                                b = (start + step * size + left,)
                                tile = multiply_add(tile, x, a, x_row, values, b, 0)
                                a += x_feature
                    k = line * size + left
                    if y_feature == 1 and k + columns <= n_outputs:
                        store(tile, y, (top * y_row + k,), 0, y_row)
                    else:
                        store(tile, corner, (0,), 0, columns)
                        for r in range(rows):
                            for v in range(min(columns, n_outputs - k)):
                                y[top + r, k + v] = corner[r, v]
            fetch_add(counts, DONE, last - first)
            first, last = next_share(core, counts, share, work)

    return kernel


@inner()
def transpose(values, start, square, columns, high, wide):
    """square[j, i] = item j of row i of a block, for `columns` rows; `start` is where these begin.

    By tiles of `high` x `wide`, which are literal.
    """
    high, wide, size = literally(high), literally(wide), len(square)
    for i in range(0, columns, high):
        for j in range(0, size, wide):
            tile = load(values, (start + i * size + j,), 0, size, high, wide)
            store_transposed(tile, square, j * size + i, size)
