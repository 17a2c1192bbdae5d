"""Rung 4: load the next tiles while these are multiplied.

`cp.async` copies 16 bytes from global to shared memory beside the threads, through none of their
registers. The tiles in shared memory are a ring of STAGES: in each step a block of threads waits
for the oldest, asks for those of the step STAGES - 1 ahead, in place of the ones it has just left,
and multiplies. One barrier per step says both that the tiles came and that all left the last ones.

What changed since the rung before: copies that take 16 bytes as they lie cannot turn a tile on the
way. x (batch, in), and w for the input-gradient, stay rows along the sum; a thread reads four terms
of it at once, and a line is 16 bytes longer than the tile, so that the lines which neighbouring
threads read meet different banks. Rows that do not start at multiples of 16 bytes are copied to
ones that do before the launch. float16 stays float16 in shared memory, and is widened when read.

Reads per output, for a sum of K products: K / BM + K / BN from global and K / TM + K / TN from
shared memory as before, but no thread stops for the first. What limits now is the arithmetic
itself, one multiplication and addition per thread and instruction: the next rung hands it to the
tensor cores.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, from_dtype, uint32

from numbsparse.device import SIMULATED, compute_capability
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import BYTES, aligned_rows
from numbsparse.kernels.matmul.k3_registers import (
    DTYPES,
    FEW,
    LEAST_THREADS,
    QUAD,
    Tile,
    products,
)
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
    store_4xf32,
)

BLOCK_SIZES = (8, 16, 32, 64, 128)  # a row of 4 float16 is shorter than a copy
STAGES = 3
RUNS = 4  # copies in a line of x
STAGE_WIDTH = 1024  # values of one operand in a step of the weight-gradient


def unsupported(
    product: str,
    block_size: int,
    dtype: Any,
    place: str,
    batch: int = 1,
    precision: str = "highest",
) -> str | None:
    if place != "cuda":
        return "k4_pipelined runs on a GPU"
    if block_size not in BLOCK_SIZES:
        return f"k4_pipelined takes block sizes {BLOCK_SIZES}, got {block_size}"
    if str(dtype) not in DTYPES:
        return f"k4_pipelined takes {' and '.join(DTYPES)}, got {dtype}"
    if not SIMULATED and compute_capability() < (8, 0):
        here = ".".join(map(str, compute_capability()))
        return f"k4_pipelined needs compute capability 8.0, this GPU is {here}"
    return None


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    _along_lines(forward_kernel, x, values, index.columns, y)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    _along_lines(input_grad_kernel, dy, values, index.rows, dx)


def _along_lines(kernel_for, x, values, lines, y):
    (batch, out_features), (_, in_features), size = y.shape, x.shape, values.shape[1]
    tile = tile_of(size, batch, x.itemsize)
    grid = -(-batch // tile.BM) * -(-out_features // tile.BN)
    kernel = kernel_for(size, tile, x.dtype, _store_for(y))
    (x, stride), (values, _) = aligned_rows(x), aligned_rows(values.reshape(-1, size))
    launch(kernel, grid, tile.threads, x, stride, in_features, values, *lines, y)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    (batch, in_features), (_, out_features) = x.shape, dy.shape
    tile = block_tile_of(size)
    threads = max(tile.threads, LEAST_THREADS)
    grid = -(-n_blocks * tile.threads // threads) * (size // tile.BN) ** 2
    kernel = weight_grad_kernel(size, tile, x.dtype)
    sides = *aligned_rows(x), in_features, *aligned_rows(dy), out_features
    launch(kernel, grid, threads, batch, *sides, index.block_rows, index.block_columns, dvalues)


def _store_for(y):
    aligned = y.is_contiguous and y.shape[1] % QUAD == 0 and y.address % BYTES == 0
    return store_wide if aligned and y.dtype == "float32" else store_narrow


def tile_of(size: int, batch: int, itemsize: int) -> Tile:
    """The tile of a (batch, features) output."""
    BN, BK = min(size, 64), RUNS * BYTES // itemsize
    if batch <= FEW:
        return Tile(512 // min(size, 16), BN, BK, 4, 4)
    return Tile(128, BN, BK, 4 if size <= 8 else 8, 4 if size <= 16 else 8)


def block_tile_of(size: int) -> Tile:
    """The tile of a (B, B) output; where it takes few threads, LEAST_THREADS share several."""
    side, TM, TN = min(size, 64), 4 if size <= 8 else 8, 4 if size <= 16 else 8
    threads = side // TM * (side // TN)
    return Tile(side, side, STAGE_WIDTH // side // max(LEAST_THREADS // threads, 1), TM, TN)


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
        for step in range(-AHEAD, steps):
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
            cp_async_commit()
            if step >= 0:
                add_products(xs[step % STAGES], ws[step % STAGES], ty, tx, acc)
        for m in range(TM):
            n = top + (ty + m // QUAD * TY) * QUAD + m % QUAD
            for j in range(0, TN, QUAD):
                k = left + (tx + j // QUAD * TX) * QUAD
                if n < batch and k < out_features:
                    store(y, n, k, acc[m, j], acc[m, j + 1], acc[m, j + 2], acc[m, j + 3])

    return kernel


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
        for step in range(-AHEAD, steps):
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


@cache
def locate_in(B: int, DEPTH: int) -> Any:
    """Where term k of a step lies: its block, its feature, and how many features there are on."""

    @cuda.jit(device=True)
    def locate(k, line, indices, blocks):
        first, end, offset, features = line
        position = first + k // DEPTH
        block, c, inside = 0, 0, 0
        if position < end:
            block, c = blocks[position], indices[position] * B + offset + k % DEPTH
            inside = features - c
        return block, c, inside

    return locate


@cache
def fetch_lines(WIDTH: int, ACROSS: int, THREADS: int, dtype: Any) -> Any:
    """tile[k] = source[start + j * stride :] for row j, a run per thread, and 0 from `inside` on.

    Line k holds a row of thread k % ACROSS, so that these read lines side by side.
    """
    ITEM = dtype.itemsize
    RUN = BYTES // ITEM
    LINE, LINES = (RUNS + 1) * RUN, min(THREADS // RUNS, WIDTH)  # its length; fetched at once

    @cuda.jit(device=True)
    def fetch(source, start, stride, last, inside, tile):
        t = uint32(cuda.threadIdx.x)
        i, n = t % RUNS * RUN, min(max(inside, 0) * ITEM, BYTES)
        for step in range(WIDTH // LINES):
            k = uint32(t // RUNS + step * LINES)
            m, thread = k // ACROSS, k % ACROSS
            j = uint32((thread + m // QUAD * ACROSS) * QUAD + m % QUAD)
            # Beyond the last row its values are read again, for outputs that are not written.
            source_at = start + min(j, uint32(last)) * stride
            if k < WIDTH:
                cp_async_zero_fill(tile, k * LINE + i, source, source_at, n)

    return fetch


@cache
def fetch_turned(B: int, tile: Tile, dtype: Any) -> Any:
    """tile[k] = the terms of a step in a column of w.T, from j on, in the order of the lines."""
    RUN, BK, BN = BYTES // dtype.itemsize, tile.BK, tile.BN
    DEPTH = min(B, BK)
    locate = locate_in(B, DEPTH)
    fetch_columns = fetch_lines(BN, BN // tile.TN, tile.threads, dtype)

    @cuda.jit(device=True)
    def fetch(values, j, line, indices, blocks, tile):
        k = uint32(cuda.threadIdx.x) % RUNS * RUN
        block, _, inside = locate(k, line, indices, blocks)
        start = (block * B + j) * B + line[2] + k % DEPTH
        fetch_columns(values, start, B, BN - 1, inside, tile)

    return fetch


@cache
def fetch_straight(B: int, tile: Tile, dtype: Any) -> Any:
    """tile[k] = the row of w at term k of a step, from column j on, and 0 beyond the features."""
    RUN, BK, BN = BYTES // dtype.itemsize, tile.BK, tile.BN
    DEPTH = min(B, BK)
    ACROSS = BN // RUN  # runs in a row
    ROWS = min(tile.threads // ACROSS, BK)  # fetched at once
    locate = locate_in(B, DEPTH)

    @cuda.jit(device=True)
    def fetch(values, j, line, indices, blocks, tile):
        t = uint32(cuda.threadIdx.x)
        for step in range(BK // ROWS):
            k, i = uint32(t // ACROSS + step * ROWS), t % ACROSS * RUN
            if k < BK:
                block, _, inside = locate(k, line, indices, blocks)
                start = (block * B + line[2] + k % DEPTH) * B + j + i
                cp_async_zero_fill(tile, k * BN + i, values, start, BYTES if inside > 0 else 0)

    return fetch


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
