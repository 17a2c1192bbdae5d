"""Steps of the optimizers and of moving averages, a thread per weight, and norms without the host.

A step reads every array once and writes it once: one kernel for what NumPy does in ten passes. Its
numbers, such as the learning rate, are passed as an array: a captured step finds new ones there.
"""

import math

import numpy as np
from numba import cuda, float32, float64

from numbsparse.device import empty
from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import MOST_THREADS, block_sum64
from numbsparse.kernels.elementwise import THREADS, blocks, offset
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.views import walk

PER_THREAD = 16  # squares that a thread adds
MOST_BLOCKS = 1024  # on one array: as many as run at a time
INFINITY = np.float32(np.inf)


def sgd_step(p, g, velocity, master, numbers, nesterov):
    """g' = g + weight_decay p;  v = momentum v + g';  p -= lr v; Nesterov: lr (g' + momentum v).

    numbers = lr, momentum, weight_decay, unscale, go; the last two as in `adam_step`.
    """
    grid, arrays = blocks(p.size), (p.span, g.span, (p if master is None else master).span)
    if velocity is None:
        launch(sgd_kernel, grid, THREADS, *arrays, numbers)
    else:
        launch(momentum_kernel, grid, THREADS, *arrays, velocity.span, numbers, int(nesterov))


def adam_step(p, g, m, v, master, numbers):
    """m = beta1 m + rest1 g;  v = beta2 v + rest2 g^2;

    p = shrink p - rate m / (root_scale sqrt(v) + eps), with g + weight_decay p for g.
    numbers = beta1, rest1, beta2, rest2, rate, root_scale, eps, shrink, weight_decay, unscale, go:
    the gradient is unscale * g, and nothing is written where go is 0.

    A 16-bit parameter may have a float32 master: p is then the master rounded. Where p was set to
    something else meanwhile, the master follows it.
    """
    arrays = p.span, g.span, (p if master is None else master).span, m.span, v.span
    launch(adam_kernel, blocks(p.size), THREADS, *arrays, numbers)


def average_step(average, p, share):
    """average += share[0] * (p - average); a share of 1 makes it p, whatever it was."""
    launch(average_kernel, blocks(p.size), THREADS, average.span, p.span, share)


def global_norm(arrays, norm):
    """norm[()] = the root of the sum of all squares, of float64, in two passes of fixed order."""
    counts = [min(-(-a.size // (MOST_THREADS * PER_THREAD)), MOST_BLOCKS) for a in arrays]
    partial, first = empty((sum(counts),), np.float64), 0
    for a, count in zip(arrays, counts, strict=True):
        shape, (strides,) = walk(a.shape, a)
        part = partial[first : first + count]
        launch(squares_kernel, count, MOST_THREADS, a.span, a.size, shape, strides, part)
        first += count
    launch(norm_kernel, 1, MOST_THREADS, partial, norm.span)


def scale_to_norm(a, norm, max_norm, result):
    """result = min(1, max_norm / norm) * a, C-contiguous, with the norm read from GPU memory.

    Where the norm is not finite it is a as it is.
    """
    shape, (strides,) = walk(a.shape, a)
    args = a.span, a.size, shape, strides, norm.span, max_norm, result.span
    launch(scale_kernel, min(blocks(a.size), MOST_BLOCKS), THREADS, *args)


@cuda.jit(device=True)
def followed(master, p, i):
    """The float32 weight behind p[i]: its master, unless p[i] is no longer that one rounded."""
    kept, shown = widened(master[i]), widened(p[i])
    return kept if widened(rounded(kept, p)) == shown else shown


@cuda.jit(device=True)
def keep(weight, master, p, i):
    master[i] = rounded(weight, master)
    p[i] = rounded(weight, p)


@cuda.jit
def sgd_kernel(p, g, master, numbers):
    i = cuda.grid(1)
    if i < p.size and numbers[4] != 0:
        lr, weight_decay, unscale = numbers[0], numbers[2], numbers[3]
        weight = followed(master, p, i)
        slope = unscale * widened(g[i]) + weight_decay * weight
        keep(weight - lr * slope, master, p, i)


@cuda.jit
def momentum_kernel(p, g, master, velocity, numbers, nesterov):
    i = cuda.grid(1)
    if i < p.size and numbers[4] != 0:
        lr, momentum, weight_decay, unscale = numbers[0], numbers[1], numbers[2], numbers[3]
        weight = followed(master, p, i)
        slope = unscale * widened(g[i]) + weight_decay * weight
        speed = momentum * float32(velocity[i]) + slope
        velocity[i] = speed
        keep(weight - lr * (slope + momentum * speed if nesterov else speed), master, p, i)


@cuda.jit
def adam_kernel(p, g, master, m, v, numbers):
    i = cuda.grid(1)
    if i < p.size and numbers[10] != 0:
        beta1, rest1, beta2, rest2 = numbers[0], numbers[1], numbers[2], numbers[3]
        rate, root_scale, eps = numbers[4], numbers[5], numbers[6]
        shrink, weight_decay, unscale = numbers[7], numbers[8], numbers[9]
        weight = followed(master, p, i)
        slope = unscale * widened(g[i]) + weight_decay * weight
        mean = beta1 * float32(m[i]) + rest1 * slope
        square = beta2 * float32(v[i]) + rest2 * slope * slope
        m[i] = mean
        v[i] = square
        keep(shrink * weight - rate * mean / (root_scale * math.sqrt(square) + eps), master, p, i)


@cuda.jit
def average_kernel(average, p, share):
    i = cuda.grid(1)
    if i < p.size:
        value = widened(p[i])
        if share[0] < float32(1):
            value = average[i] + share[0] * (value - average[i])
        average[i] = value


@cuda.jit
def squares_kernel(a, size, shape, strides, partial):
    acc = float64(0)
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        value = float64(widened(a[offset(i, shape, strides)]))
        acc += value * value
    total = block_sum64(acc)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x] = total


@cuda.jit
def norm_kernel(partial, norm):
    acc = float64(0)
    for i in range(cuda.threadIdx.x, partial.size, MOST_THREADS):
        acc += partial[i]
    total = block_sum64(acc)
    if cuda.threadIdx.x == 0:
        norm[0] = math.sqrt(total)


@cuda.jit
def scale_kernel(a, size, shape, strides, norm, max_norm, result):
    share = max_norm / norm[0] if max_norm < norm[0] < INFINITY else float32(1)
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        result[i] = rounded(widened(a[offset(i, shape, strides)]) * share, result)
