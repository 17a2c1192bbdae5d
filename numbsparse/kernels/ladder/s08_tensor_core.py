"""Step 8: tensor cores, from here on in float16; sums stay float32.

`mma` multiplies 16 x 16 values of x by 16 x 8 of w for a whole warp: the 32 lanes hold the matrices
together, each a few values (`kernels/ptx/meaning.py` says which). `ldmatrix` loads them from
shared memory: each lane names a line of eight values, and gets its part of all 32 lines. A warp
computes 32 rows of the tile and all of its columns.

What changed since the step before: a thread has no rectangle of its own. `acc` holds its four
values of each 16 x 8 piece of the warp's tile. Lines of ws are longer too, by eight values as those
of xs: eight lines of sixteen bytes then pass in one wavefront, with no bank conflict.

Reads per output, for a sum of K products: K / BN + K / BM from global memory; K / BN + K / WM from
shared memory, for what a warp loads is used by all of its lanes.

The limit: the L2 cache. Copies of 16 bytes have it send half as much again as the formula says, two
buffers do not cover the latency, and the threads spend their instructions on addresses of copies.
In the next step an engine copies.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, types, uint32

from numbsparse.device.launch import launch
from numbsparse.kernels.ladder.taught import check, pairs, taught
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_f16,
    pack_half2,
)

BM, BN = 128, 32  # rows and columns of y for a block of threads
BK = 32  # terms of the sum in a step
WM = 32  # rows of a warp
THREADS = BM // WM * 32
PIECE = 8  # values in a copy
X_LINE, W_LINE = BK + PIECE, BN + PIECE  # values in a line of a tile
XS, WS = BM * X_LINE, BK * W_LINE  # values in a tile
BOTH_XS, BOTH_WS = 2 * XS, 2 * WS
MS, KS = WM // 16, BN // 8  # pieces of 16 x 8 in the tile of a warp

unsupported = taught("s08_tensor_core", "float16", BM, (8, 0))


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    check(x, values, y)
    (batch, out_features), in_features = y.shape, x.shape[1]
    grid = batch // BM * (out_features // BN)
    kernel = line_kernel(values.shape[1])
    args = x.span, values.span, *index.columns, pairs(y), in_features, out_features
    launch(kernel, grid, THREADS, *args)


@cache
def line_kernel(B: int) -> Any:
    PARTS = B // BK  # steps in a block

    @cuda.jit(device=True)
    def fetch(x, x_at, in_features, values, w_at, xs, ws, stage):
        t = uint32(cuda.threadIdx.x)
        for s in range(BM * BK // PIECE // THREADS):
            m, i = (
                uint32(t // (BK // PIECE) + s * (PIECE * THREADS // BK)),
                t % (BK // PIECE) * PIECE,
            )
            cp_async(xs, stage * XS + m * X_LINE + i, x, uint32(x_at + m * in_features + i))
        for s in range(BK * BN // PIECE // THREADS):
            i, k = (
                uint32(t // (BN // PIECE) + s * (PIECE * THREADS // BN)),
                t % (BN // PIECE) * PIECE,
            )
            cp_async(ws, stage * WS + i * W_LINE + k, values, uint32(w_at + i * B + k))

    @cuda.jit
    def kernel(x, values, indptr, indices, blocks, y, in_features, out_features):
        xs = cuda.shared.array(BOTH_XS, types.float16, ALIGNMENT)
        ws = cuda.shared.array(BOTH_WS, types.float16, ALIGNMENT)
        xr = cuda.local.array((MS, 4), uint32)
        acc = cuda.local.array((MS, KS, 4), float32)
        for m in range(MS):
            for k in range(KS):
                for e in range(4):
                    acc[m, k, e] = 0
        t, tiles = uint32(cuda.threadIdx.x), uint32(out_features // BN)
        top = uint32(cuda.blockIdx.x // tiles * BM)
        left = uint32(cuda.blockIdx.x % tiles * BN)
        warp, lane = t // 32, t % 32
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
                # The lane's line of 16 x 16 values: four matrices, down first, then across.
                x_tile = uint32(step % 2 * XS + (warp * WM + lane % 16) * X_LINE + lane // 16 * 8)
                w_tile = uint32(step % 2 * WS + lane % 16 * W_LINE + lane // 16 * 8)
                for i in range(0, BK, 16):
                    for m in range(MS):
                        a = xr[m]
                        a[0], a[1], a[2], a[3] = ldmatrix_x4(xs, x_tile + m * 16 * X_LINE + i)
                    for k in range(0, KS, 2):
                        b = ldmatrix_x4_trans(ws, w_tile + i * W_LINE + k * 8)
                        for m in range(MS):
                            for h in range(2):
                                a, c = xr[m], acc[m, k + h]
                                c[0], c[1], c[2], c[3] = mma_m16n8k16_f16(
                                    *(a[0], a[1], a[2], a[3], b[2 * h], b[2 * h + 1]),
                                    *(c[0], c[1], c[2], c[3]),
                                )
                cuda.syncthreads()
        # A lane holds two neighbours of a row, and the same two columns eight rows further down.
        for m in range(MS):
            for h in range(2):
                n = uint32(top + warp * WM + m * 16 + h * 8 + lane // 4)
                for k in range(KS):
                    y_at = uint32(n * out_features + left + k * 8 + lane % 4 * 2)
                    y[y_at // 2] = pack_half2(acc[m, k, 2 * h], acc[m, k, 2 * h + 1])

    return kernel
