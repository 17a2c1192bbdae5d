"""Functions between a row and its halves, in float32.

Rows of n values become rows of 2n, or the other way; all arrays are C-contiguous and flat. Threads
take several rows of a column at once, as in `several`.
"""

import math

from numba import cuda, uint64

from numbsparse.device.launch import launch
from numbsparse.kernels import elementwise
from numbsparse.kernels.elementwise import ONE, ZERO
from numbsparse.kernels.floats import rounded
from numbsparse.kernels.several import (
    ALONG,
    DEEP,
    ROWS,
    WIDEST,
    in_column,
    own_rows,
    read,
    table_grid,
)

_sigmoid = cuda.jit(device=True)(elementwise.sigmoid)


def _by_columns(kernel):
    """The kernel, to be called with n, the number of rows and arrays."""

    def start(n, rows, *arrays):
        for begin in range(0, n, WIDEST):
            launch(kernel, *table_grid(rows, min(n - begin, WIDEST)), n, rows, begin, *arrays)

    return start


@cuda.jit(device=True)
def own_column(begin):
    return begin + cuda.blockIdx.y * ALONG + cuda.threadIdx.x


@_by_columns
@cuda.jit
def concat_elu(n, rows, begin, x, y):
    """y[row] = elu(x[row]), elu(-x[row])."""
    j = own_column(begin)
    if j < n:
        own, first, last = own_rows(rows)
        values = read(x, in_column(own, n, j))
        upper, lower = in_column(own, 2 * n, j), in_column(own, 2 * n, j + n)
        for k in range(DEEP):
            if first + uint64(k * ROWS) <= last:
                value = values[k]
                low = math.expm1(-abs(value))
                y[upper[k]] = rounded(value if value > ZERO else low, y)
                y[lower[k]] = rounded(low if value > ZERO else -value, y)


@_by_columns
@cuda.jit
def concat_elu_grad(n, rows, begin, x, dy, dx):
    """dx[row] = dy[row, :n] elu'(x[row]) - dy[row, n:] elu'(-x[row])."""
    j = own_column(begin)
    if j < n:
        own, first, last = own_rows(rows)
        places = in_column(own, n, j)
        values = read(x, places)
        upper, lower = read(dy, in_column(own, 2 * n, j)), read(dy, in_column(own, 2 * n, j + n))
        for k in range(DEEP):
            if first + uint64(k * ROWS) <= last:
                e = math.exp(-abs(values[k]))
                up = values[k] > ZERO
                slope = upper[k] - lower[k] * e if up else upper[k] * e - lower[k]
                dx[places[k]] = rounded(slope, dx)


@_by_columns
@cuda.jit
def glu(n, rows, begin, x, y):
    """y[row] = x[row, :n] sigmoid(x[row, n:])."""
    j = own_column(begin)
    if j < n:
        own, first, last = own_rows(rows)
        values, gates = read(x, in_column(own, 2 * n, j)), read(x, in_column(own, 2 * n, j + n))
        places = in_column(own, n, j)
        for k in range(DEEP):
            if first + uint64(k * ROWS) <= last:
                y[places[k]] = rounded(values[k] * _sigmoid(gates[k]), y)


@_by_columns
@cuda.jit
def glu_grad(n, rows, begin, x, dy, dx):
    """dx[row] = dy[row] s, dy[row] x[row, :n] s (1 - s), with s = sigmoid(x[row, n:])."""
    j = own_column(begin)
    if j < n:
        own, first, last = own_rows(rows)
        upper, lower = in_column(own, 2 * n, j), in_column(own, 2 * n, j + n)
        values, gates, slopes = read(x, upper), read(x, lower), read(dy, in_column(own, n, j))
        for k in range(DEEP):
            if first + uint64(k * ROWS) <= last:
                gate = _sigmoid(gates[k])
                dx[upper[k]] = rounded(slopes[k] * gate, dx)
                dx[lower[k]] = rounded(slopes[k] * values[k] * gate * (ONE - gate), dx)
