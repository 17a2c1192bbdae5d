"""The weight-gradient of 16-bit types: dvalues[b] = x[:, rows of b].T @ dy[:, columns of b].

A block of threads takes up to 64 x 64 of a block of w. Where the warps are more than the tiles of
32 x 32 in it, they share one and take their rows of each step; their sums meet in shared memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int64, uint16, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import aligned_lines
from numbsparse.kernels.matmul.k5_tensor_core import halves
from numbsparse.kernels.matmul.k5_tensor_core.fetches import bytes_of
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
)

PIECE = halves.PIECE
WARPS = 4
THREADS = 32 * WARPS
STAGES = 4


class Sides(NamedTuple):
    """Which operands are feature-major."""

    x_turned: bool
    dy_turned: bool


def weight_grad(x, dy, index, dvalues):
    n_blocks, size, _ = dvalues.shape
    (batch, in_features), out_features, dtype = x.shape, dy.shape[1], x.dtype.name
    x, dy, dvalues = (a.view(np.uint16) for a in (x, dy, dvalues))
    (x, x_stride, x_turned), (dy, dy_stride, dy_turned) = aligned_lines(x), aligned_lines(dy)
    grid = n_blocks * (size // min(size, 64)) ** 2
    launch(
        kernel_for(dtype, size, Sides(x_turned, dy_turned)), grid, THREADS,
        batch, x, x_stride, in_features, dy, dy_stride, out_features,
        index.block_rows, index.block_columns, dvalues,
    )  # fmt: skip


@cache
def kernel_for(dtype: str, B: int, sides: Sides) -> Any:
    BM = min(B, 64)  # of x's and of dy's features
    BK = 2048 // BM  # rows of a step: 4 KB a stage and operand
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    SIDE = min(BM, 32)  # of a warp's tile
    ACROSS, PARTS = BM // SIDE, B // BM
    SLICES = WARPS // (ACROSS * ACROSS)  # warps that share a tile, each with its rows of a step
    DEPTH = BK // SLICES
    TA, TB, SIZE = SIDE // 16, SIDE // 8, BK * BM
    STAGE, RING, SUMS, ACC = 2 * SIZE, 2 * STAGES * SIZE, (SLICES, BM, BM), (TA, TB, 4)
    X_PIECES, Y_PIECES = ((BK if turned else BM) // PIECE for turned in sides)
    begin_x, begin_dy, add_products = halves.products(
        dtype, TA, TB, DEPTH, X_PIECES, sides.x_turned, Y_PIECES, sides.dy_turned
    )
    fetch_x, fetch_dy = (fetch_features(BM, BK, turned) for turned in sides)
    x_turned, dy_turned = sides
    pack = halves.PACK[dtype]

    @cuda.jit
    def kernel(
        batch,
        x,
        x_stride,
        in_features,
        dy,
        dy_stride,
        out_features,
        block_rows,
        block_columns,
        dvalues,
    ):
        ring = cuda.shared.array(RING, uint16, ALIGNMENT)  # stages, each of x and of dy
        sums = cuda.shared.array(SUMS, float32)
        acc = cuda.local.array(ACC, float32)
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    acc[m, n, i] = 0
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        mine = warp // (ACROSS * ACROSS) * DEPTH
        ty, tx = warp // ACROSS % ACROSS * SIDE, warp % ACROSS * SIDE
        part = cuda.blockIdx.x % (PARTS * PARTS)
        block = cuda.blockIdx.x // (PARTS * PARTS)
        top, left = part // PARTS * BM, part % PARTS * BM
        row, column = block_rows[block] * B + top, block_columns[block] * B + left

        x_lane = begin_x(ty, mine // PIECE) if x_turned else begin_x(mine, ty // PIECE)
        dy_lane = begin_dy(tx, mine // PIECE) if dy_turned else begin_dy(mine, tx // PIECE)
        steps = (batch + BK - 1) // BK
        for step in range(-AHEAD, steps):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                start = uint32(coming) % STAGES * STAGE
                fetch_x(x, x_stride, batch, coming * BK, row, in_features, ring, start)
                fetch_dy(
                    dy, dy_stride, batch, coming * BK, column, out_features, ring, start + SIZE
                )
            cp_async_commit()
            if step >= 0:
                start = uint32(step) % STAGES * STAGE
                add_products(ring, start + x_lane, start + SIZE + dy_lane, acc)

        slice_ = warp // (ACROSS * ACROSS)
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    in_row = ty + m * 16 + halves.row_of(lane, i)
                    in_column = tx + n * 8 + halves.column_of(lane, i)
                    sums[slice_, in_row, in_column] = acc[m, n, i]
        cuda.syncthreads()
        for item in range(t, BM * BM, THREADS):
            i, j = item // BM, item % BM
            total = float32(0)
            if row + i < in_features and column + j < out_features:
                for s in range(SLICES):
                    total += sums[s, i, j]
            dvalues[block, top + i, left + j] = uint16(pack(total, total) & uint32(0xFFFF))

    return kernel


@cache
def fetch_features(BM: int, BK: int, turned: bool) -> Any:
    """tile[m] = features of a block in row first + m of x, or of x.T turned; 0 beyond the edges."""
    HEIGHT, PIECES = (BM, BK // PIECE) if turned else (BK, BM // PIECE)
    LINES = THREADS // PIECES  # fetched at once
    COUNT = HEIGHT // LINES
    n_bytes, (place_in, move) = bytes_of(PIECE), halves.places(PIECES)

    @cuda.jit(device=True)
    def fetch(x, stride, batch, first, c, features, tile, start):
        t = uint32(cuda.threadIdx.x)
        down, across = (c, first) if turned else (first, c)
        height, width = (features, batch) if turned else (batch, features)
        line = down + t // PIECES
        source = line * stride + across + t % PIECES * PIECE
        n = n_bytes(width - int64(across) - int64(t % PIECES * PIECE))
        at = start + place_in(t // PIECES, t % PIECES)
        for i in range(COUNT):
            inside = line + i * LINES < height
            item = move(at, i * LINES, 0)
            if n == 16 and inside:
                cp_async(tile, item, x, source + i * LINES * stride)
            else:
                row = source + i * LINES * stride if inside else 0
                cp_async_zero_fill(tile, item, x, row, n if inside else uint32(0))

    return fetch
