"""Step 4: several outputs in a thread, one below the other.

A thread computes TM rows of one column. It reads a value of ws once, keeps it in a register, and
multiplies it with TM values of xs: TM + 1 loads for TM products, where there were 2 TM.

What changed since the step before: `acc` is an array. Its indices are known when the kernel is
compiled, because loops over TM are unrolled, and so it is kept in registers. The tile is larger,
and each thread fetches several values of it.

Reads per output, for a sum of K products: K / BN + K / BM from global memory; K + K / TM from
shared memory.

The limit: xs is still read once for each product. The next step gives a thread columns too.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, taught

BM, BN = 64, 32  # rows and columns of y for a block of threads
BK = 32  # terms of the sum in a step
TM = 8  # rows of a thread
TY, TX = BM // TM, BN  # threads down, and across
THREADS = TY * TX

unsupported = taught("s04_thread_tile", "float32", BM)


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
        xs = cuda.shared.array((BM, BK), float32)
        ws = cuda.shared.array((BK, BN), float32)
        acc = cuda.local.array(TM, float32)
        for m in range(TM):
            acc[m] = 0
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
                w = ws[i, tx]
                for m in range(TM):
                    acc[m] += xs[ty + m * TY, i] * w
            cuda.syncthreads()
        for m in range(TM):
            n = uint32(top + ty + m * TY)
            y[uint32(n * out_features + left + tx)] = acc[m]

    return kernel
