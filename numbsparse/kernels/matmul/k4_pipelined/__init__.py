"""Rung 4: load the next tiles while these are multiplied.

`cp.async` copies 16 bytes from global to shared memory asynchronously, without passing through
registers. The tiles in shared memory are a ring of STAGES: in each step a block of threads waits
for the oldest, requests those of the step STAGES - 1 ahead, in place of the ones it has just used,
and multiplies. One barrier per step says both that the tiles are there and that all are done with
the last ones.

What changed since the rung before: copies of 16 bytes cannot transpose a tile on the way. x (batch,
in), and w for the input-gradient, stay rows along the sum; a thread reads four terms of it at once,
and a line is 16 bytes longer than the tile, so that the lines which neighbouring threads read are
in different banks. Rows that do not start at multiples of 16 bytes are copied to ones that do
before the launch. float16 stays float16 in shared memory, and is widened when read.

Reads per output, for a sum of K products: K / BM + K / BN from global and K / TM + K / TN from
shared memory as before, but no thread stops for the first. What limits now is the arithmetic
itself, one multiplication and addition per thread and instruction: the next rung hands it to the
tensor cores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, from_dtype, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k3_registers import FEW, LEAST_THREADS, QUAD, Tile, products
from numbsparse.kernels.matmul.k4_pipelined.fetches import (
    RUNS,
    STAGES,
    fetch_blocks,
    fetch_lines,
    fetch_straight,
    fetch_transposed,
    locate_in,
    slot_of,
)
from numbsparse.kernels.matmul.reach import reach
from numbsparse.kernels.parts.aligned import BYTES, aligned_rows
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait, store_4xf32

BLOCK_SIZES = (8, 16, 32, 64, 128)  # a row of 4 float16 is shorter than a copy
DTYPES = ("float16", "float32")  # tiles are copied as they are, and bfloat16 would be bits there
STAGE_WIDTH = 1024  # values of one operand in a step of the weight-gradient

unsupported = reach("k4_pipelined", "cuda", BLOCK_SIZES, DTYPES, capability=(8, 0))


def forward(x, values, index, y, precision="highest", tile=0):
    """y[:] = x @ w."""
    _along_lines(False, x, values, index.columns, y, tile)


def input_grad(dy, values, index, dx, precision="highest", tile=0):
    """dx[:] = dy @ w.T."""
    _along_lines(True, dy, values, index.rows, dx, tile)


def _along_lines(transposed, x, values, lines, y, number):
    (batch, out_features), size = y.shape, values.shape[1]
    tile = line_tiles(size, batch, x.itemsize)[number]
    grid = -(-batch // tile.BM) * -(-out_features // tile.BN)
    kernel = line_kernel(size, tile, x.dtype, _store_for(y), transposed)
    values = aligned_rows(values.reshape(-1, size)).values
    launch(kernel, grid, tile.threads, aligned_rows(x), values, *lines, y)


def weight_grad(x, dy, index, dvalues, precision="highest", tile=0):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    tile = block_tiles(size)[tile]
    threads = max(tile.threads, LEAST_THREADS)
    grid = -(-n_blocks * tile.threads // threads) * (size // tile.BN) ** 2
    kernel = weight_grad_kernel(size, tile, x.dtype)
    operands = aligned_rows(x), aligned_rows(dy), index.block_rows, index.block_columns, dvalues
    launch(kernel, grid, threads, x.shape[0], *operands)


def _store_for(y):
    aligned = y.is_contiguous and y.shape[1] % QUAD == 0 and y.address % BYTES == 0
    return store_wide if aligned and y.dtype == "float32" else store_narrow


def tile_choices(product, block_size, dtype, batch, precision="highest"):
    if product == "weight_grad":
        return block_tiles(block_size)
    return line_tiles(block_size, batch, dtype.itemsize)


def line_tiles(size: int, batch: int, itemsize: int) -> list[Tile]:
    """Tiles of a (batch, features) output."""
    BN, BK = min(size, 64), RUNS * BYTES // itemsize
    few = Tile(512 // min(size, 16), BN, BK, 4, 4)
    many = Tile(128, BN, BK, 4 if size <= 8 else 8, 4 if size <= 16 else 8)
    return [few] if batch <= FEW else [many, few]


def block_tiles(size: int) -> list[Tile]:
    """Tiles of a (B, B) output; where one takes few threads, LEAST_THREADS share several."""
    return [_block_tile(side) for side in ((64, 32) if size > 32 else (size,))]


def _block_tile(side: int) -> Tile:
    TM, TN = 4 if side <= 8 else 8, 4 if side <= 16 else 8
    threads = side // TM * (side // TN)
    return Tile(side, side, STAGE_WIDTH // side // max(LEAST_THREADS // threads, 1), TM, TN)


@cache
def line_kernel(B: int, tile: Tile, dtype: Any, store: Any, transposed: bool) -> Any:
    """y = x @ w down the block columns of w; transposed, dx = dy @ w.T along the block rows."""
    BM, BN, BK, TM, TN = tile
    TY, TX = BM // TM, BN // TN
    RUN, TYPE = BYTES // dtype.itemsize, from_dtype(dtype)
    DEPTH = min(B, BK)  # rows of a block in a step
    BLOCKS, PARTS = BK // DEPTH, B // DEPTH  # blocks in a step, steps in a block
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    LINE = (BK + RUN) // QUAD
    X_SHAPE = (STAGES, BM, LINE, QUAD)
    W_SHAPE = (STAGES, BN, LINE, QUAD) if transposed else (STAGES, BK, BN // QUAD, QUAD)
    locate = locate_in(B, DEPTH)
    fetch_x = fetch_lines(BM, TY, tile.threads, dtype)
    fetch_w = fetch_transposed(B, tile, dtype) if transposed else fetch_straight(B, tile, dtype)
    add_products = products_of_lines(tile, transposed)

    @cuda.jit
    def kernel(rows, values, indptr, indices, blocks, y):
        x, stride, in_features = rows
        xs = cuda.shared.array(X_SHAPE, TYPE, ALIGNMENT)  # (stage, batch, in)
        # (stage, in, out); transposed (stage, out, in)
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
def products_of_lines(tile: Tile, transposed: bool) -> Any:
    """acc[m, k] += sum over i of xs[line m of this thread, i] * ws[i, column k of this thread].

    Transposed, that column is a line of ws. Lines are TY and TX apart, columns as in `products`.
    """
    BK, TM, TN = tile.BK, tile.TM, tile.TN
    TY, TX = tile.BM // TM, tile.BN // TN

    @cuda.jit(device=True)
    def add_products(xs, ws, ty, tx, acc):
        xr = cuda.local.array((TM, QUAD), float32)
        wr, wq = cuda.local.array(TN, float32), cuda.local.array(QUAD, float32)
        i = 0
        while i < BK // QUAD:
            for m in range(TM):
                for q in range(QUAD):
                    xr[m, q] = xs[ty + m * TY, i, q]
            if transposed:
                for k in range(TN):
                    for q in range(QUAD):
                        wq[q] = ws[tx + k * TX, i, q]
                    for q in range(QUAD):
                        for m in range(TM):
                            acc[m, k] += xr[m, q] * wq[q]
            else:
                for q in range(QUAD):
                    for k in range(TN):
                        wr[k] = ws[i * QUAD + q, tx + k // QUAD * TX, k % QUAD]
                    for m in range(TM):
                        for k in range(TN):
                            acc[m, k] += xr[m, q] * wr[k]
            i += 1

    return add_products


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
    def kernel(batch, x_side, dy_side, block_rows, block_columns, dvalues):
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
                fetch(x_side, block_rows, ahead, top, xs[stage])
                fetch(dy_side, block_columns, ahead, left, dys[stage])
            cp_async_commit()
            if step >= 0:
                stage = step % STAGES
                add_products(xs[stage], dys[stage], y_quad, x_quad, acc)
        block = first_block + mine
        if block < dvalues.shape[0]:
            in_rows = x_side.features - block_rows[block] * B
            in_columns = dy_side.features - block_columns[block] * B
            for m in range(TM):
                i = top + (ty + m // QUAD * TY) * QUAD + m % QUAD
                for k in range(TN):
                    j = left + (tx + k // QUAD * TX) * QUAD + k % QUAD
                    inside = i < in_rows and j < in_columns
                    dvalues[block, i, j] = acc[m, k] if inside else float32(0)

    return kernel
