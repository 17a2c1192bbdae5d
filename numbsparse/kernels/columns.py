"""Sums down the columns of a block-sparse matrix, and its columns times numbers.

A block of threads has a stored block, a thread some rows of a column of it. A column's sums over
stored blocks are joined in a second pass, in the order of a `Walk`: the same bits every time. All
in float32. Stored blocks are flat: block, row, column.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int64

from numbsparse.device import SIMULATED, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.floats import rounded, widened

THREADS = 8 if SIMULATED else 256


def column_dots(size, a, b, walk, dots):
    """dots[k] = the sum over c of a[c, k] * b[c, k], (block columns * size,)."""
    n_blocks, threads = a.size // (size * size), _rows(size) * size
    partial = empty((n_blocks * size,), np.float32)
    launch(dots_of_blocks(size), n_blocks, threads, a, b, partial)
    lines = dots.size // size
    launch(dots_of_columns(size), lines, threads, partial, walk.indptr, walk.blocks, dots)


def scale_columns(size, a, scale, b, less, columns, out):
    """out[c, k] = a[c, k] * scale[k] - b[c, k] * less[k]; without a b only the first product."""
    arrays = a, scale, a if b is None else b, scale if b is None else less, columns, out
    n_blocks, threads = a.size // (size * size), _rows(size) * size
    launch(scaled(size, b is not None), n_blocks, threads, *arrays)


def _rows(size):
    """Rows of a block that its threads have at a time."""
    return max(THREADS // size, 1)


@cache
def dots_of_blocks(size):
    rows = _rows(size)
    threads = rows * size
    steps = -(-size // rows)

    @cuda.jit
    def dots_of_blocks_kernel(a, b, partial):
        scratch = cuda.shared.array(threads, float32)
        t, block = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        first, column = t // size, t % size
        acc = float32(0)
        for i in range(steps):
            row = first + i * rows
            if row < size:
                place = (block * size + row) * size + column
                acc += widened(a[place]) * widened(b[place])
        scratch[t] = acc
        cuda.syncthreads()
        if first == 0:
            for i in range(1, rows):
                acc += scratch[i * size + column]
            partial[block * size + column] = acc

    return dots_of_blocks_kernel


@cache
def dots_of_columns(size):
    rows = _rows(size)
    threads = rows * size

    @cuda.jit
    def dots_of_columns_kernel(partial, indptr, blocks, dots):
        scratch = cuda.shared.array(threads, float32)
        t, line = cuda.threadIdx.x, cuda.blockIdx.x
        first, column = t // size, t % size
        acc = float32(0)
        for k in range(indptr[line] + first, indptr[line + 1], rows):
            acc += partial[int64(blocks[k]) * size + column]
        scratch[t] = acc
        cuda.syncthreads()
        if first == 0:
            for i in range(1, rows):
                acc += scratch[i * size + column]
            dots[line * size + column] = acc

    return dots_of_columns_kernel


@cache
def scaled(size, two):
    rows = _rows(size)
    steps = -(-size // rows)

    @cuda.jit
    def scale_columns_kernel(a, scale, b, less, columns, out):
        t, block = cuda.threadIdx.x, int64(cuda.blockIdx.x)
        first, column = t // size, t % size
        k = columns[block] * size + column
        by, taken = scale[k], less[k]
        for i in range(steps):
            row = first + i * rows
            if row < size:
                place = (block * size + row) * size + column
                value = widened(a[place]) * by
                if two:
                    value -= widened(b[place]) * taken
                out[place] = rounded(value, out)

    return scale_columns_kernel
