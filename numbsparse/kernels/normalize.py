"""Layer normalization: a block of threads per row, its sums by trees in shared memory.

The variance is the mean of (x - mean)^2, from a second look at the row: the mean of x^2 less
mean^2 would cancel. All in float32. Arrays are (rows, width).

With a block size, a block of threads has a group of a row, as the gates of an LSTM are: each has
every so many-th block of its features.
"""

import math
from functools import cache
from typing import Any

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import block_sum, threads_of_row
from numbsparse.kernels.floats import rounded, widened


def layer_norm(x, eps, normalised, inverse_std):
    """inverse_std[:] = 1 / sqrt(var(x) + eps); normalised[:] = (x - mean(x)) * inverse_std."""
    rows, width = x.shape
    args = x, x, eps, normalised, inverse_std.reshape(rows, 1), width, 0
    launch(layer_norm_kernel(False), rows, threads_of_row(width), *args)


def layer_norm_grad(normalised, inverse_std, dy, dx):
    """dx[:] = inverse_std * (dy - mean(dy) - normalised * mean(dy * normalised))."""
    rows, width = normalised.shape
    args = normalised, inverse_std.reshape(rows, 1), dy, dx, width, 0
    launch(layer_norm_grad_kernel(False), rows, threads_of_row(width), *args)


@cuda.jit(device=True)
def place(j, block_size):
    """Where feature j of this group is in the row."""
    return j + (j // block_size * (cuda.gridDim.y - 1) + cuda.blockIdx.y) * block_size


@cache
def layer_norm_kernel(grouped: bool) -> Any:
    """Of x, or of groups of x + term."""

    @cuda.jit(device=True)
    def feature(x, term, row, j, block_size):
        if grouped:
            k = place(j, block_size)
            return widened(x[row, k]) + widened(term[row, k])
        return widened(x[row, j])

    @cuda.jit
    def kernel(x, term, eps, normalised, inverse_std, width, block_size):
        row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        acc = float32(0)
        j = t
        while j < width:
            acc += feature(x, term, row, j, block_size)
            j += threads
        mean = block_sum(acc) / float32(width)
        acc = float32(0)
        j = t
        while j < width:
            centred = feature(x, term, row, j, block_size) - mean
            acc += centred * centred
            j += threads
        variance = block_sum(acc) / float32(width)
        scale = float32(1) / math.sqrt(variance + eps)
        j = t
        while j < width:
            centred = feature(x, term, row, j, block_size) - mean
            k = place(j, block_size) if grouped else j
            normalised[row, k] = rounded(centred * scale, normalised)
            j += threads
        if t == 0:
            inverse_std[row, cuda.blockIdx.y] = scale

    return kernel


@cache
def layer_norm_grad_kernel(grouped: bool) -> Any:
    @cuda.jit
    def kernel(normalised, inverse_std, dy, dx, width, block_size):
        row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        total, dot = float32(0), float32(0)
        j = t
        while j < width:
            k = place(j, block_size) if grouped else j
            total += widened(dy[row, k])
            dot += widened(dy[row, k]) * widened(normalised[row, k])
            j += threads
        mean = block_sum(total) / float32(width)
        mean_dot = block_sum(dot) / float32(width)
        scale = float32(inverse_std[row, cuda.blockIdx.y])
        j = t
        while j < width:
            k = place(j, block_size) if grouped else j
            slope = widened(dy[row, k]) - mean - widened(normalised[row, k]) * mean_dot
            dx[row, k] = rounded(scale * slope, dx)
            j += threads

    return kernel
