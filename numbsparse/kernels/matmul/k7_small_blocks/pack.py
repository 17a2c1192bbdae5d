"""The blocks of w in the order of the steps, each value in the register where an mma wants it."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE

THREADS = 128


def packed(
    values: DeviceArray, halves: DeviceArray, lines: DeviceArray, features: int, turned: bool
) -> DeviceArray:
    """uint32, a step after another: (B / 8 columns of squares, 2 halves) of 8 x 8 per lane.

    What lies beyond the last of the features that are summed over becomes 0.
    """
    B, n_steps = values.shape[1], halves.size // 2
    registers = B // 4
    out = empty((n_steps * 32 * registers,), "uint32")
    grid = -(-n_steps * 32 // THREADS)
    launch(pack_kernel(B, turned), grid, THREADS, values, halves, lines, features, out)
    return out


@cache
def pack_kernel(B: int, turned: bool) -> Any:
    PIECES = B // PIECE

    @cuda.jit
    def kernel(values, halves, lines, features, out):
        item = cuda.grid(1)
        step, lane = item // 32, item % 32
        if step < halves.size // 2:
            for half in range(2):
                piece = halves[2 * step + half]
                block, k = piece // PIECES, piece % PIECES * PIECE + lane % 4 * 2
                inside = features - lines[max(block, 0)] * B - k if piece >= 0 else 0
                for square in range(PIECES):
                    n = square * 8 + lane // 4
                    lo, hi = uint32(0), uint32(0)
                    if inside > 0:
                        lo = uint32(values[block, n, k] if turned else values[block, k, n])
                    if inside > 1:
                        hi = uint32(values[block, n, k + 1] if turned else values[block, k + 1, n])
                    register = square * 2 + half
                    if PIECES == 1:
                        out[(step * 2 + register) * 32 + lane] = lo | hi << uint32(16)
                    else:
                        out[(step * 32 + lane) * 4 + register] = lo | hi << uint32(16)

    return kernel
