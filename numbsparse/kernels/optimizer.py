"""Steps of the optimizers, a thread per weight, and the norm of many arrays without the host.

A step reads every array once and writes it once: one kernel for what NumPy does in ten passes. Its
numbers, such as the learning rate, come as an array: a captured step finds new ones there.
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda, float32

from numbsparse.device import empty
from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import MOST_THREADS, block_sum
from numbsparse.kernels.elementwise import THREADS, blocks, offset
from numbsparse.kernels.views import span, walk

PER_THREAD = 16  # squares that a thread adds
MOST_BLOCKS = 256  # on one array


def sgd_step(p, g, velocity, numbers, nesterov):
    """g' = g + weight_decay p;  v = momentum v + g';  p -= lr v; Nesterov: lr (g' + momentum v).

    numbers = lr, momentum, weight_decay.
    """
    grid, p, g = blocks(p.size), span(p), span(g)
    if velocity is None:
        launch(sgd_kernel, grid, THREADS, p, g, numbers)
    else:
        launch(momentum_kernel, grid, THREADS, p, g, span(velocity), numbers, int(nesterov))


def adam_step(p, g, m, v, numbers):
    """m = beta1 m + rest1 g;  v = beta2 v + rest2 g^2;

    p = shrink p - rate m / (root_scale sqrt(v) + eps), with g + weight_decay p for g.
    numbers = beta1, rest1, beta2, rest2, rate, root_scale, eps, shrink, weight_decay.
    """
    arrays = span(p), span(g), span(m), span(v)
    launch(adam_kernel, blocks(p.size), THREADS, *arrays, numbers)


def global_norm(arrays, norm):
    """norm[()] = the square root of the sum of all squares, in two passes and a fixed order."""
    counts = [min(-(-a.size // (MOST_THREADS * PER_THREAD)), MOST_BLOCKS) for a in arrays]
    partial, first = empty((sum(counts),), np.float32), 0
    for a, count in zip(arrays, counts, strict=True):
        shape, (strides,) = walk(a.shape, a)
        part = partial[first : first + count]
        launch(squares_kernel, count, MOST_THREADS, span(a), a.size, shape, strides, part)
        first += count
    launch(norm_kernel, 1, MOST_THREADS, partial, span(norm))


def scale_to_norm(arrays, norm, max_norm):
    """a *= min(1, max_norm / norm) for each array, with the norm read from GPU memory."""
    for a in arrays:
        shape, (strides,) = walk(a.shape, a)
        args = span(a), a.size, shape, strides, span(norm), max_norm
        launch(scale_kernel, blocks(a.size), THREADS, *args)


@cuda.jit
def sgd_kernel(p, g, numbers):
    i = cuda.grid(1)
    if i < p.size:
        lr, weight_decay = numbers[0], numbers[2]
        weight = float32(p[i])
        p[i] = weight - lr * (float32(g[i]) + weight_decay * weight)


@cuda.jit
def momentum_kernel(p, g, velocity, numbers, nesterov):
    i = cuda.grid(1)
    if i < p.size:
        lr, momentum, weight_decay = numbers[0], numbers[1], numbers[2]
        weight = float32(p[i])
        slope = float32(g[i]) + weight_decay * weight
        speed = momentum * float32(velocity[i]) + slope
        velocity[i] = speed
        p[i] = weight - lr * (slope + momentum * speed if nesterov else speed)


@cuda.jit
def adam_kernel(p, g, m, v, numbers):
    i = cuda.grid(1)
    if i < p.size:
        beta1, rest1, beta2, rest2 = numbers[0], numbers[1], numbers[2], numbers[3]
        rate, root_scale, eps = numbers[4], numbers[5], numbers[6]
        shrink, weight_decay = numbers[7], numbers[8]
        weight = float32(p[i])
        slope = float32(g[i]) + weight_decay * weight
        mean = beta1 * float32(m[i]) + rest1 * slope
        square = beta2 * float32(v[i]) + rest2 * slope * slope
        m[i] = mean
        v[i] = square
        p[i] = shrink * weight - rate * mean / (root_scale * math.sqrt(square) + eps)


@cuda.jit
def squares_kernel(a, size, shape, strides, partial):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    acc = float32(0)
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        value = float32(a[offset(i, shape, strides)])
        acc += value * value
    total = block_sum(acc, scratch)
    if cuda.threadIdx.x == 0:
        partial[cuda.blockIdx.x] = total


@cuda.jit
def norm_kernel(partial, norm):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    acc = float32(0)
    for i in range(cuda.threadIdx.x, partial.size, cuda.blockDim.x):
        acc += partial[i]
    total = block_sum(acc, scratch)
    if cuda.threadIdx.x == 0:
        norm[0] = math.sqrt(total)


@cuda.jit
def scale_kernel(a, size, shape, strides, norm, max_norm):
    i = cuda.grid(1)
    if i < size and norm[0] > max_norm:
        place = offset(i, shape, strides)
        a[place] = float32(a[place]) * (max_norm / norm[0])
