"""Rung 2: tiles in shared memory.

A block of T x T threads owns a T x T tile of the output, T = min(B, 16). For each T x T tile of w
that the outputs need, the threads fetch it and the tile of x that meets it into shared memory,
one element each, and every thread then sums T products from there.

Reads per output, from global memory: 2 * B / T * (blocks in the column), a T-th of the rung
before; from shared memory still 2 per product, which is now the limit: the next rung keeps
several outputs in a thread's registers, and uses each shared element for all of them.
"""

from __future__ import annotations

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "float32")
MOST = 16  # T at most; a constant, because shared arrays take constant shapes
MOST_PADDED = MOST + 1  # a tile read by columns, with no two rows in the same memory bank


unsupported = reach("k2_shared", "cuda", BLOCK_SIZES, DTYPES)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    batch, out_features = y.shape
    tile = min(values.shape[1], MOST)
    grid = -(-batch // tile) * -(-out_features // tile)
    launch(forward_kernel, grid, (tile, tile), x, values, *index.columns, y)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    batch, in_features = dx.shape
    tile = min(values.shape[1], MOST)
    grid = -(-batch // tile) * -(-in_features // tile)
    launch(input_grad_kernel, grid, (tile, tile), dy, values, *index.rows, dx)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    tile = min(size, MOST)
    grid = (n_blocks * (size // tile), size // tile)
    launch(
        weight_grad_kernel,
        grid,
        (tile, tile),
        x,
        dy,
        index.block_rows,
        index.block_columns,
        dvalues,
    )


@cuda.jit
def forward_kernel(x, values, indptr, indices, blocks, y):
    xs = cuda.shared.array((MOST, MOST), float32)  # (batch, in)
    ws = cuda.shared.array((MOST, MOST), float32)  # (in, out)
    tx, ty, tile = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockDim.x
    (batch, in_features), size = x.shape, values.shape[1]
    down = -(-batch // tile)  # tiles of y, along the batch
    n = cuda.blockIdx.x % down * tile + ty
    k = cuda.blockIdx.x // down * tile + tx
    column, j = k // size, k % size
    acc = float32(0)
    for position in range(indptr[column], indptr[column + 1]):
        block, row = blocks[position], indices[position]
        for first in range(0, size, tile):
            c = row * size + first
            xs[ty, tx] = x[n, c + tx] if n < batch and c + tx < in_features else float32(0)
            ws[ty, tx] = values[block, first + ty, j] if c + ty < in_features else float32(0)
            cuda.syncthreads()
            for i in range(tile):
                acc += xs[ty, i] * ws[i, tx]
            cuda.syncthreads()
    if n < batch and k < y.shape[1]:
        y[n, k] = acc


@cuda.jit
def input_grad_kernel(dy, values, indptr, indices, blocks, dx):
    dys = cuda.shared.array((MOST, MOST), float32)  # (batch, out)
    ws = cuda.shared.array((MOST, MOST_PADDED), float32)  # (in, out)
    tx, ty, tile = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockDim.x
    (batch, out_features), size = dy.shape, values.shape[1]
    down = -(-batch // tile)  # tiles of dx, along the batch
    n = cuda.blockIdx.x % down * tile + ty
    c = cuda.blockIdx.x // down * tile + tx
    row, top = c // size, c % size - tx
    acc = float32(0)
    for position in range(indptr[row], indptr[row + 1]):
        block, column = blocks[position], indices[position]
        for first in range(0, size, tile):
            k = column * size + first + tx
            dys[ty, tx] = dy[n, k] if n < batch and k < out_features else float32(0)
            ws[ty, tx] = values[block, top + ty, first + tx] if k < out_features else float32(0)
            cuda.syncthreads()
            for j in range(tile):
                acc += dys[ty, j] * ws[tx, j]
            cuda.syncthreads()
    if n < batch and c < dx.shape[1]:
        dx[n, c] = acc


@cuda.jit
def weight_grad_kernel(x, dy, block_rows, block_columns, dvalues):
    xs = cuda.shared.array((MOST, MOST), float32)  # (batch, in)
    dys = cuda.shared.array((MOST, MOST), float32)  # (batch, out)
    tx, ty, tile = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockDim.x
    batch, size = x.shape[0], dvalues.shape[1]
    tiles = size // tile
    block, top, left = (
        cuda.blockIdx.x // tiles,
        cuda.blockIdx.x % tiles * tile,
        cuda.blockIdx.y * tile,
    )
    c = block_rows[block] * size + top + tx
    k = block_columns[block] * size + left + tx
    acc = float32(0)
    for first in range(0, batch, tile):
        n = first + ty
        xs[ty, tx] = x[n, c] if n < batch and c < x.shape[1] else float32(0)
        dys[ty, tx] = dy[n, k] if n < batch and k < dy.shape[1] else float32(0)
        cuda.syncthreads()
        for m in range(tile):
            acc += xs[m, ty] * dys[m, tx]
        cuda.syncthreads()
    dvalues[block, top + ty, left + tx] = acc
