"""Blocks of a block-sparse matrix times a number each, and the dot products of blocks.

Stored blocks are flat, `width` values each. `where` says which block of an array belongs to a block
of the other, -1 where none does; a block whose gate is zero is zeros, whatever it holds.
"""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, int64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import rounded, widened

ZERO = np.float32(0)
LANES = 8 if SIMULATED else 128  # threads that sum a block together, a power of 2


def scale_blocks(a, where, by, gates, to_all, out):
    """out[b] = a[where[b]] * by[g], (blocks, B, B); g = b if `to_all`, 0 or 1, else where[b]."""
    width = out.shape[1] * out.shape[2]
    args = a.span, where, by, gates, to_all, width, out.span
    launch(scale_blocks_kernel, blocks(out.size), THREADS, *args)


def block_dots(a, b, where, gates, dots):
    """dots[b] = the sum of a[where[b]] * b[b], (n_blocks,)."""
    width = b.shape[1] * b.shape[2]
    launch(block_dots_kernel, dots.size, LANES, a.span, b.span, where, gates, width, dots)


@cuda.jit
def scale_blocks_kernel(a, where, by, gates, to_all, width, out):
    i = cuda.grid(1)
    if i < out.size:
        block = i // width
        source = int64(where[block])
        gate = block if to_all else source
        if source < 0 or gates[gate] == ZERO:
            out[i] = rounded(ZERO, out)
        else:
            value = widened(a[source * width + i - block * width]) * by[gate]
            out[i] = rounded(value, out)


@cuda.jit
def block_dots_kernel(a, b, where, gates, width, dots):
    scratch = cuda.shared.array(LANES, float32)
    t, block = cuda.threadIdx.x, int64(cuda.blockIdx.x)
    source = int64(where[block])
    acc = float32(0)
    if source >= 0 and gates[block] != ZERO:
        for i in range(t, width, LANES):
            acc += widened(a[source * width + i]) * widened(b[block * width + i])
    scratch[t] = acc
    half = LANES // 2
    while half:
        cuda.syncthreads()
        if t < half:
            scratch[t] += scratch[t + half]
        half //= 2
    if t == 0:
        dots[block] = scratch[0]
