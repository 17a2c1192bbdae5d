"""Step 9: the copy engine (TMA) fetches, and tells a barrier when the bytes have arrived.

On Hopper one instruction of one thread requests a whole tile: a box of x or w, named by its corner
and a tensor map, which describes the array in memory. The engine computes all addresses. Each
stage of a ring has a barrier in shared memory (`mbarrier`) that counts the bytes of its tiles. A
barrier is used again and again: its phases are alternately even and odd, and a wait names one.

What changed since the step before: `fetch` is three instructions of thread 0. There are STAGES
tiles on their way instead of two. The engine leaves no gaps between lines. Against bank conflicts
it lets pieces of sixteen bytes change places (a swizzle): the piece's number is XORed with some
bits of the line's, and the threads that read do the same.

Reads per output, for a sum of K products: K / BN + K / BM from global memory, K / BN + K / WM from
shared memory, as before.

The limit: the L2 cache, from which a tile of 32 columns takes K / 32 of x. A wider one would need
more registers, for its sums and for what is loaded into them. The next step loads nothing there.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.ladder.taught import check, pairs, taught
from numbsparse.kernels.ptx import (
    fence_mbarrier_init,
    fence_tensor_map,
    first_multiple,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    mma_m16n8k16_f16,
    pack_half2,
    tma_load_2d,
    tma_load_3d,
)

BM, BN = 128, 32  # rows and columns of y for a block of threads
BK = 32  # terms of the sum in a step
WM = 32  # rows of a warp
THREADS = BM // WM * 32
MS, KS = WM // 16, BN // 8  # pieces of 16 x 8 in the tile of a warp
STAGES = 4  # of the ring
LINE = 2 * BK  # bytes of a line of either tile
XS, WS = BM * LINE, BK * LINE  # bytes of a tile
STAGE = XS + WS
ALIGNED = 1024  # bytes: where the ring begins, so that a swizzle depends only on the line

unsupported = taught("s09_copy_engine", "float16", BM, (9, 0))


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    check(x, values, y)
    batch, out_features = y.shape
    grid = batch // BM * (out_features // BN)
    x_map, w_map = tensor_map(x, (BM, BK)), tensor_map(values, (1, BK, BN))
    kernel, ring_bytes = line_kernel(values.shape[1]), STAGES * STAGE + ALIGNED
    args = x_map, w_map, *index.columns, pairs(y), out_features
    launch(kernel, grid, THREADS, *args, shared_bytes=ring_bytes)


@cache
def line_kernel(B: int) -> Any:
    PARTS = B // BK  # steps in a block

    @cuda.jit(device=True)
    def fetch(x_map, feature, row, w_map, column, part, block, ring, at, full, stage):
        mbarrier_expect(full, stage, STAGE)
        tma_load_2d(ring, at, x_map, int32(feature), int32(row), full, stage)
        tma_load_3d(ring, at + XS, w_map, int32(column), int32(part), block, full, stage)

    @cuda.jit
    def kernel(x_map, w_map, indptr, indices, blocks, y, out_features):
        ring = cuda.shared.array(0, uint8)  # as long as the launch says
        full = cuda.shared.array(STAGES, uint64)
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
        base = first_multiple(ring, ALIGNED)
        if t == 0:
            fence_tensor_map(x_map)  # the host wrote them
            fence_tensor_map(w_map)
            for stage in range(STAGES):
                mbarrier_init(full, stage, 1)  # arrival, and the bytes that it says
            fence_mbarrier_init()
        cuda.syncthreads()
        # The lane's line of 16 x 16 values, swizzled: XORing moves to the next pieces of it.
        line = uint32((lane % 16) * LINE + lane // 16 * 16)
        line = uint32(line ^ (line >> 7 & 3) << 4)
        for step in range(1 - STAGES, steps):
            ahead = step + STAGES - 1
            if t == 0 and ahead < steps:
                position, part = first + ahead // PARTS, ahead % PARTS * BK
                stage, c = uint32(ahead % STAGES), indices[position] * B + part
                at, block = uint32(base + stage * STAGE), blocks[position]
                fetch(x_map, c, top, w_map, left % B, part, block, ring, at, full, stage)
            if step >= 0:
                stage = uint32(step % STAGES)
                mbarrier_wait(full, stage, uint32(step // STAGES % 2))
                x_tile = uint32(base + stage * STAGE + warp * WM * LINE)
                w_tile = uint32(base + stage * STAGE + XS)
                for i in range(0, BK, 16):
                    for m in range(MS):
                        a = xr[m]
                        a[0], a[1], a[2], a[3] = ldmatrix_x4(
                            ring, x_tile + m * 16 * LINE + (line ^ i * 2)
                        )
                    for k in range(0, KS, 2):
                        b = ldmatrix_x4_trans(ring, w_tile + i * LINE + (line ^ k * 16))
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
