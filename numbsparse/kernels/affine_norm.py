"""Layer normalization with gain, bias and what follows it, in one pass each way.

v = (x - mean) / std * gain + bias;  y = v, relu(v), v * other or relu(v + other): see `KINDS`.

Arrays are (rows, width), of any strides; a gain is (groups, width), and row r takes its line
r % groups. A block of threads has a row, which it reads once: a thread keeps its items. Loads are
issued together, before stores: a load is not moved past a store. All in float32.
"""

import math
from functools import cache

import numpy as np
from numba import cuda, float32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import WARP, threads_for
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels
from numbsparse.kernels.sums import adding

KINDS = ("plain", "relu", "times", "plus_relu")

ZERO = np.float32(0)
MOST_THREADS = 8 if SIMULATED else 1024
MOST_WARPS = MOST_THREADS // WARP
SCRATCH = 2 * MOST_WARPS
LIMIT = {} if SIMULATED else {"max_registers": 64}  # what that many threads leave for each
COLUMNS, ROWS = (4, 2) if SIMULATED else (32, 8)  # of a table of threads that sums columns
TABLE = COLUMNS * ROWS
PART = 4 if SIMULATED else 64  # rows of a line that are summed together


def forward(kind, x, gain, bias, eps, other, y, mean, inverse_std):
    """y, and the statistics of each row, which `backward` takes. `other` is None without one."""
    rows, width = x.shape
    threads, items = _threads(width)
    arrays = x, gain, bias, eps, x if other is None else other, y, mean, inverse_std
    kernel = forward_kernel(kind, items, copy_engine())
    launch(kernel, rows, threads, *arrays, overlap=copy_engine())


def backward(kind, x, mean, inverse_std, gain, bias, other, y, dy, dx, dv, dother):
    """dx, dv and, of "times", dother. Of "plain" dv is dy, and of "plus_relu" dother is dv."""
    rows, width = x.shape
    threads, items = _threads(width)
    statistics = x, mean, inverse_std, gain, bias, x if other is None else other
    gradients = y, dy, dx, dx if dv is None else dv, dx if dother is None else dother
    kernel = backward_kernel(kind, items, copy_engine())
    launch(kernel, rows, threads, *statistics, *gradients, overlap=copy_engine())


def _threads(width):
    """Threads of a row, a power of two, and the items of each."""
    threads = threads_for(width, MOST_THREADS)
    return threads, -(-width // threads)


def parts(rows):
    """In how many parts the rows of each line of a gain are summed."""
    return -(-rows // PART)


def sums(x, mean, inverse_std, dv, dgain, dbias):
    """dgain[p], dbias[p] = the sums over part p of the rows of dv * (x - mean) / std, and of dv.

    Both are float32, (parts, groups, width).
    """
    parts, groups, width = dgain.shape
    grid = (-(-width // COLUMNS), groups, parts)
    launch(sums_kernel, grid, (COLUMNS, ROWS), x, mean, inverse_std, dv, dgain, dbias)


@cache
def forward_kernel(kind, items, overlap):
    times, plus, rectifies = kind == "times", kind == "plus_relu", "relu" in kind
    add = adding(1, MOST_WARPS)

    @cuda.jit(**LIMIT)
    def affine_norm_kernel(x, gain, bias, eps, other, y, mean, inverse_std):
        scratch = cuda.shared.array(SCRATCH, float32)
        xr, total = cuda.local.array(items, float32), cuda.local.array(1, float32)
        row, t, threads, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, x.shape[1]
        line = row % gain.shape[0]
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        total[0] = ZERO
        for k in range(items):
            j = t + k * threads
            xr[k] = widened(x[row, j]) if j < width else ZERO
            total[0] += xr[k]
        add(total, scratch)
        middle, total[0] = total[0] / float32(width), ZERO
        for k in range(items):
            xr[k] -= middle
            if t + k * threads < width:
                total[0] += xr[k] * xr[k]
        add(total, scratch)
        scale = float32(1) / math.sqrt(total[0] / float32(width) + eps)
        for k in range(items):
            j = t + k * threads
            if j < width:
                v = xr[k] * scale * widened(gain[line, j]) + widened(bias[line, j])
                if times:
                    v *= widened(other[row, j])
                if plus:
                    v += widened(other[row, j])
                if rectifies:
                    v = ZERO if v <= ZERO else v
                xr[k] = v
        for k in range(items):
            j = t + k * threads
            if j < width:
                y[row, j] = rounded(xr[k], y)
        if t == 0:
            mean[row] = middle
            inverse_std[row] = scale

    return affine_norm_kernel


@cache
def backward_kernel(kind, items, overlap):
    times, rectifies, stores = kind == "times", "relu" in kind, kind != "plain"
    add = adding(2, MOST_WARPS)

    @cuda.jit(**LIMIT)
    def affine_norm_grad_kernel(x, mean, inverse_std, gain, bias, other, y, dy, dx, dv, dother):
        scratch = cuda.shared.array(SCRATCH, float32)
        nr, dr = cuda.local.array(items, float32), cuda.local.array(items, float32)
        of_other = cuda.local.array(items if times else 1, float32)
        row, t, threads, width = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, x.shape[1]
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        line, middle, scale = row % gain.shape[0], mean[row], inverse_std[row]
        for k in range(items):
            j = t + k * threads
            nr[k], dr[k] = ZERO, ZERO
            if j < width:
                nr[k], dr[k] = (widened(x[row, j]) - middle) * scale, widened(dy[row, j])
                if rectifies:
                    dr[k] = dr[k] if widened(y[row, j]) > ZERO else ZERO
        sums = cuda.local.array(2, float32)  # of gradients, and of their products with nr
        sums[0], sums[1] = ZERO, ZERO
        for k in range(items):
            j = t + k * threads
            if j < width:
                weight = widened(gain[line, j])
                if times:
                    of_other[k] = dr[k] * (nr[k] * weight + widened(bias[line, j]))
                    dr[k] *= widened(other[row, j])
                sums[0] += dr[k] * weight
                sums[1] += dr[k] * weight * nr[k]
        add(sums, scratch)
        mean_total, mean_dot = sums[0] / float32(width), sums[1] / float32(width)
        for k in range(items):
            j = t + k * threads
            if j < width:
                slope = dr[k] * widened(gain[line, j]) - mean_total - nr[k] * mean_dot
                dx[row, j] = rounded(scale * slope, dx)
                if stores:
                    dv[row, j] = rounded(dr[k], dv)
                if times:
                    dother[row, j] = rounded(of_other[k], dother)

    return affine_norm_grad_kernel


@cuda.jit
def sums_kernel(x, mean, inverse_std, dv, dgain, dbias):
    gains = cuda.shared.array(TABLE, float32)
    biases = cuda.shared.array(TABLE, float32)
    along, down, line = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y
    column, t = cuda.blockIdx.x * COLUMNS + along, down * COLUMNS + along
    part, groups, (rows, width) = cuda.blockIdx.z, dgain.shape[1], x.shape
    start, end = part * PART * groups, min(rows, (part + 1) * PART * groups)
    for_gain, for_bias = float32(0), float32(0)
    if column < width:
        for row in range(start + line + down * groups, end, ROWS * groups):
            d = widened(dv[row, column])
            for_gain += d * (widened(x[row, column]) - mean[row]) * inverse_std[row]
            for_bias += d
    gains[t], biases[t] = for_gain, for_bias
    cuda.syncthreads()
    if down == 0 and column < width:
        for other in range(1, ROWS):
            for_gain += gains[other * COLUMNS + along]
            for_bias += biases[other * COLUMNS + along]
        dgain[part, line, column] = for_gain
        dbias[part, line, column] = for_bias
