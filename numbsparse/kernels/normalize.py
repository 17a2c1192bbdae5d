"""Layer normalization: a block of threads per row, its sums by trees in shared memory.

The variance is the mean of (x - mean)^2, from a second look at the row: the mean of x^2 less
mean^2 would cancel. All in float32. Arrays are (rows, width).
"""

import math

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import block_sum, threads_of_row
from numbsparse.kernels.floats import rounded, widened


def layer_norm(x, eps, normalised, inverse_std):
    """inverse_std[:] = 1 / sqrt(var(x) + eps); normalised[:] = (x - mean(x)) * inverse_std."""
    rows, width = x.shape
    launch(layer_norm_kernel, rows, threads_of_row(width), x, eps, normalised, inverse_std)


def layer_norm_grad(normalised, inverse_std, dy, dx):
    """dx[:] = inverse_std * (dy - mean(dy) - normalised * mean(dy * normalised))."""
    rows, width = normalised.shape
    launch(layer_norm_grad_kernel, rows, threads_of_row(width), normalised, inverse_std, dy, dx)


@cuda.jit
def layer_norm_kernel(x, eps, normalised, inverse_std):
    row, t, threads, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, x.shape[1]
    acc = float32(0)
    j = t
    while j < width:
        acc += widened(x[row, j])
        j += threads
    mean = block_sum(acc) / float32(width)
    acc = float32(0)
    j = t
    while j < width:
        centred = widened(x[row, j]) - mean
        acc += centred * centred
        j += threads
    variance = block_sum(acc) / float32(width)
    scale = float32(1) / math.sqrt(variance + eps)
    j = t
    while j < width:
        normalised[row, j] = rounded((widened(x[row, j]) - mean) * scale, normalised)
        j += threads
    if t == 0:
        inverse_std[row] = scale


@cuda.jit
def layer_norm_grad_kernel(normalised, inverse_std, dy, dx):
    row, t, threads, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, dx.shape[1]
    total, dot = float32(0), float32(0)
    j = t
    while j < width:
        total += widened(dy[row, j])
        dot += widened(dy[row, j]) * widened(normalised[row, j])
        j += threads
    mean = block_sum(total) / float32(width)
    mean_dot = block_sum(dot) / float32(width)
    scale = float32(inverse_std[row])
    j = t
    while j < width:
        slope = widened(dy[row, j]) - mean - widened(normalised[row, j]) * mean_dot
        dx[row, j] = rounded(scale * slope, dx)
        j += threads
