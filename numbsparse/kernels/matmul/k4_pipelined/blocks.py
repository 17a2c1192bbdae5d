"""Weight-gradient: kept blocks, several side by side where they are small."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, from_dtype, uint32

from numbsparse.kernels.matmul.aligned import BYTES
from numbsparse.kernels.matmul.k3_registers import LEAST_THREADS, QUAD, Tile, products
from numbsparse.kernels.matmul.k4_pipelined.fetches import STAGES
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait, cp_async_zero_fill


@cache
def weight_grad_kernel(B: int, tile: Tile, dtype: Any) -> Any:
    BM, BN, BK, TM, TN = tile
    TY, TX, PARTS = BM // TM, BN // TN, B // BN
    TYPE = from_dtype(dtype)
    BLOCKS = max(LEAST_THREADS // tile.threads, 1)
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    SHAPE = (STAGES, BK, BLOCKS * BN // QUAD, QUAD)
    fetch = fetch_blocks(B, BLOCKS, tile, dtype)
    add_products = products(tile)

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
        xs = cuda.shared.array(SHAPE, TYPE, ALIGNMENT)  # (stage, batch, in)
        dys = cuda.shared.array(SHAPE, TYPE, ALIGNMENT)  # (stage, batch, out)
        acc = cuda.local.array((TM, TN), float32)
        for i in range(TM):
            for j in range(TN):
                acc[i, j] = 0
        t = uint32(cuda.threadIdx.x)
        mine, ty, tx = t // (TY * TX), t // TX % TY, t % TX
        part = cuda.blockIdx.x % (PARTS * PARTS)
        first_block = cuda.blockIdx.x // (PARTS * PARTS) * BLOCKS
        top, left = part // PARTS * BM, part % PARTS * BN
        _, x_slot = slot_of(block_rows, first_block, mine)
        _, dy_slot = slot_of(block_columns, first_block, mine)
        y_quad, x_quad = uint32(x_slot * (BM // QUAD) + ty), uint32(dy_slot * (BN // QUAD) + tx)
        steps = (batch + BK - 1) // BK
        for step in range(-AHEAD, steps):  # the first ones only fetch
            if step >= 0:
                cp_async_wait(PENDING)
                cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                first, stage = coming * BK, coming % STAGES
                ahead = (first, batch - first, first_block)
                fetch(x, x_stride, in_features, block_rows, ahead, top, xs[stage])
                fetch(dy, dy_stride, out_features, block_columns, ahead, left, dys[stage])
            cp_async_commit()
            if step >= 0:
                stage = step % STAGES
                add_products(xs[stage], dys[stage], y_quad, x_quad, acc)
        block = first_block + mine
        if block < dvalues.shape[0]:
            in_rows = in_features - block_rows[block] * B
            in_columns = out_features - block_columns[block] * B
            for m in range(TM):
                i = top + (ty + m // QUAD * TY) * QUAD + m % QUAD
                for k in range(TN):
                    j = left + (tx + k // QUAD * TX) * QUAD + k % QUAD
                    inside = i < in_rows and j < in_columns
                    dvalues[block, i, j] = acc[m, k] if inside else float32(0)

    return kernel


@cuda.jit(device=True)
def slot_of(lines, first_block, p):
    """The line of block first_block + p, and whose features in the tile it reads.

    Neighbours in a row of blocks read the same columns of x: they are fetched once, for the first.
    """
    line = lines[min(first_block + p, lines.shape[0] - 1)]
    return line, uint32(0) if line == lines[first_block] else uint32(p)


@cache
def fetch_blocks(B: int, BLOCKS: int, tile: Tile, dtype: Any) -> Any:
    """tile[m] = x[first + m, features of some blocks] side by side, and 0 beyond the batch."""
    ITEM = dtype.itemsize
    RUN, BN, BK, THREADS = BYTES // ITEM, tile.BN, tile.BK, BLOCKS * tile.threads
    WIDTH = BLOCKS * BN
    LANES = WIDTH // RUN
    ROWS = min(THREADS // LANES, BK)  # fetched at once

    @cuda.jit(device=True)
    def fetch(x, stride, features, lines, ahead, start, tile):
        first, rows, first_block = ahead
        t = uint32(cuda.threadIdx.x)
        i = t % LANES * RUN
        line, slot = slot_of(lines, first_block, i // BN)
        c = line * B + start + i % BN
        n = min(max(features - c, 0) * ITEM, BYTES)
        for step in range(BK // ROWS):
            m = uint32(t // LANES + step * ROWS)
            if m < BK and slot == i // BN:
                source_at = (first + m) * stride + c
                cp_async_zero_fill(tile, m * WIDTH + i, x, source_at, n if m < rows else 0)

    return fetch
