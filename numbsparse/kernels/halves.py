"""Functions between a row and its halves, in float32.

Rows of n values become rows of 2n, or the other way; all arrays are C-contiguous and flat. A warp
walks along a row, so that no thread divides to find its place; each of its threads has the values
of several rows in flight at a time, as many as it takes to keep memory busy.
"""

from __future__ import annotations

import math

from numba import cuda, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels import elementwise
from numbsparse.kernels.elementwise import ONE, ZERO
from numbsparse.kernels.floats import rounded, widened

ALONG, ROWS = (2, 2) if SIMULATED else (32, 8)  # threads of a block
DEEP = 4  # rows of a thread

_sigmoid = cuda.jit(device=True)(elementwise.sigmoid)


def concat_elu(n, x, y):
    """y[row] = elu(x[row]), elu(-x[row])."""
    _start(concat_elu_kernel, n, x.size // n, x, y)


def concat_elu_grad(n, x, dy, dx):
    """dx[row] = dy[row, :n] elu'(x[row]) - dy[row, n:] elu'(-x[row])."""
    _start(concat_elu_grad_kernel, n, x.size // n, x, dy, dx)


def glu(n, x, y):
    """y[row] = x[row, :n] sigmoid(x[row, n:])."""
    _start(glu_kernel, n, y.size // n, x, y)


def glu_grad(n, x, dy, dx):
    """dx[row] = dy[row] s, dy[row] x[row, :n] s (1 - s), with s = sigmoid(x[row, n:])."""
    _start(glu_grad_kernel, n, dy.size // n, x, dy, dx)


def _start(kernel, n, rows, *arrays):
    launch(kernel, -(-rows // (ROWS * DEEP)), (ALONG, ROWS), n, rows, *arrays)


@cuda.jit(device=True)
def places(width, rows):
    """Where the thread's rows begin, and how many there are; the last one stands in for others."""
    first, last = uint64(cuda.blockIdx.x * (ROWS * DEEP) + cuda.threadIdx.y), uint64(rows - 1)
    number = (last + uint64(ROWS) - min(first, last + uint64(1))) // uint64(ROWS)
    width, step = uint64(width), uint64(ROWS)
    second, third, fourth = first + step, first + step + step, first + step + step + step
    begins = (
        min(first, last) * width,
        min(second, last) * width,
        min(third, last) * width,
        min(fourth, last) * width,
    )
    return begins, number


@cuda.jit(device=True)
def read(a, begins, j):
    """A column's values in the thread's rows."""
    return (
        widened(a[begins[0] + j]),
        widened(a[begins[1] + j]),
        widened(a[begins[2] + j]),
        widened(a[begins[3] + j]),
    )


@cuda.jit
def concat_elu_kernel(n, rows, x, y):
    whole, number = places(2 * n, rows)
    half, _ = places(n, rows)
    for column in range(cuda.threadIdx.x, n, ALONG):
        j, second = uint64(column), uint64(column + n)
        values = read(x, half, j)
        for k in range(DEEP):
            if k < number:
                value = values[k]
                low = math.expm1(-abs(value))
                y[whole[k] + j] = rounded(value if value > ZERO else low, y)
                y[whole[k] + second] = rounded(low if value > ZERO else -value, y)


@cuda.jit
def concat_elu_grad_kernel(n, rows, x, dy, dx):
    whole, number = places(2 * n, rows)
    half, _ = places(n, rows)
    for column in range(cuda.threadIdx.x, n, ALONG):
        j, second = uint64(column), uint64(column + n)
        values, upper, lower = read(x, half, j), read(dy, whole, j), read(dy, whole, second)
        for k in range(DEEP):
            if k < number:
                e = math.exp(-abs(values[k]))
                up = values[k] > ZERO
                slope = upper[k] - lower[k] * e if up else upper[k] * e - lower[k]
                dx[half[k] + j] = rounded(slope, dx)


@cuda.jit
def glu_kernel(n, rows, x, y):
    whole, number = places(2 * n, rows)
    half, _ = places(n, rows)
    for column in range(cuda.threadIdx.x, n, ALONG):
        j, second = uint64(column), uint64(column + n)
        values, gates = read(x, whole, j), read(x, whole, second)
        for k in range(DEEP):
            if k < number:
                y[half[k] + j] = rounded(values[k] * _sigmoid(gates[k]), y)


@cuda.jit
def glu_grad_kernel(n, rows, x, dy, dx):
    whole, number = places(2 * n, rows)
    half, _ = places(n, rows)
    for column in range(cuda.threadIdx.x, n, ALONG):
        j, second = uint64(column), uint64(column + n)
        values, gates, slopes = read(x, whole, j), read(x, whole, second), read(dy, half, j)
        for k in range(DEEP):
            if k < number:
                gate = _sigmoid(gates[k])
                dx[whole[k] + j] = rounded(slopes[k] * gate, dx)
                dx[whole[k] + second] = rounded(slopes[k] * values[k] * gate * (ONE - gate), dx)
