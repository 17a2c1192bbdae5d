"""The blocks of w in the order of the steps, each value in the register where an mma wants it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import copy
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE
from numbsparse.kernels.ptx import movmatrix_trans, store_2xu32, store_4xu32

THREADS = 128


def packed(
    values: DeviceArray, halves: DeviceArray, lines: DeviceArray, features: int, turned: bool
) -> DeviceArray:
    """uint32, a step after another: of each lane (B / 8 columns of squares, 2 halves) of 8 x 8.

    What lies beyond the last of the features that are summed over becomes 0.
    """
    B, n_steps = values.shape[1], halves.size // 2
    if not values.is_contiguous or values.address % 4:
        strided, values = values, empty(values.shape, values.dtype)
        copy(values, strided)
    out = empty((n_steps * 8 * B,), "uint32")
    grid = -(-n_steps * 32 // THREADS)
    pairs = DeviceArray(values.address, (values.shape[0], B, B // 2), np.uint32, None, values)
    launch(pack_kernel(B, turned), grid, THREADS, pairs, halves, lines, features, out)
    return out


@cache
def pack_kernel(B: int, turned: bool) -> Any:
    PIECES = B // PIECE
    load, WORDS = square_of(turned), 2 * PIECES

    @cuda.jit
    def kernel(pairs, halves, lines, features, out):
        item = cuda.grid(1)
        step = item // 32
        words = cuda.local.array(WORDS, uint32)
        if step < halves.size // 2:
            for half in range(2):
                piece = halves[2 * step + half]
                block, first = max(piece, 0) // PIECES, max(piece, 0) % PIECES * PIECE
                inside = features - lines[block] * B - first if piece >= 0 else 0
                for square in range(PIECES):
                    words[2 * square + half] = load(pairs, block, first, square * PIECE, inside)
            if PIECES == 1:
                store_2xu32(out, item * 2, words[0], words[1])
            else:
                store_4xu32(out, item * 4, words[0], words[1], words[2], words[3])

    return kernel


@cache
def square_of(turned: bool) -> Any:
    """Two of 8 x 8 values: of column n = lane // 4 those of features k = lane % 4 * 2 and k + 1."""

    @cuda.jit(device=True)
    def load(pairs, block, k, n, inside):
        lane = uint32(cuda.grid(1)) % 32
        row, column = lane // 4, lane % 4
        if turned:
            two = pairs[block, n + row, k // 2 + column] if inside > column * 2 else uint32(0)
            return two & uint32(0xFFFF) if inside == column * 2 + 1 else two
        two = pairs[block, k + row, n // 2 + column] if inside > row else uint32(0)
        return movmatrix_trans(two)

    return load
