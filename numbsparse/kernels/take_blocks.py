"""Blocks of a matrix in another order, others between them: a block of threads per kept block."""

import numpy as np
from numba import cuda

from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import threads_for
from numbsparse.kernels.floats import rounded

ZERO = np.float32(0)


def take_blocks(values, where, fresh, taken):
    """taken[i] = values[where[i]], or fresh[i] where that is -1; zeros there without `fresh`.

    values (n, width); where (m,) int32; fresh, taken (m, width).
    """
    m, width = taken.shape
    beside = values if fresh is None else fresh
    args = values, where, beside, int(fresh is not None), taken
    launch(take_blocks_kernel, m, threads_for(width), *args)


@cuda.jit
def take_blocks_kernel(values, where, fresh, has_fresh, taken):
    i, width = cuda.blockIdx.x, taken.shape[1]
    row = where[i]
    for column in range(cuda.threadIdx.x, width, cuda.blockDim.x):
        if row >= 0:
            taken[i, column] = values[row, column]
        elif has_fresh:
            taken[i, column] = fresh[i, column]
        else:
            taken[i, column] = rounded(ZERO, taken)
