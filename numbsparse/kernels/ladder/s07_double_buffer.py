"""Step 7: fetch the next tiles while these are multiplied.

`cp.async` copies sixteen bytes from global to shared memory in the background: the thread does not
wait and needs no register for them. With two tiles of x and two of w (double buffering) a step
first requests the tiles of the next one, and then multiplies what the step before it requested: the
latency of global memory passes while there is something to do. It pays from the next step on: in
step 6 there are enough blocks of threads on a multiprocessor to fill each other's gaps.

What changed since the step before: `fetch` only requests. Copies since the last commit are a group,
and a thread waits until at most so many of its groups are on their way; the barrier after it says
that the copies of all threads have arrived.

Reads per output, for a sum of K products: K / BN + K / BM from global memory, K / TN + K / TM from
shared memory, as before.

The limit: one multiply-add for each lane and instruction. In the inner loop nine instructions of
ten are multiply-adds now, and their roof is only 1.6 times as high. The next step has an
instruction that does 2,048 of them.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, taught
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    load_4xf32,
    store_4xf32,
)

BM, BN = 128, 32  # rows and columns of y for a block of threads
BK = 32  # terms of the sum in a step
TM, TN = 8, 4  # rows and columns of a thread
TY, TX = BM // TM, BN // TN  # threads down, and across
THREADS = TY * TX
LINE = BK + 4  # values in a line of xs
XS, WS = BM * LINE, BK * BN  # values in a tile
BOTH_XS, BOTH_WS = 2 * XS, 2 * WS

unsupported = taught("s07_double_buffer", "float32", BM, (8, 0))


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

    @cuda.jit(device=True)
    def fetch(x, x_at, in_features, values, w_at, xs, ws, stage):
        t = uint32(cuda.threadIdx.x)
        for s in range(BM * BK // 4 // THREADS):
            m, i = uint32(t // (BK // 4) + s * (4 * THREADS // BK)), t % (BK // 4) * 4
            cp_async(xs, stage * XS + m * LINE + i, x, uint32(x_at + m * in_features + i))
        for s in range(BK * BN // 4 // THREADS):
            i, k = uint32(t // (BN // 4) + s * (4 * THREADS // BN)), t % (BN // 4) * 4
            cp_async(ws, stage * WS + i * BN + k, values, uint32(w_at + i * B + k))

    @cuda.jit
    def kernel(x, values, indptr, indices, blocks, y, in_features, out_features):
        xs = cuda.shared.array(BOTH_XS, float32, ALIGNMENT)
        ws = cuda.shared.array(BOTH_WS, float32, ALIGNMENT)
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
        for step in range(-1, steps):
            if step + 1 < steps:
                position, part = first + (step + 1) // PARTS, (step + 1) % PARTS * BK
                x_at = uint32(top * in_features + indices[position] * B + part)
                w_at = uint32((blocks[position] * B + part) * B + left % B)
                fetch(x, x_at, in_features, values, w_at, xs, ws, uint32((step + 1) % 2))
            cp_async_commit()
            if step >= 0:
                cp_async_wait(1)
                cuda.syncthreads()
                x_tile, w_tile = uint32(step % 2 * XS), uint32(step % 2 * WS)
                for i in range(0, BK, 4):
                    for q in range(4):
                        w_line = w_tile + (i + q) * BN + tx * TN
                        wr[q, 0], wr[q, 1], wr[q, 2], wr[q, 3] = load_4xf32(ws, w_line)
                    for m in range(TM):
                        x0, x1, x2, x3 = load_4xf32(xs, x_tile + (ty + m * TY) * LINE + i)
                        for k in range(TN):
                            total = acc[m, k] + x0 * wr[0, k] + x1 * wr[1, k]
                            acc[m, k] = total + x2 * wr[2, k] + x3 * wr[3, k]
                cuda.syncthreads()
        for m in range(TM):
            y_at = uint32((top + ty + m * TY) * out_features + left + tx * TN)
            store_4xf32(y, y_at, acc[m, 0], acc[m, 1], acc[m, 2], acc[m, 3])

    return kernel
