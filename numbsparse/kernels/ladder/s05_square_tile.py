"""Step 5: a rectangle of outputs in a thread.

A thread computes TM x TN outputs. For each term of the sum it reads TM + TN values from shared
memory and forms TM * TN products of them: the more, the closer the rectangle is to a square.

What changed since the step before: `acc` has two axes, and TM + TN values wait in registers. Tiles
are twice as high, for half of the threads. Rows of a thread are TY apart, columns TX apart, so that
neighbouring threads read neighbours. Four rows of xs are now read by a warp at once; a line is one
value longer than BK, or all four would be in the same bank of shared memory and be served one after
the other (a bank conflict).

Reads per output, for a sum of K products: K / BN + K / BM from global memory; K / TN + K / TM from
shared memory.

The limit: the issue slots. The inner loop has three loads for each eight multiply-adds, and each of
them loads four bytes for a lane. The next step loads sixteen.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, taught

BM, BN = 128, 32  # rows and columns of y for a block of threads
BK = 32  # terms of the sum in a step
TM, TN = 8, 4  # rows and columns of a thread
TY, TX = BM // TM, BN // TN  # threads down, and across
THREADS = TY * TX
LINE = BK + 1  # values in a line of xs

unsupported = taught("s05_square_tile", "float32", BM)


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    check(x, values, y)
    (batch, out_features), in_features = y.shape, x.shape[1]
    grid = batch // BM * (out_features // BN)
    kernel = line_kernel(values.shape[1])
    args = x.span, values.span, *index.columns, y.span, in_features, out_features
    launch(kernel, grid, THREADS, *args)


@cache
def line_kernel(B: int) -> Any:
    PARTS = B // BK  # steps in a block

    @cuda.jit
    def kernel(x, values, indptr, indices, blocks, y, in_features, out_features):
        xs = cuda.shared.array((BM, LINE), float32)
        ws = cuda.shared.array((BK, BN), float32)
        xr = cuda.local.array(TM, float32)
        wr = cuda.local.array(TN, float32)
        acc = cuda.local.array((TM, TN), float32)
        for m in range(TM):
            for k in range(TN):
                acc[m, k] = 0
        t, tiles = uint32(cuda.threadIdx.x), uint32(out_features // BN)
        top = uint32(cuda.blockIdx.x // tiles * BM)
        left = uint32(cuda.blockIdx.x % tiles * BN)
        ty, tx = t // TX, t % TX
        column = left // B
        first = indptr[column]
        steps = (indptr[column + 1] - first) * PARTS
        for step in range(steps):
            position, part = first + step // PARTS, step % PARTS * BK
            x_at = uint32(top * in_features + indices[position] * B + part)
            w_at = uint32((blocks[position] * B + part) * B + left % B)
            for s in range(BM * BK // THREADS):
                m, i = uint32(t // BK + s * (THREADS // BK)), t % BK
                xs[m, i] = x[uint32(x_at + m * in_features + i)]
            for s in range(BK * BN // THREADS):
                i, k = uint32(t // BN + s * (THREADS // BN)), t % BN
                ws[i, k] = values[uint32(w_at + i * B + k)]
            cuda.syncthreads()
            for i in range(BK):
                for m in range(TM):
                    xr[m] = xs[ty + m * TY, i]
                for k in range(TN):
                    wr[k] = ws[i, tx + k * TX]
                for m in range(TM):
                    for k in range(TN):
                        acc[m, k] += xr[m] * wr[k]
            cuda.syncthreads()
        for m in range(TM):
            n = uint32(top + ty + m * TY)
            for k in range(TN):
                y[uint32(n * out_features + left + tx + k * TX)] = acc[m, k]

    return kernel
