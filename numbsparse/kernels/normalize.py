"""Layer normalization: a block of threads per row, its sums by trees in shared memory.

The variance is the mean of (x - mean)^2, from a second look at the row: the mean of x^2 less
mean^2 would cancel. All in float32. Arrays are (rows, width).

With a block size, a block of threads has a group of a row, as the gates of an LSTM are: each has
every so many-th block of its features.
"""

import math

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import MOST_THREADS, block_sum, threads_for
from numbsparse.kernels.floats import rounded, widened


def layer_norm(x, eps, normalised, inverse_std):
    """inverse_std[:] = 1 / sqrt(var(x) + eps); normalised[:] = (x - mean(x)) * inverse_std."""
    rows, width = x.shape
    args = x, x, eps, normalised, inverse_std.reshape(rows, 1), width, 0
    launch(layer_norm_kernel, rows, threads_for(width), *args)


def layer_norm_grad(normalised, inverse_std, dy, dx):
    """dx[:] = inverse_std * (dy - mean(dy) - normalised * mean(dy * normalised))."""
    rows, width = normalised.shape
    args = normalised, inverse_std.reshape(rows, 1), dy, dx, width, 0
    launch(layer_norm_grad_kernel, rows, threads_for(width), *args)


@cuda.jit(device=True)
def place(j, block_size):
    """Where feature j is in the row, or that of this group of it."""
    if block_size == 0:
        return j
    return j + (j // block_size * (cuda.gridDim.y - 1) + cuda.blockIdx.y) * block_size


@cuda.jit(device=True)
def feature(x, term, row, j, block_size):
    """x, or of a group x + term."""
    k = place(j, block_size)
    value = widened(x[row, k])
    return value if block_size == 0 else value + widened(term[row, k])


@cuda.jit
def layer_norm_kernel(x, term, eps, normalised, inverse_std, width, block_size):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    acc = float32(0)
    for j in range(t, width, threads):
        acc += feature(x, term, row, j, block_size)
    mean = block_sum(acc, scratch) / float32(width)
    acc = float32(0)
    for j in range(t, width, threads):
        centred = feature(x, term, row, j, block_size) - mean
        acc += centred * centred
    variance = block_sum(acc, scratch) / float32(width)
    scale = float32(1) / math.sqrt(variance + eps)
    for j in range(t, width, threads):
        centred = feature(x, term, row, j, block_size) - mean
        normalised[row, place(j, block_size)] = rounded(centred * scale, normalised)
    if t == 0:
        inverse_std[row, cuda.blockIdx.y] = scale


@cuda.jit
def layer_norm_grad_kernel(normalised, inverse_std, dy, dx, width, block_size):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    total, dot = float32(0), float32(0)
    for j in range(t, width, threads):
        k = place(j, block_size)
        total += widened(dy[row, k])
        dot += widened(dy[row, k]) * widened(normalised[row, k])
    mean = block_sum(total, scratch) / float32(width)
    mean_dot = block_sum(dot, scratch) / float32(width)
    scale = float32(inverse_std[row, cuda.blockIdx.y])
    for j in range(t, width, threads):
        k = place(j, block_size)
        slope = widened(dy[row, k]) - mean - widened(normalised[row, k]) * mean_dot
        dx[row, k] = rounded(scale * slope, dx)
