"""Step 3: tiles in shared memory.

A block of threads computes BM x BN outputs. In each step its threads fetch BK terms of the sum into
shared memory, one value of x and one of w each, wait for each other, and then read from there: a
value that is loaded from global memory once serves 32 threads.

What changed since the step before: sums proceed in steps of BK terms, each between two barriers.
After the first the tiles are complete, after the second nobody reads them.

Reads per output, for a sum of K products: K / BN + K / BM from global memory, a 32nd of the step
before; 2 K from shared memory.

The limit: still two loads for each multiply-add, now from shared memory. The next step keeps a
value in a register for several products.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, taught

BM, BN = 32, 32  # rows and columns of y for a block of threads
BK = 32  # terms of the sum in a step
THREADS = BM * BN

unsupported = taught("s03_shared", "float32", BM)


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
        t, tiles = uint32(cuda.threadIdx.x), uint32(out_features // BN)
        top = uint32(cuda.blockIdx.x // tiles * BM)
        left = uint32(cuda.blockIdx.x % tiles * BN)
        ty, tx = t // BN, t % BN
        column = left // B
        first = indptr[column]
        steps = (indptr[column + 1] - first) * PARTS
        acc = float32(0)
        for step in range(steps):
            position, part = first + step // PARTS, step % PARTS * BK
            x_at = uint32(top * in_features + indices[position] * B + part)
            w_at = uint32((blocks[position] * B + part) * B + left % B)
            xs[ty, tx] = x[uint32(x_at + ty * in_features + tx)]
            ws[ty, tx] = values[uint32(w_at + ty * B + tx)]
            cuda.syncthreads()
            for i in range(BK):
                acc += xs[ty, i] * ws[i, tx]
            cuda.syncthreads()
        y[uint32((top + ty) * out_features + left + tx)] = acc

    return kernel
