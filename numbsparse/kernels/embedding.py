"""Rows of a table, and the sum back into the table.

take_rows: a thread per value. sum_rows: a block of threads per row of the table, a column each.
The block reads the indices tile by tile; only where one names its row do the threads go through
the tile, in order, and add: no atomics, the same bits every time.
"""

import numpy as np
from numba import cuda, float32, int32, int64

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import MOST_THREADS, threads_for
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import rounded, widened

NAN = np.float32(np.nan)


def take_rows(table, indices, taken, others=None, missing=NAN):
    """taken[:] = table[indices], for indices (n,) and taken (n, width).

    For no such row that of `others`, (n, width), or `missing`.
    """
    instead = taken if others is None else others
    args = table, indices, instead, int(others is not None), missing, taken
    launch(take_rows_kernel, blocks(taken.size), THREADS, *args)


def sum_rows(dy, indices, dtable):
    """dtable[r] = the sum of dy[i] where indices[i] == r, for dy (n, width) and indices (n,)."""
    rows, width = dtable.shape
    threads = threads_for(max(width, 1))
    launch(sum_rows_kernel, (rows, -(-width // threads)), threads, dy, indices, dtable)


@cuda.jit
def take_rows_kernel(table, indices, others, has_others, missing, taken):
    item = cuda.grid(1)
    (n, width), rows = taken.shape, table.shape[0]
    if item >= n * width:
        return
    i, column = item // width, item % width
    row = indices[i]
    if 0 <= row < rows:
        taken[i, column] = table[row, column]
    elif has_others:
        taken[i, column] = others[i, column]
    else:
        taken[i, column] = rounded(missing, taken)


@cuda.jit
def sum_rows_kernel(dy, indices, dtable):
    tile = cuda.shared.array(MOST_THREADS, int64)
    row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    (n, width), column = dy.shape, cuda.blockIdx.y * threads + t
    acc = float32(0)
    for first in range(0, n, threads):
        index = int64(indices[first + t]) if first + t < n else int64(-1)
        tile[t] = index
        if cuda.syncthreads_or(int32(1) if index == row else int32(0)):
            if column < width:
                for k in range(threads):
                    if tile[k] == row:
                        acc += widened(dy[first + k, column])
            cuda.syncthreads()  # before the tile is written again
    if column < width:
        dtable[row, column] = rounded(acc, dtable)
