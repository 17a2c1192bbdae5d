"""Products of a few rows on the CPU: the block's columns fill the vectors, not the batch.

The step is that of `k0_cpu`, with the parts exchanged,

    tile[r, v] += a[r] * b[v]      a: a feature of R rows of x,  b: a row of a block of w

so nothing is packed. x @ w reads w in the order of memory, once for all rows: the sums of every
line wait in the cache, and each block is added to its own. So neighbouring steps belong to
different sums, and none waits for the one before. Of w.T a row of a block is a column: a block is
first transposed in the registers, into a corner of the cache, and the blocks of a line follow one
another in memory anyway. An output is summed in the same order as there.

Reads per output, from where w is: B * (blocks in the line) / batch weights. That is the limit.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import from_dtype, literally, types

from numbsparse.kernels.cores import (
    DONE,
    compiled,
    cores_for,
    inner,
    next_share,
    on_cores,
    read_only,
)
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.simd import (
    fetch_add,
    lanes,
    load,
    multiply_add,
    store,
    store_transposed,
    vector_registers,
    zeros,
)
from numbsparse.layout import Index

MOST_ROWS = 4  # of a tile
SQUARE = 8  # rows that are transposed at once
STRIPS = 4  # for each core, so that one that is late does less
WORTH = 16  # multiply-adds: reading a weight takes as long as so many
ALONE = np.zeros((0, 0), np.int64)  # the progress of a core that shares with nobody


@cache
def few(dtype: np.dtype, size: int, transposed: bool) -> int:
    """The largest batch that is quicker so, in blocks of `size`.

    A larger one makes up for being packed: sooner where a block's rows fill less of a vector.
    """
    vector = lanes(from_dtype(dtype))
    return vector // 2 if transposed else min(2 * size, 4 * vector)


def few_product(
    batch: int, values: np.ndarray, index: Index, transposed: bool
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """y = x @ w, or x @ w.T, as a function of x, values and y of this batch and these shapes.

    It takes their dtypes for granted, and that all are aligned and `values` C-contiguous.
    """
    rows = min(1 << batch.bit_length() - 1, MOST_ROWS)
    tiles, size = -(-batch // rows), values.shape[1]
    multiply_adds = WORTH * values.size * tiles
    cores = cores_for(multiply_adds)
    known: tuple[Any, ...]
    if transposed:
        kernel, known = transposed_kernel(values.dtype, rows, size), index.rows
        work = tiles * (len(index.rows.indptr) - 1)
    else:
        work = STRIPS * cores if cores > 1 else 1
        kernel = stored_kernel(values.dtype, rows, size)
        (starts,) = planned(index, strips_of, work)
        known = starts, len(index.columns.indptr) - 1, index.rows.indices
    if cores > 1:
        how = {"phases": 1, "work": work, "multiply_adds": multiply_adds}
        return lambda *arrays: on_cores(kernel, (*known, *arrays), **how)
    (made,) = kernel.overloads.values()  # whose types Numba does not compare again
    return partial(made.entry_point, 0, ALONE, work, *known)


def strips_of(index: Index, strips: int) -> tuple[np.ndarray]:
    """Where each strip of block columns begins in each block row, (strips + 1, block rows)."""
    rows, columns = (len(walk.indptr) - 1 for walk in (index.rows, index.columns))
    flat = index.block_rows.astype(np.int64) * columns + index.block_columns
    borders = columns * np.arange(strips + 1)[:, None] // strips
    return (np.searchsorted(flat, np.arange(rows) * columns + borders).astype(np.int32),)


def tile_columns(dtype: types.Float, rows: int, size: int) -> int:
    """C: four vectors, where the registers hold R * C, a row of `b` and a scalar of `a`; or two."""
    vectors = 4 if 4 * rows + 4 + 1 <= vector_registers() else 2
    return min(size, vectors * lanes(dtype))


@cache
def stored_kernel(of: np.dtype, rows: int, size: int) -> Any:
    """A core's share of the strips of y = x @ w, `rows` rows at a time, of blocks of `size`."""
    dtype = from_dtype(of)
    columns = tile_columns(dtype, rows, size)
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        types.int32[:, ::1],  # starts (strips + 1, block rows)
        types.int64,  # block columns
        read_only(types.int32, 1),  # indices (n_blocks,), of block columns
        read_only(dtype, 2, "A"),  # x (batch, features)
        read_only(dtype, 3),  # values (n_blocks, B, B)
        dtype[:, :],  # y (batch, features of the block columns)
    )

    @inner(inline="always")
    def add(x, a, strides, steps, values, blocks, indices, sums, out):
        """sums[:, line] += `steps` columns of x from `a` on, times each of these blocks."""
        width = sums.shape[1]
        for block in range(blocks[0], blocks[1]):
            for v in range(0, size, columns):
                at = (out + indices[block] * size + v,)
                tile, start = load(sums, at, 0, width, rows, columns), block * size * size + v
                for step in range(steps):
                    b = (start + step * size,)
                    tile = multiply_add(tile, x, a + step * strides[1], strides[0], values, b, 0)
                store(tile, sums, at, 0, width)

    @compiled(signature)
    def kernel(core, progress, share, starts, lines, indices, x, values, y):
        counts = progress[0] if len(progress) else np.zeros(2, np.int64)
        (batch, features), n_outputs = x.shape, y.shape[1]
        strides = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
        y_row, y_feature = y.strides[0] // y.itemsize, y.strides[1] // y.itemsize
        strips, tiles = len(starts) - 1, -(-batch // rows)
        first, last = next_share(core, counts, share, strips)
        while first < last:
            for strip in range(first, last):
                k, end = lines * strip // strips * size, lines * (strip + 1) // strips * size
                sums = np.zeros((tiles * rows, end - k), y.dtype)
                for line in range(starts.shape[1]):
                    blocks, other = (starts[strip, line], starts[strip + 1, line]), line * size
                    for tile in range(tiles):
                        a = min(tile * rows, batch - rows) * strides[0] + other * strides[1]
                        out = tile * rows * (end - k) - k
                        if other + size <= features:
                            add(x, a, strides, size, values, blocks, indices, sums, out)
                        else:
                            steps = features - other
                            add(x, a, strides, steps, values, blocks, indices, sums, out)
                for tile in range(tiles):
                    top, row = min(tile * rows, batch - rows), tile * rows
                    if y_feature == 1 and end <= n_outputs:
                        for v in range(0, end - k, columns):
                            at = (row * (end - k) + v,)
                            some_sums = load(sums, at, 0, end - k, rows, columns)
                            store(some_sums, y, (top * y_row + k + v,), 0, y_row)
                    else:
                        for r in range(rows):
                            for v in range(min(end, n_outputs) - k):
                                y[top + r, k + v] = sums[row + r, v]
            fetch_add(counts, DONE, last - first)
            first, last = next_share(core, counts, share, strips)

    return kernel


@cache
def transposed_kernel(of: np.dtype, rows: int, size: int) -> Any:
    """A core's share of the lines of y = x @ w.T, `rows` rows at a time, of blocks of `size`."""
    dtype = from_dtype(of)
    columns = tile_columns(dtype, rows, size)
    high, wide = min(size, SQUARE), min(size, lanes(dtype))
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        *[read_only(types.int32, 1)] * 3,  # indptr (lines + 1,), indices, blocks
        read_only(dtype, 2, "A"),  # x (batch, features)
        read_only(dtype, 3),  # values (n_blocks, B, B)
        dtype[:, :],  # y (batch, features of the lines)
    )

    @compiled(signature)
    def kernel(core, progress, share, indptr, indices, blocks, x, values, y):
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
                        transpose(values, start + left * size, square, columns, high, wide)
                        for step in range(steps):
                            tile = multiply_add(tile, x, a, x_row, square, (step * size,), 0)
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
