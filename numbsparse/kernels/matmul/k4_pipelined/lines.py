"""Forward and input-gradient: a tile of y, down block columns or along block rows."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, from_dtype, uint32

from numbsparse.kernels.matmul.aligned import BYTES
from numbsparse.kernels.matmul.k3_registers import QUAD, Tile
from numbsparse.kernels.matmul.k4_pipelined.fetches import (
    RUNS,
    STAGES,
    fetch_lines,
    fetch_straight,
    fetch_turned,
    locate_in,
)
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait, store_4xf32


def forward_kernel(B: int, tile: Tile, dtype: Any, store: Any) -> Any:
    return line_kernel(B, tile, dtype, store, False)


def input_grad_kernel(B: int, tile: Tile, dtype: Any, store: Any) -> Any:
    return line_kernel(B, tile, dtype, store, True)


@cache
def line_kernel(B: int, tile: Tile, dtype: Any, store: Any, turned: bool) -> Any:
    """y = x @ w down the block columns of w; x = dy and w turned give dx along the block rows."""
    BM, BN, BK, TM, TN = tile
    TY, TX = BM // TM, BN // TN
    RUN, TYPE = BYTES // dtype.itemsize, from_dtype(dtype)
    DEPTH = min(B, BK)  # rows of a block in a step
    BLOCKS, PARTS = BK // DEPTH, B // DEPTH  # blocks in a step, steps in a block
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    LINE = (BK + RUN) // QUAD
    X_SHAPE = (STAGES, BM, LINE, QUAD)
    W_SHAPE = (STAGES, BN, LINE, QUAD) if turned else (STAGES, BK, BN // QUAD, QUAD)
    locate = locate_in(B, DEPTH)
    fetch_x = fetch_lines(BM, TY, tile.threads, dtype)
    fetch_w = fetch_turned(B, tile, dtype) if turned else fetch_straight(B, tile, dtype)
    add_products = products_of_lines(tile, turned)

    @cuda.jit
    def kernel(x, stride, in_features, values, indptr, indices, blocks, y):
        xs = cuda.shared.array(X_SHAPE, TYPE, ALIGNMENT)  # (stage, batch, in)
        # (stage, in, out); turned (stage, out, in)
        ws = cuda.shared.array(W_SHAPE, TYPE, ALIGNMENT)
        acc = cuda.local.array((TM, TN), float32)
        for m in range(TM):
            for k in range(TN):
                acc[m, k] = 0
        t = uint32(cuda.threadIdx.x)
        ty, tx = t // TX, t % TX
        batch, out_features = y.shape
        tiles = (out_features + BN - 1) // BN
        top, left = cuda.blockIdx.x // tiles * BM, cuda.blockIdx.x % tiles * BN
        column, j = left // B, left % B
        begin, end = indptr[column], indptr[column + 1]
        steps = (end - begin + BLOCKS - 1) // BLOCKS * PARTS
        for step in range(-AHEAD, steps):  # the first ones only fetch
            if step >= 0:
                cp_async_wait(PENDING)
                cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                first, offset = begin + coming // PARTS * BLOCKS, coming % PARTS * DEPTH
                line = (first, end, offset, in_features)
                _, c, inside = locate(t % RUNS * RUN, line, indices, blocks)
                last = min(batch - top, BM) - 1
                fetch_x(x, top * stride + c, stride, last, inside, xs[coming % STAGES])
                fetch_w(values, j, line, indices, blocks, ws[coming % STAGES])
            cp_async_commit()  # a group in every step, even an empty one: PENDING counts groups
            if step >= 0:
                add_products(xs[step % STAGES], ws[step % STAGES], ty, tx, acc)
        for m in range(TM):
            n = top + (ty + m // QUAD * TY) * QUAD + m % QUAD
            for i in range(0, TN, QUAD):
                k = left + (tx + i // QUAD * TX) * QUAD
                if n < batch and k < out_features:
                    store(y, n, k, acc[m, i], acc[m, i + 1], acc[m, i + 2], acc[m, i + 3])

    return kernel


@cache
def products_of_lines(tile: Tile, turned: bool) -> Any:
    """acc[m, k] += sum over i of xs[line m of this thread, i] * ws[i, column k of this thread].

    Turned, that column is a line of ws. Lines are TY and TX apart, columns as in `products`.
    """
    BK, TM, TN = tile.BK, tile.TM, tile.TN
    TY, TX = tile.BM // TM, tile.BN // TN

    @cuda.jit(device=True)
    def add_products(xs, ws, ty, tx, acc):
        xr = cuda.local.array((TM, QUAD), float32)
        wr = cuda.local.array(TN, float32)
        i = 0
        while i < BK // QUAD:
            for m in range(TM):
                for q in range(QUAD):
                    xr[m, q] = xs[ty + m * TY, i, q]
            for q in range(QUAD):
                for k in range(TN):
                    wr[k] = ws[i * QUAD + q, tx + k // QUAD * TX, k % QUAD]
                for m in range(TM):
                    for k in range(TN):
                        acc[m, k] += xr[m, q] * wr[k]
            i += 1

    @cuda.jit(device=True)
    def add_turned_products(xs, ws, ty, tx, acc):
        xr = cuda.local.array((TM, QUAD), float32)
        wr = cuda.local.array(QUAD, float32)
        i = 0
        while i < BK // QUAD:
            for m in range(TM):
                for q in range(QUAD):
                    xr[m, q] = xs[ty + m * TY, i, q]
            for k in range(TN):
                for q in range(QUAD):
                    wr[q] = ws[tx + k * TX, i, q]
                for q in range(QUAD):
                    for m in range(TM):
                        acc[m, k] += xr[m, q] * wr[q]
            i += 1

    return add_turned_products if turned else add_products


@cuda.jit(device=True)
def store_wide(y, n, k, v0, v1, v2, v3):
    store_4xf32(y, n * y.shape[1] + k, v0, v1, v2, v3)


@cuda.jit(device=True)
def store_narrow(y, n, k, v0, v1, v2, v3):
    y[n, k] = v0
    if k + 1 < y.shape[1]:
        y[n, k + 1] = v1
    if k + 2 < y.shape[1]:
        y[n, k + 2] = v2
    if k + 3 < y.shape[1]:
        y[n, k + 3] = v3
