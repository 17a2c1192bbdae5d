"""Norms of the kept blocks: a block of threads per kept block.

l1 = sum(|v|), l2 = sqrt(sum(v**2)), max = max(|v|), in float32, by a tree in a fixed order.
"""

from functools import cache
from math import sqrt
from typing import Any

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import MOST_THREADS, block_max, block_sum, larger, plus, threads_for
from numbsparse.kernels.floats import widened


def block_norms(by, values, norms):
    """norms[b] = that norm of values[b]; values (n, width)."""
    launch(norms_kernel(by), values.shape[0], threads_for(values.shape[1]), values, norms)


@cache
def norms_kernel(by: str) -> Any:
    SQUARED, join, joined = by == "l2", *((larger, block_max) if by == "max" else (plus, block_sum))

    @cuda.jit
    def kernel(values, norms):
        scratch = cuda.shared.array(MOST_THREADS, float32)
        b, norm = cuda.blockIdx.x, float32(0)
        for i in range(cuda.threadIdx.x, values.shape[1], cuda.blockDim.x):
            value = widened(values[b, i])
            norm = join(norm, value * value if SQUARED else abs(value))
        norm = joined(norm, scratch)
        if cuda.threadIdx.x == 0:
            norms[b] = sqrt(norm) if SQUARED else norm

    return kernel
