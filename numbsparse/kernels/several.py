"""A function of two arrays with several values under way in each thread, to keep the memory busy.

For the two usual cases of large arrays: both alike and without gaps, and a row added to, or
multiplied with, each row of a table. No place needs a division.
"""

from __future__ import annotations

from numba import cuda, uint64

from numbsparse.device import SIMULATED
from numbsparse.kernels.floats import rounded, widened

THREADS = 32 if SIMULATED else 256
ALONG, ROWS = (4, 8) if SIMULATED else (32, 8)  # of a block of threads on a table
DEEP = 4  # values of a thread
WIDEST = ALONG * (2**16 - 1)  # a row that a grid can have


def flat_grid(size):
    return -(-size // (THREADS * DEEP)), THREADS


def table_grid(rows, width):
    return (-(-rows // (ROWS * DEEP)), -(-width // ALONG)), (ALONG, ROWS)


@cuda.jit(device=True)
def four(first, step, last):
    """first, first + step, ... up to `last`, which stands in for those beyond it."""
    second, third, fourth = first + step, first + step + step, first + step + step + step
    return min(first, last), min(second, last), min(third, last), min(fourth, last)


@cuda.jit(device=True)
def read(a, places):
    return (
        widened(a[places[0]]),
        widened(a[places[1]]),
        widened(a[places[2]]),
        widened(a[places[3]]),
    )


def of_arrays(function):
    """out[i] = function(a[i], b[i])."""

    @cuda.jit
    def flat_kernel(out, a, b):
        first = uint64(cuda.blockIdx.x) * uint64(THREADS * DEEP) + uint64(cuda.threadIdx.x)
        last, step = uint64(out.size - 1), uint64(THREADS)
        places = four(first, step, last)
        x, y = read(a, places), read(b, places)
        for k in range(DEEP):
            place = first + uint64(k) * step
            if place <= last:
                out[place] = rounded(function(x[k], y[k]), out)

    return flat_kernel


def of_array_and_row(function):
    """out[i, j] = function(a[i, j], b[j]), all flat; b has `width` items."""

    @cuda.jit
    def table_kernel(out, a, b, rows, width):
        j = cuda.blockIdx.y * ALONG + cuda.threadIdx.x
        if j >= width:
            return
        first = uint64(cuda.blockIdx.x) * uint64(ROWS * DEEP) + uint64(cuda.threadIdx.y)
        last, step, n = uint64(rows - 1), uint64(ROWS), uint64(width)
        lines, column = four(first, step, last), uint64(j)
        places = (
            lines[0] * n + column,
            lines[1] * n + column,
            lines[2] * n + column,
            lines[3] * n + column,
        )
        x, y = read(a, places), widened(b[column])
        for k in range(DEEP):
            if first + uint64(k) * step <= last:
                out[places[k]] = rounded(function(x[k], y), out)

    return table_kernel
