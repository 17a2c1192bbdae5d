"""Rung 2: tiles in shared memory.

A block of T x T threads owns a T x T tile of the output, T = min(B, 16). For each T x T tile of w
that the outputs need, the threads fetch it and the tile of x that it multiplies into shared memory,
one element each, and every thread then sums T products from it.

What changed since the rung before: a thread reads for all T that need a value, and waits twice for
the others, until the tiles are whole, and until nobody reads them any more. So no thread may leave
early: those beyond the edge fetch zeros, and store nothing.

Reads per output, for a sum of K products: from global memory 2 * K / T, a T-th of the rung before;
from shared memory still 2 * K, two reads for each multiply-add. The limit is the instructions that
a thread issues, most of them for those reads: the next rung keeps several outputs in a thread's
registers, and uses each shared element for all of them.
"""

from __future__ import annotations

from numba import cuda, float32

from numbsparse.device.launch import launch
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.matmul.k1_naive import BLOCK_SIZES, DTYPES, grid_of, line_and_column
from numbsparse.kernels.matmul.reach import reach

MOST = 16  # T at most; a constant, because shared arrays take constant shapes
MOST_PADDED = MOST + 1  # a tile read by columns, with no two rows in the same memory bank


unsupported = reach("k2_shared", "cuda", BLOCK_SIZES, DTYPES)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    batch, out_features = y.shape
    threads = threads_for(values.shape[1])
    grid = grid_of(out_features, batch, threads)
    launch(forward_kernel, grid, threads, x, values, *index.columns, y)


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    batch, in_features = dx.shape
    threads = threads_for(values.shape[1])
    grid = grid_of(in_features, batch, threads)
    launch(input_grad_kernel, grid, threads, dy, values, *index.rows, dx)


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, size, _ = dvalues.shape
    threads = threads_for(size)
    grid = grid_of(size, n_blocks * size, threads)
    launch(weight_grad_kernel, grid, threads, x, dy, index.block_rows, index.block_columns, dvalues)


def threads_for(size):
    return min(size, MOST), min(size, MOST)


def line_kernel(transposed):
    """y = x @ w down the block columns of w; transposed, x @ w.T along its block rows."""
    W_SHAPE = (MOST, MOST_PADDED if transposed else MOST)

    @cuda.jit
    def kernel(x, values, indptr, indices, blocks, y):
        xs = cuda.shared.array((MOST, MOST), float32)  # (batch, in)
        ws = cuda.shared.array(W_SHAPE, float32)  # (in, out); transposed (out, in)
        tx, ty, tile = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockDim.x
        (batch, in_features), out_features = x.shape, y.shape[1]
        n, k = line_and_column(batch)
        size = values.shape[1]
        line, j = k // size, k % size
        acc = float32(0)
        for position in range(indptr[line], indptr[line + 1]):
            block, start = blocks[position], indices[position] * size
            for first in range(0, size, tile):
                c = start + first
                inside = n < batch and c + tx < in_features
                xs[ty, tx] = widened(x[n, c + tx]) if inside else float32(0)
                inside = c + (tx if transposed else ty) < in_features
                row, column = (j - tx + ty, first + tx) if transposed else (first + ty, j)
                ws[ty, tx] = widened(values[block, row, column]) if inside else float32(0)
                cuda.syncthreads()
                for i in range(tile):
                    acc += xs[ty, i] * (ws[tx, i] if transposed else ws[i, tx])
                cuda.syncthreads()
        if n < batch and k < out_features:
            y[n, k] = rounded(acc, y)

    return kernel


forward_kernel, input_grad_kernel = line_kernel(False), line_kernel(True)


@cuda.jit
def weight_grad_kernel(x, dy, block_rows, block_columns, dvalues):
    # The blocks are stacked: line = block * B + i.
    xs = cuda.shared.array((MOST, MOST), float32)  # (batch, in)
    dys = cuda.shared.array((MOST, MOST), float32)  # (batch, out)
    tx, ty, tile = cuda.threadIdx.x, cuda.threadIdx.y, cuda.blockDim.x
    n_blocks, size = dvalues.shape[0], dvalues.shape[1]
    line, j = line_and_column(n_blocks * size)
    block, i = line // size, line % size
    c, k = block_rows[block] * size + i - ty + tx, block_columns[block] * size + j
    acc = float32(0)
    for first in range(0, x.shape[0], tile):
        n = first + ty
        xs[ty, tx] = widened(x[n, c]) if n < x.shape[0] and c < x.shape[1] else float32(0)
        dys[ty, tx] = widened(dy[n, k]) if n < x.shape[0] and k < dy.shape[1] else float32(0)
        cuda.syncthreads()
        for m in range(tile):
            acc += xs[m, ty] * dys[m, tx]
        cuda.syncthreads()
    dvalues[block, i, j] = rounded(acc, dvalues)
