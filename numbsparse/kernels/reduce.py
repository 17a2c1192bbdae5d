"""Sums, means, maxima and norms over axes.

A block of threads is a table: x runs along outputs, y along what is reduced to each. Every thread
takes each blockDim.y-th item of its output, and a tree in shared memory joins the threads of an
output. How wide and high the table is decides which threads read side by side: high for rows of
memory, wide for columns. Where outputs are few, each is cut in parts that a second launch joins.

`reduce("sum", out, a, axes)` means out[...] = a.sum(axes).
"""

from functools import lru_cache
from math import prod, sqrt
from typing import Any

import numpy as np
from numba import cuda, float32, float64

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import LOWEST, MOST_THREADS, larger, plus
from numbsparse.kernels.elementwise import offset
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.views import collapse, strides_within

WIDTH = 4 if SIMULATED else 32  # outputs side by side, where these are neighbours in memory
PER_THREAD = 16  # items that make a part worth its thread
ENOUGH_BLOCKS = 4 if SIMULATED else 512  # more blocks than that are not made by cutting


def reduce(name: str, out: DeviceArray, a: DeviceArray, axes: tuple[int, ...]) -> None:
    """out[...] = the sum, mean or max of `a` over `axes`; `out` is C-contiguous.

    Or "sum of sizes" or "max of sizes", the size of a value being |value|; or "length", the root of
    the sum of squares, which are of float64, as of float32 they are soon inf or 0.
    """
    if out.size == 0:
        return
    joining = MAX if name.startswith("max") else SUM
    kernel = KERNELS.get(name, joining)
    walk, n, length, threads, parts = _plan(a.shape, strides_within(a, a.shape), axes)
    divisor = float(length) if name == "mean" else 1.0
    parts = 1 if name == "length" else parts  # whose sums would be of float32
    flat, grid = a.span, (-(-n // threads[0]), parts)
    if parts == 1:
        launch(kernel, grid, threads, flat, *walk, n, length, length, divisor, out.span)
        return
    partial = empty((n, parts), np.float32)
    per_part = -(-length // parts)
    launch(kernel, grid, threads, flat, *walk, n, length, per_part, 1.0, partial.span)
    walk = ((n,), (parts,), (parts,), (1,))
    threads = _threads(n, parts, neighbours=False)
    grid = (-(-n // threads[0]), 1)
    launch(joining, grid, threads, partial.span, *walk, n, parts, parts, divisor, out.span)


@lru_cache(maxsize=1024)
def _plan(shape: tuple[int, ...], strides: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """(how to walk, the number of outputs, values of each, threads, parts)."""
    kept = [i for i in range(len(shape)) if i not in axes]
    # The order of what is summed is free: walk memory upwards.
    reduced = sorted(axes, key=lambda i: -strides[i])
    (kept_shape, (kept_strides,)), (reduced_shape, (reduced_strides,)) = (
        collapse([shape[i] for i in some], [strides[i] for i in some]) for some in (kept, reduced)
    )
    n, length = prod(kept_shape), prod(reduced_shape)
    threads = _threads(n, length, neighbours=kept_strides[-1] == 1)
    walk = kept_shape, kept_strides, reduced_shape, reduced_strides
    return walk, n, length, threads, _parts(n, length, threads)


def _threads(n: int, length: int, neighbours: bool) -> tuple[int, int]:
    """(x, y) threads, powers of two: x outputs at once, y threads on each."""
    if neighbours and n >= WIDTH:
        return WIDTH, MOST_THREADS // WIDTH
    high = 1
    while high < min(length, MOST_THREADS):
        high *= 2
    return MOST_THREADS // high, high


def _parts(n: int, length: int, threads: tuple[int, int]) -> int:
    """In how many parts to cut the items of each output. It depends only on sizes."""
    useful = length // (threads[1] * PER_THREAD)
    wanted = ENOUGH_BLOCKS // -(-n // threads[0])
    return max(1, min(useful, wanted))


def _reduction(combine, identity, sizes=False, lengths=False, WIDE=float32):
    @cuda.jit
    def kernel(
        a,
        kept_shape,
        kept_strides,
        reduced_shape,
        reduced_strides,
        n,
        length,
        per_part,
        divisor,
        out,
    ):
        scratch = cuda.shared.array(MOST_THREADS, WIDE)
        x, y, part = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockIdx.y
        width, t = cuda.blockDim.x, cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        item = cuda.blockIdx.x * width + x
        first = part * per_part
        acc = identity
        if item < n:
            start = offset(item, kept_shape, kept_strides)
            for i in range(first + y, min(first + per_part, length), cuda.blockDim.y):
                place = start + offset(i, reduced_shape, reduced_strides)
                value = abs(widened(a[place])) if sizes else widened(a[place])
                acc = combine(acc, WIDE(value) * WIDE(value) if lengths else value)
        scratch[t] = acc
        cuda.syncthreads()
        half = cuda.blockDim.y // 2
        while half:
            if y < half:
                scratch[t] = combine(scratch[t], scratch[t + half * width])
            cuda.syncthreads()
            half //= 2
        if y == 0 and item < n:
            whole = sqrt(scratch[t]) if lengths else scratch[t] / divisor
            out[item * cuda.gridDim.y + part] = rounded(whole, out)

    return kernel


SUM, MAX = _reduction(plus, np.float32(0)), _reduction(larger, LOWEST)
KERNELS = {
    "sum of sizes": _reduction(plus, np.float32(0), sizes=True),
    "length": _reduction(plus, np.float64(0), lengths=True, WIDE=float64),
    "max of sizes": _reduction(larger, LOWEST, sizes=True),
}
