"""Blocks of a block-sparse matrix times a number each, and the dot products of blocks.

Stored blocks are flat, `width` values each. `where` says which block of an array belongs to a block
of the other, -1 where none does; a block whose gate is zero is zeros, whatever it holds.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int64, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine, rounds_pairs
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.parts.aligned import BYTES
from numbsparse.kernels.parts.fragments import scaling
from numbsparse.kernels.parts.words import UNPACK
from numbsparse.kernels.ptx import (
    let_next_kernel_start,
    load_4xu32,
    store_4xu32,
    wait_for_earlier_kernels,
)

ZERO, ONE = np.float32(0), np.float32(1)
DEEP = 4  # pieces of a thread
MOST_LANES = 8 if SIMULATED else 256  # threads that sum a block together, a power of 2


def scale_blocks(a, where, by, gates, to_all, out):
    """out[b] = a[where[b]] * by[g], (blocks, B, B); g = b if `to_all`, 0 or 1, else where[b].

    `out` may be `a` where each block stays in its place and `by` are the gates.
    """
    width, piece = out.shape[1] * out.shape[2], BYTES // out.itemsize
    args, pieces = (a.span, where, by, gates, to_all), width // piece
    whole = not (pieces & (pieces - 1) or width % piece or (a.address | out.address) % BYTES)
    if not whole or (out.itemsize == 2 and not rounds_pairs()):
        launch(scale_blocks_kernel, blocks(out.size), THREADS, *args, width, out.span)
        return
    grid, shift = blocks(-(-out.size // (piece * DEEP))), pieces.bit_length() - 1
    if a.address == out.address and pieces >= DEEP:
        overlap, own = copy_engine(), (by, shift, out.span)
        launch(in_place_kernel(out.dtype.name, overlap), grid, THREADS, *own, overlap=overlap)
        return
    launch(scale_pieces_kernel(out.dtype.name), grid, THREADS, *args, shift, out.span)


def block_dots(a, b, where, gates, dots):
    """dots[b] = the sum of a[where[b]] * b[b], (n_blocks,)."""
    width, piece, dtype = b.shape[1] * b.shape[2], BYTES // b.itemsize, b.dtype.name
    if b.itemsize == 4 or width % piece or (a.address | b.address) % BYTES:
        piece, dtype = 1, None
    pieces = width // piece
    lanes = min(1 << pieces.bit_length() - 1, MOST_LANES)
    kernel, grid = dots_kernel(dtype, lanes), -(-dots.size * lanes // MOST_LANES)
    launch(kernel, grid, MOST_LANES, a.span, b.span, where, gates, pieces, dots)


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
    """The same, by pieces of 16 bytes: 3 to 6 times as fast as value by value (H200)."""
    scale = scaling_pieces(dtype)

    @cuda.jit
    def kernel(a, where, by, gates, to_all, shift, out):
        first = int64(cuda.blockIdx.x) * (THREADS * DEEP) + cuda.threadIdx.x
        scale(a, where, by, gates, to_all, shift, out, first, THREADS)

    return kernel


@cache
def in_place_kernel(dtype: str, overlap: bool) -> Any:
    """out[b] *= by[b]: what is times one is not touched, what is times zero not read.

    DEEP pieces of a thread are of one block, whose number it asks for once.
    """
    PIECE, times, APART = 4 if dtype == "float32" else 8, scaling(dtype), DEEP.bit_length() - 1

    @cuda.jit
    def kernel(by, shift, out):
        if overlap:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        t, few, zero = cuda.grid(1), shift - APART, uint32(0)
        block = t >> few
        if block < by.size and by[block] != ONE:
            first, gate = (block << shift) + t - (block << few), by[block]
            for k in range(DEEP):
                at = (first + (k << few)) * PIECE
                if gate == ZERO:
                    store_4xu32(out, at, zero, zero, zero, zero)
                else:
                    w0, w1, w2, w3 = load_4xu32(out, at)
                    w0, w1 = times(w0, gate), times(w1, gate)
                    w2, w3 = times(w2, gate), times(w3, gate)
                    store_4xu32(out, at, w0, w1, w2, w3)

    return kernel


@cache
def scaling_pieces(dtype: str, sparing: bool = False) -> Any:
    """scale(a, where, by, gates, to_all, shift, out, first, step): DEEP pieces of a thread, 16
    bytes, from the first on, a step apart, all under way at once; 2^shift of them are a block.

    sparing : whether blocks times one, and times zero, are not written
    """
    PIECE, scaled = 4 if dtype == "float32" else 8, scaling(dtype)

    @cuda.jit(device=True)
    def scale(a, where, by, gates, to_all, shift, out, first, step):
        words, factors = cuda.local.array((DEEP, 4), uint32), cuda.local.array(DEEP, float32)
        pieces = out.size // PIECE
        for k in range(DEEP):
            i = first + k * step
            factors[k] = ZERO
            for n in range(4):
                words[k, n] = uint32(0)
            if i < pieces:
                block = i >> shift
                source = int64(where[block])
                gate = block if to_all else source
                if source >= 0 and gates[gate] != ZERO and not (sparing and gates[gate] == ONE):
                    at, factors[k] = (source << shift) + i - (block << shift), by[gate]
                    w0, w1, w2, w3 = load_4xu32(a, at * PIECE)
                    words[k, 0], words[k, 1], words[k, 2], words[k, 3] = w0, w1, w2, w3
        for k in range(DEEP):
            i, own, by_this = first + k * step, words[k], factors[k]
            if i < pieces and not (sparing and by_this == ZERO):
                w0, w1 = scaled(own[0], by_this), scaled(own[1], by_this)
                w2, w3 = scaled(own[2], by_this), scaled(own[3], by_this)
                store_4xu32(out, i * PIECE, w0, w1, w2, w3)

    return scale


@cache
def dots_kernel(dtype: str | None, LANES: int) -> Any:
    """So many threads for each block, each with some of its values.

    Or, with a dtype, of pieces of eight of its 16-bit values: 2.7 times as fast (H200).
    """
    PIECE = 8 if dtype else 1
    unpack: Any = UNPACK.get(dtype or "")

    @cuda.jit(device=True)
    def of_values(a, at, b, to):
        return widened(a[at]) * widened(b[to])

    @cuda.jit(device=True)
    def of_words(x, y):
        (low, high), (lower, higher) = unpack(x), unpack(y)
        return low * lower + high * higher

    @cuda.jit(device=True)
    def of_16_bit(a, at, b, to):
        (x0, x1, x2, x3), (y0, y1, y2, y3) = load_4xu32(a, at), load_4xu32(b, to)
        return (of_words(x0, y0) + of_words(x1, y1)) + (of_words(x2, y2) + of_words(x3, y3))

    dot = of_16_bit if dtype else of_values

    @cuda.jit
    def kernel(a, b, where, gates, pieces, dots):
        scratch = cuda.shared.array(MOST_LANES, float32)
        t, i, acc = cuda.threadIdx.x, int64(cuda.grid(1)), float32(0)
        block, lane = i // LANES, i % LANES
        if block < dots.size:
            source = int64(where[block])
            if source >= 0 and gates[block] != ZERO:
                first, to = source * pieces, block * pieces
                for piece in range(lane, pieces, LANES):
                    acc += dot(a, (first + piece) * PIECE, b, (to + piece) * PIECE)
        scratch[t] = acc
        half = LANES // 2
        while half:
            cuda.syncthreads()
            if lane < half:
                scratch[t] += scratch[t + half]
            half //= 2
        if lane == 0 and block < dots.size:
            dots[block] = scratch[t]

    return kernel
