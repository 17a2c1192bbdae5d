"""Stored blocks with zeros beyond the edge of their matrix: a thread per value."""

import numpy as np
from numba import cuda

from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import rounded

ZERO = np.float32(0)


def inside(values, rows, columns, in_blocks, in_features, out_features, out, together=1):
    """out[b] = values[b] within the features, (n_blocks, B, B); rows repeat every in_blocks, and so
    many block columns `together` are of the same features."""
    size = out.shape[1]
    args = values.span, rows, columns, size, in_blocks, in_features, out_features, together
    launch(inside_kernel, blocks(out.size), THREADS, *args, out.span)


@cuda.jit
def inside_kernel(values, rows, columns, size, in_blocks, in_features, out_features, together, out):
    i = cuda.grid(1)
    if i < out.size:
        line = i // size
        block = line // size
        row = rows[block] % in_blocks * size + line - block * size
        column = columns[block] // together * size + i - line * size
        if row < in_features and column < out_features:
            out[i] = values[i]
        else:
            out[i] = rounded(ZERO, out)
