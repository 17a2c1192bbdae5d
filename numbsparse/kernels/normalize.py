"""Layer normalization: a block of threads per row, its sums by trees in shared memory.

The variance is the mean of (x - mean)^2, from a second look at the row: the mean of x^2 less
mean^2 would cancel. All in float32. Arrays are (rows, width).
"""

import math

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import MOST_THREADS, block_sum, rounds, threads_for
from numbsparse.kernels.floats import rounded, widened


def layer_norm(x, eps, normalised, inverse_std):
    """inverse_std[:] = 1 / sqrt(var(x) + eps); normalised[:] = (x - mean(x)) * inverse_std."""
    rows, width = x.shape
    launch(layer_norm_kernel, rows, threads_for(width), x, eps, normalised, inverse_std)


def layer_norm_grad(normalised, inverse_std, dy, dx):
    """dx[:] = inverse_std * (dy - mean(dy) - normalised * mean(dy * normalised))."""
    rows, width = normalised.shape
    launch(layer_norm_grad_kernel, rows, threads_for(width), normalised, inverse_std, dy, dx)


@cuda.jit
def layer_norm_kernel(x, eps, normalised, inverse_std):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    row, t, threads, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, x.shape[1]
    acc = float32(0)
    for r in range(rounds(t, width, threads)):
        acc += widened(x[row, t + r * threads])
    mean = block_sum(acc, scratch) / float32(width)
    acc = float32(0)
    for r in range(rounds(t, width, threads)):
        centred = widened(x[row, t + r * threads]) - mean
        acc += centred * centred
    variance = block_sum(acc, scratch) / float32(width)
    scale = float32(1) / math.sqrt(variance + eps)
    for r in range(rounds(t, width, threads)):
        j = t + r * threads
        normalised[row, j] = rounded((widened(x[row, j]) - mean) * scale, normalised)
    if t == 0:
        inverse_std[row] = scale


@cuda.jit
def layer_norm_grad_kernel(normalised, inverse_std, dy, dx):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    row, t, threads, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, dx.shape[1]
    total, dot = float32(0), float32(0)
    for r in range(rounds(t, width, threads)):
        j = t + r * threads
        total += widened(dy[row, j])
        dot += widened(dy[row, j]) * widened(normalised[row, j])
    mean = block_sum(total, scratch) / float32(width)
    mean_dot = block_sum(dot, scratch) / float32(width)
    scale = float32(inverse_std[row])
    for r in range(rounds(t, width, threads)):
        j = t + r * threads
        slope = widened(dy[row, j]) - mean - widened(normalised[row, j]) * mean_dot
        dx[row, j] = rounded(scale * slope, dx)
