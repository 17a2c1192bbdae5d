"""Softmax and cross-entropy: a block of threads per row.

The threads of a row find its largest value, then the sum of its exponentials, by trees in shared
memory; the row is read again for each, from the cache. All in float32. Arrays are (rows, width).
"""

import math

import numpy as np
from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import LOWEST, block_max, block_sum, larger, threads_of_row
from numbsparse.kernels.floats import rounded, widened

NAN = np.float32(np.nan)


def _by_rows(kernel):
    """The kernel, to be called: a block of threads has a row of the first array."""

    def start(x, *arrays):
        launch(kernel, x.shape[0], threads_of_row(x.shape[1]), x, *arrays)

    return start


@cuda.jit(device=True)
def row_max(x, row):
    largest = LOWEST
    j = cuda.threadIdx.x
    while j < x.shape[1]:
        largest = larger(largest, widened(x[row, j]))
        j += cuda.blockDim.x
    return block_max(largest)


@cuda.jit(device=True)
def row_sum_of_exponentials(x, row, largest):
    total = float32(0)
    j = cuda.threadIdx.x
    while j < x.shape[1]:
        total += math.exp(widened(x[row, j]) - largest)
        j += cuda.blockDim.x
    return block_sum(total)


@_by_rows
@cuda.jit
def softmax(x, y):
    """y[:] = e^x / sum(e^x)."""
    row = cuda.blockIdx.x
    largest = row_max(x, row)
    total = row_sum_of_exponentials(x, row, largest)
    j = cuda.threadIdx.x
    while j < x.shape[1]:
        y[row, j] = rounded(math.exp(widened(x[row, j]) - largest) / total, y)
        j += cuda.blockDim.x


@_by_rows
@cuda.jit
def log_softmax(x, y):
    """y[:] = x - log(sum(e^x))."""
    row = cuda.blockIdx.x
    largest = row_max(x, row)
    log_total = math.log(row_sum_of_exponentials(x, row, largest))
    j = cuda.threadIdx.x
    while j < x.shape[1]:
        y[row, j] = rounded(widened(x[row, j]) - largest - log_total, y)
        j += cuda.blockDim.x


@_by_rows
@cuda.jit
def logsumexp(x, y):
    """y[i] = log(sum(e^x[i]))."""
    row = cuda.blockIdx.x
    largest = row_max(x, row)
    shift = largest if LOWEST < largest < -LOWEST else float32(0)  # no infinity less infinity
    total = row_sum_of_exponentials(x, row, shift)
    if cuda.threadIdx.x == 0:
        y[row] = rounded(LOWEST if total == float32(0) else math.log(total) + shift, y)


@_by_rows
@cuda.jit
def softmax_grad(y, dy, dx):
    """dx[:] = y * (dy - sum(y * dy))."""
    row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    dot = float32(0)
    j = t
    while j < y.shape[1]:
        dot += widened(y[row, j]) * widened(dy[row, j])
        j += threads
    dot = block_sum(dot)
    j = t
    while j < y.shape[1]:
        dx[row, j] = rounded(widened(y[row, j]) * (widened(dy[row, j]) - dot), dx)
        j += threads


@_by_rows
@cuda.jit
def log_softmax_grad(y, dy, dx):
    """dx[:] = dy - e^y * sum(dy)."""
    row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    total = float32(0)
    j = t
    while j < y.shape[1]:
        total += widened(dy[row, j])
        j += threads
    total = block_sum(total)
    j = t
    while j < y.shape[1]:
        dx[row, j] = rounded(widened(dy[row, j]) - math.exp(widened(y[row, j])) * total, dx)
        j += threads


@_by_rows
@cuda.jit
def cross_entropy(logits, targets, losses, probabilities):
    """probabilities[:] = softmax(logits); losses[i] = -log(probabilities[i, targets[i]])."""
    row, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    classes, target = logits.shape[1], targets[row]
    largest = row_max(logits, row)
    total = row_sum_of_exponentials(logits, row, largest)
    j = t
    while j < classes:
        probability = math.exp(widened(logits[row, j]) - largest) / total
        probabilities[row, j] = rounded(probability, probabilities)
        j += threads
    if t == 0:
        losses[row] = NAN
        if 0 <= target < classes:
            losses[row] = math.log(total) - (widened(logits[row, target]) - largest)


@_by_rows
@cuda.jit
def cross_entropy_grad(probabilities, targets, dlosses, dlogits):
    """dlogits[i] = (probabilities[i] - one_hot(targets[i])) * dlosses[i]."""
    row, classes = cuda.blockIdx.x, probabilities.shape[1]
    target, dloss = targets[row], dlosses[row]
    if target < 0 or target >= classes:
        dloss = NAN
    j = cuda.threadIdx.x
    while j < classes:
        hit = float32(1) if j == target else float32(0)
        dlogits[row, j] = rounded((widened(probabilities[row, j]) - hit) * dloss, dlogits)
        j += cuda.blockDim.x
