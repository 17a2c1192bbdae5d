"""Products of a few rows on the CPU: the block's columns fill the vectors, not the batch.

The step is that of `lines`, with the parts exchanged,

    tile[r, v] += a[r] * b[v]      a: a feature of R rows of x,  b: a row of a block of w

so nothing is packed. The sums of all outputs wait in the cache, and each block is added to its
own, one block of x's features after the other: neighbouring steps belong to different sums, and
none waits for the one before. So w is read once for all rows, for x @ w in the order of memory. Of
w.T a row of a block is a column: a block is first transposed in the registers, into a corner of the
cache. Larger blocks, whose own sums are enough to wait for none, are then taken in the order of
memory too: two rows of 3,072 features, B = 32, take 232 us in place of 315, B = 8 would take 188 in
place of 139. An output is summed in the same order as there.

Reads per output, from where w is: B * (blocks in the line) / batch weights. That is the limit.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import from_dtype, types

from numbsparse.kernels.cores import (
    DONE,
    compiled,
    cores_for,
    entry_of,
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
    prefetch,
    store,
    store_transposed,
    vector_registers,
    zeros,
)
from numbsparse.layout import Index, Walk

MOST_ROWS = 4  # of a tile
SQUARE = 8  # rows that are transposed at once
AHEAD = 512  # weights, at least, from the prefetch of a block that is not the next in memory
EARLY = 256  # weights of it; the hardware finds those of larger blocks
WIDE = 16  # a block that takes so long that a loop around its steps does not count
STRIPS = 4  # for each core, so that one that is late does less
ALONE = np.zeros((1, 1), np.int64)  # the progress of a core that shares with nobody
WORTH = 8  # multiply-adds: reading a weight takes as long as so many
MOST = 512, 128  # rows that were timed so, and of blocks under WIDE
PACKED = 6  # multiply-adds: packing a number takes as long as so many
CALL = 1 << 16  # multiply-adds: what packing adds to a call takes as long
LOADED = {4: 2.2, 8: 2.2, 16: 1.2}  # times as long as packed: steps of a block hide loads of sums
TURNED = 8  # columns: transposing them takes as long as a row


def pays(batch: int, values: np.ndarray, features: int, transposed: bool, call: int = CALL) -> bool:
    """Whether so many rows of x, of so many features, are quicker so than packed.

    What packing costs, in multiply-adds: the rows that fill a vector, the numbers of x that move,
    and a call. Here sums are loaded and stored for each block, and w.T is transposed. Fitted to
    1,612 products on two CPUs: these choices take 1.02 times as long as the better way, and 0.83
    times as long as packing all. 33 rows of 1,024 features, B = 16, take 0.5 of the time with one
    block a line, and 0.8 with six.
    """
    size, vector = values.shape[1], lanes(from_dtype(values.dtype))
    packed = values.size * -(-batch // vector) * vector + PACKED * features * batch + call
    rows = batch + size // TURNED if transposed else batch
    few = LOADED.get(size, 1.05) * values.size * rows
    return 0 < batch <= MOST[size < WIDE] and few <= packed


def rows_at_once(size: int, batch: int) -> int:
    """R: twice as many where registers hold them, but of narrow blocks."""
    most = 2 * MOST_ROWS if size >= WIDE and vector_registers() == 32 else MOST_ROWS
    return min(1 << batch.bit_length() - 1, most)


def few_product(
    batch: int, values: np.ndarray, index: Index, transposed: bool
) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    """y = x @ w, or x @ w.T, as a function of x, values and y of this batch and these shapes.

    It takes their dtypes for granted, and that all are aligned and `values` C-contiguous.
    """
    size = values.shape[1]
    rows = rows_at_once(size, batch)
    tiles = -(-batch // rows)
    multiply_adds = WORTH * values.size * tiles
    cores = cores_for(multiply_adds)
    strips = STRIPS * cores if cores > 1 else 1
    in_order = transposed and size >= WIDE
    walk, lines = walk_of(index, transposed)
    (starts,) = planned(index, strips_of, strips, transposed, in_order)
    places = (index.block_rows, index.block_columns) if in_order else walk[1:]
    kernel = entry_of(few_kernel(values.dtype, rows, size, transposed))
    known = starts, lines, *places
    if cores > 1:
        how = {"phases": 1, "work": strips, "multiply_adds": multiply_adds}
        return lambda *arrays: on_cores(kernel, (*known, *arrays), **how)
    return partial(kernel, 0, ALONE, strips, *known)


def walk_of(index: Index, transposed: bool) -> tuple[Walk, int]:
    """A line for each block of features of x; and how many blocks of features y has."""
    walk, other = (index.columns, index.rows) if transposed else (index.rows, index.columns)
    return walk, len(other.indptr) - 1


def strips_of(index: Index, strips: int, transposed: bool, in_order: bool) -> tuple[np.ndarray]:
    """Where each strip of y's features begins in each line of the walk, (strips + 1, lines).

    `in_order` of memory w.T has one line, of all blocks.
    """
    walk, blocks = walk_of(index, transposed)
    if in_order:
        return (index.rows.indptr[blocks * np.arange(strips + 1)[:, None] // strips],)
    lines = np.arange(len(walk.indptr) - 1)
    flat = np.repeat(lines, np.diff(walk.indptr)) * blocks + walk.indices
    borders = blocks * np.arange(strips + 1)[:, None] // strips
    return (np.searchsorted(flat, lines * blocks + borders).astype(np.int32),)


def tile_columns(dtype: types.Float, rows: int, size: int) -> int:
    """C: four vectors, where the registers hold R * C, a row of `b` and a scalar of `a`; or two."""
    vectors = 4 if 4 * rows + 4 + 1 <= vector_registers() else 2
    return min(size, vectors * lanes(dtype))


@cache
def few_kernel(of: np.dtype, rows: int, size: int, transposed: bool) -> Any:
    """A core's share of the strips of y = x @ w, or x @ w.T: `rows` rows, blocks of `size`."""
    dtype = from_dtype(of)
    columns = tile_columns(dtype, rows, size)
    high, wide = min(size, SQUARE), min(size, lanes(dtype))
    in_order = transposed and size >= WIDE
    unrolled = size <= WIDE and not in_order
    apart = max(columns, lanes(dtype))  # lest rows of the sums share sets of the cache
    ahead, early = max(1, AHEAD // size**2), min(size * size, EARLY)
    signature = types.void(
        types.int64,  # core
        types.int64[:, ::1],  # progress
        types.int64,  # share
        types.int32[:, ::1],  # starts (strips + 1, lines)
        types.int64,  # blocks of y's features
        # indices (n_blocks,), of those; and the blocks, or in order of memory those of x's features
        *[read_only(types.int32, 1)] * 2,
        read_only(dtype, 2, "A"),  # x (batch, features)
        read_only(dtype, 3),  # values (n_blocks, B, B)
        dtype[:, :],  # y (batch, features of the block columns)
    )

    @inner(inline="always")
    def add(x, line, strides, steps, operands, first, tiles):
        """Some tiles of sums[:, a block's] += x[:, line : line + steps] @ each of these blocks."""
        values, positions, (indices, blocks), square, sums, left = operands
        width = sums.shape[1]
        for position in range(positions[0], positions[1]):
            start = (position if in_order else blocks[position]) * size * size
            if transposed and not in_order:
                later = blocks[min(position + ahead, len(blocks) - 1)]
                prefetch(values, later * size * size, early)
            for v in range(0, size, columns):
                if transposed:
                    for i in range(0, columns, high):
                        for j in range(0, size, wide):
                            b = (start + (v + i) * size + j,)
                            corner = load(values, b, 0, size, high, wide)
                            store_transposed(corner, square, j * size + i, size)
                to = indices[position] * size + v - left
                for number in range(first, first + tiles):
                    top = number * rows
                    a = min(top, x.shape[0] - rows) * strides[0] + line * strides[1]
                    at = (top * width + to,)
                    tile = load(sums, at, 0, width, rows, columns)
                    if transposed:
                        for step in range(steps):
                            c, b = a + step * strides[1], (step * size,)
                            tile = multiply_add(tile, x, c, strides[0], square, b, 0)
                    else:
                        for step in range(steps):
                            c, b = a + step * strides[1], (start + step * size + v,)
                            tile = multiply_add(tile, x, c, strides[0], values, b, 0)
                    store(tile, sums, at, 0, width)

    @compiled(signature)
    def kernel(core, progress, share, starts, lines, indices, blocks, x, values, y):
        counts, shared = progress[0], progress.shape[1] > 1
        (batch, features), n_outputs = x.shape, y.shape[1]
        strides = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize
        y_row, y_feature = y.strides[0] // y.itemsize, y.strides[1] // y.itemsize
        strips, tiles, walk = len(starts) - 1, -(-batch // rows), (indices, blocks)
        square = np.empty((size, size), y.dtype)
        first, last = next_share(core, counts, share, strips) if shared else (0, strips)
        while first < last:
            for strip in range(first, last):
                k, end = lines * strip // strips * size, lines * (strip + 1) // strips * size
                width = end - k + apart
                sums = np.empty((tiles * rows, width), y.dtype)
                for number in range(0, sums.size, columns):
                    store(zeros(sums, 1, columns), sums, (number,), 0, 0)
                begin, stop = starts[strip, 0], starts[strip + 1, 0]
                for number in range(begin, stop) if in_order else range(starts.shape[1]):
                    some, line = (number, number + 1), blocks[number] * size
                    if not in_order:
                        some = starts[strip, number], starts[strip + 1, number]
                        line = number * size
                    steps = min(size, features - line)
                    operands = values, some, walk, square, sums, k
                    if in_order:
                        add(x, line, strides, steps, operands, 0, tiles)
                    else:
                        for tile in range(tiles):
                            if unrolled and steps == size:
                                add(x, line, strides, size, operands, tile, 1)
                            else:
                                add(x, line, strides, steps, operands, tile, 1)
                for tile in range(tiles):
                    top, row = min(tile * rows, batch - rows), tile * rows
                    if y_feature == 1 and end <= n_outputs:
                        for v in range(0, end - k, columns):
                            at = (row * width + v,)
                            some_sums = load(sums, at, 0, width, rows, columns)
                            store(some_sums, y, (top * y_row + k + v,), 0, y_row)
                    else:
                        for v in range(min(end, n_outputs) - k):
                            column = load(sums, (row * width + v,), 0, width, rows, 1)
                            store(column, y, (top * y_row + (k + v) * y_feature,), 0, y_row)
            fetch_add(counts, DONE, last - first)
            first, last = next_share(core, counts, share, strips)

    return kernel
