"""Step 6: loads and stores of sixteen bytes.

Four neighbours are one load, from global memory, from shared memory, and one store. The columns of
a thread are now neighbours, and it takes four terms of the sum at a time: a load for each of its
rows fetches four terms of x, a load for each term its columns of w.

What changed since the step before: `load_4xf32` and `store_4xf32`, which take flat indices that are
multiples of four. So a line of xs is four values longer than BK: the four lines that a warp reads
at once then begin in different groups of four banks.

Reads per output, for a sum of K products: K / BN + K / BM from global memory and K / TN + K / TM
from shared memory, as before, in a quarter of the instructions.

The limit: a thread fetches, then multiplies, and while it fetches it multiplies nothing. Other
blocks of threads on the same multiprocessor fill the gap as far as there are some: how many fit,
the occupancy, is up to the registers. The next step fills it by itself.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, taught
from numbsparse.kernels.ptx import ALIGNMENT, load_4xf32, store_4xf32

BM, BN = 128, 32  # rows and columns of y for a block of threads
BK = 32  # terms of the sum in a step
TM, TN = 8, 4  # rows and columns of a thread
TY, TX = BM // TM, BN // TN  # threads down, and across
THREADS = TY * TX
LINE = BK + 4  # values in a line of xs
XS, WS = BM * LINE, BK * BN  # values in a tile

unsupported = taught("s06_wide", "float32", BM)


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
        xs = cuda.shared.array(XS, float32, ALIGNMENT)
        ws = cuda.shared.array(WS, float32, ALIGNMENT)
        wr = cuda.local.array((4, TN), float32)
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
            for s in range(BM * BK // 4 // THREADS):
                m, i = uint32(t // (BK // 4) + s * (4 * THREADS // BK)), t % (BK // 4) * 4
                four = load_4xf32(x, uint32(x_at + m * in_features + i))
                store_4xf32(xs, m * LINE + i, *four)
            for s in range(BK * BN // 4 // THREADS):
                i, k = uint32(t // (BN // 4) + s * (4 * THREADS // BN)), t % (BN // 4) * 4
                four = load_4xf32(values, uint32(w_at + i * B + k))
                store_4xf32(ws, i * BN + k, *four)
            cuda.syncthreads()
            for i in range(0, BK, 4):
                for q in range(4):
                    wr[q, 0], wr[q, 1], wr[q, 2], wr[q, 3] = load_4xf32(ws, (i + q) * BN + tx * TN)
                for m in range(TM):
                    x0, x1, x2, x3 = load_4xf32(xs, (ty + m * TY) * LINE + i)
                    for k in range(TN):
                        total = acc[m, k] + x0 * wr[0, k] + x1 * wr[1, k]
                        acc[m, k] = total + x2 * wr[2, k] + x3 * wr[3, k]
            cuda.syncthreads()
        for m in range(TM):
            y_at = uint32((top + ty + m * TY) * out_features + left + tx * TN)
            store_4xf32(y, y_at, acc[m, 0], acc[m, 1], acc[m, 2], acc[m, 3])

    return kernel
