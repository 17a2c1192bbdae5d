"""Blocks of a block-sparse matrix times a number each, and the dot products of blocks.

Stored blocks are flat, `width` values each. `where` says which block of an array belongs to a block
of the other, -1 where none does; a block whose gate is zero is zeros, whatever it holds.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int64, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.ptx import (
    load_4xu32,
    store_4xu32,
)

ZERO = np.float32(0)
LANES = 8 if SIMULATED else 128  # threads that sum a block together, a power of 2


def scale_blocks(a, where, by, gates, to_all, out):
    """out[b] = a[where[b]] * by[g], (blocks, B, B); g = b if `to_all`, 0 or 1, else where[b]."""
    width, piece = out.shape[1] * out.shape[2], BYTES // out.itemsize
    args = a.span, where, by, gates, to_all
    pieces = width // piece
    if pieces & (pieces - 1) or width % piece or (a.address | out.address) % BYTES:
        launch(scale_blocks_kernel, blocks(out.size), THREADS, *args, width, out.span)
        return
    kernel, shift = scale_pieces_kernel(out.dtype.name), pieces.bit_length() - 1
    launch(kernel, blocks(out.size // piece), THREADS, *args, shift, out.span)


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


@cache
def scale_pieces_kernel(dtype: str) -> Any:
    """The same, a thread for each of 2^shift pieces of 16 bytes: of float32, or 16-bit floats."""
    PIECE, scaled = 4 if dtype == "float32" else 8, scaling(dtype)

    @cuda.jit(device=True)
    def scale_piece(a, at, factor, out, to):
        w0, w1, w2, w3 = load_4xu32(a, at)
        store_4xu32(
            out, to, scaled(w0, factor), scaled(w1, factor), scaled(w2, factor), scaled(w3, factor)
        )

    @cuda.jit
    def kernel(a, where, by, gates, to_all, shift, out):
        i = int64(cuda.grid(1))
        if i * PIECE >= out.size:
            return
        block = i >> shift
        source = int64(where[block])
        gate, none = block if to_all else source, uint32(0)
        if source < 0 or gates[gate] == ZERO:
            store_4xu32(out, i * PIECE, none, none, none, none)
        else:
            at = (source << shift) + i - (block << shift)
            scale_piece(a, at * PIECE, by[gate], out, i * PIECE)

    return kernel


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
