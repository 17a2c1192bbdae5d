"""What the threads of a block find out together, by a tree in shared memory.

The tree has a fixed order: the same values give the same bits.
"""

import numpy as np
from numba import cuda

from numbsparse.device import SIMULATED

MOST_THREADS = 8 if SIMULATED else 256  # a constant: shared arrays take constant shapes
LEAST_THREADS = 2 if SIMULATED else 32

LOWEST = np.float32(-np.inf)


def threads_for(n: int) -> int:
    """Threads of a block that walks n items together: a power of two, as the tree needs."""
    threads = LEAST_THREADS
    while threads < min(n, MOST_THREADS):
        threads *= 2
    return threads


@cuda.jit(device=True)
def plus(a, b):
    return a + b


@cuda.jit(device=True)
def larger(a, b):
    """The larger of two, or the NaN."""
    return a if a >= b or a != a else b


def _tree(join):
    """All threads' values joined, for all of them. `scratch` is shared, one item a thread."""

    @cuda.jit(device=True)
    def joined(value, scratch):
        t, half = cuda.threadIdx.x, cuda.blockDim.x // 2
        scratch[t] = value
        cuda.syncthreads()
        while half:
            if t < half:
                scratch[t] = join(scratch[t], scratch[t + half])
            cuda.syncthreads()
            half //= 2
        whole = scratch[0]
        cuda.syncthreads()  # scratch may be written again
        return whole

    return joined


block_sum, block_max = _tree(plus), _tree(larger)
