"""What the threads of a block find out together: those of a warp by a tree in registers.

All has a fixed order: the same values give the same bits. By a tree in shared memory functions of
8 to 700 rows took 1.1 times as long at the mean (H200).
"""

import numpy as np
from numba import cuda, float32, float64

from numbsparse.device import SIMULATED

MOST_THREADS = 8 if SIMULATED else 256  # a constant: shared arrays take constant shapes
LEAST_THREADS = 2 if SIMULATED else 32
# Of a row of so many values: rows of 32,000 and 50,000, up to 16 of them, took 0.66 to 0.96 of the
# time that 256 threads took with four loads under way; of 4,100 and fewer up to 2.6 times as long.
LONG, THREADS_OF_LONG = 16384, 8 if SIMULATED else 512
WARP = 1 if SIMULATED else 32  # threads that read each other's registers
ALL = 0xFFFFFFFF  # lanes

LOWEST = np.float32(-np.inf)


def threads_for(n: int, most: int = MOST_THREADS) -> int:
    """Threads of a block that walks n items together: a power of two, as the tree needs."""
    threads = LEAST_THREADS
    while threads < min(n, most):
        threads *= 2
    return threads


def threads_of_row(width: int) -> int:
    """Threads of a block that has a row of so many values."""
    return threads_for(width, THREADS_OF_LONG if width >= LONG else MOST_THREADS)


@cuda.jit(device=True)
def plus(a, b):
    return a + b


@cuda.jit(device=True)
def larger(a, b):
    """The larger of two, or the NaN."""
    return a if a >= b or a != a else b


def _joining(join, number=float32):
    """All threads' values joined, for all of them."""
    warps = THREADS_OF_LONG // WARP

    @cuda.jit(device=True)
    def joined(value):
        scratch = cuda.shared.array(warps, number)
        t, apart = cuda.threadIdx.x, WARP // 2
        while apart:
            value = join(value, cuda.shfl_xor_sync(ALL, value, apart))
            apart //= 2
        if t % WARP == 0:
            scratch[t // WARP] = value
        cuda.syncthreads()
        whole = scratch[0]
        for warp in range(1, cuda.blockDim.x // WARP):
            whole = join(whole, scratch[warp])
        cuda.syncthreads()  # scratch may be written again
        return whole

    return joined


block_sum, block_max, block_sum64 = _joining(plus), _joining(larger), _joining(plus, float64)
