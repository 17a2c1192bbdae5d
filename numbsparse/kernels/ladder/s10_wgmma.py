"""Step 10: `wgmma` multiplies straight from shared memory.

Four warps together, a warpgroup, multiply 64 rows of x by a whole block of w: up to 64 x 128 sums,
16 terms at a time. The operands never pass through registers, which are free for sums; so a block
of threads computes a whole block column, and x is read once for it.

What changed since the step before: no ldmatrix. An `Operand` describes a tile in shared memory,
including its swizzle, and the hardware reads it. `acc` is a tuple that `multiply` takes and
returns: so no compiler touches a sum while the tensor cores work on it. Tiles are as wide as a
block, BN = B, and as deep as 128 bytes of a line allow; a wider w has two panels.

Reads per output, for a sum of K products: K / B + K / BM from global memory; K / B + K / 64 from
shared memory, at the tensor cores' own pace.

The limit: all threads wait for each other in every step, only so that one of them may request the
next tiles. The next step gives that one a warp of its own.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.ladder.taught import check, pairs, taught
from numbsparse.kernels.ptx import (
    Operand,
    fence_mbarrier_init,
    fence_tensor_map,
    first_multiple,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    pack_half2,
    tma_load_2d,
    tma_load_3d,
    to_local,
    wgmma,
    zeros,
)

BM = 128  # rows of y for a block of threads
WM = 64  # rows of a warpgroup
THREADS = BM // WM * 128
STAGES = 4  # of the ring
ALIGNED = 1024  # bytes: where the ring begins, so that a swizzle depends only on the line

unsupported = taught("s10_wgmma", "float16", BM, (9, 0))


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    check(x, values, y)
    (batch, out_features), B = y.shape, values.shape[1]
    grid = batch // BM * (out_features // B)
    BK = min(B, 64)
    x_map, w_map = tensor_map(x, (BM, BK)), tensor_map(values, (1, BK, BK))
    kernel, ring_bytes = line_kernel(B), STAGES * 2 * BK * (BM + B) + ALIGNED
    args = x_map, w_map, *index.columns, pairs(y), out_features
    launch(kernel, grid, THREADS, *args, shared_bytes=ring_bytes)


@cache
def line_kernel(B: int) -> Any:
    BK = min(B, 64)  # terms of the sum in a step
    LINE = 2 * BK  # bytes of a line of either tile
    XS, WS = BM * LINE, B * LINE  # bytes of a tile
    STAGE, PANEL = XS + WS, BK * LINE  # a panel of w: BK of its columns
    PARTS = B // BK  # steps in a block, and panels
    SUMS = WM * B // 128  # of a thread
    x_operand, w_operand = Operand(LINE, 0), Operand(LINE, PANEL, True)
    # 1 x 64 rows by B columns, of BK // 16 times 16 terms.
    multiply, no_sums = wgmma("f16", 1, B, BK // 16, x_operand, w_operand), zeros(SUMS)

    @cuda.jit(device=True)
    def fetch(x_map, feature, row, w_map, part, block, ring, at, full, stage):
        mbarrier_expect(full, stage, STAGE)
        tma_load_2d(ring, at, x_map, int32(feature), int32(row), full, stage)
        for p in range(PARTS):
            there = uint32(at + XS + p * PANEL)
            tma_load_3d(ring, there, w_map, int32(p * BK), int32(part), block, full, stage)

    @cuda.jit
    def kernel(x_map, w_map, indptr, indices, blocks, y, out_features):
        ring = cuda.shared.array(0, uint8)
        full = cuda.shared.array(STAGES, uint64)
        sums = cuda.local.array(SUMS, float32)
        acc = no_sums()
        t, columns = uint32(cuda.threadIdx.x), indptr.size - 1
        column = uint32(cuda.blockIdx.x % columns)
        top = uint32(cuda.blockIdx.x // columns * BM)
        warp, lane = t // 32, t % 32
        first = indptr[column]
        steps = (indptr[column + 1] - first) * PARTS
        base = first_multiple(ring, ALIGNED)
        if t == 0:
            fence_tensor_map(x_map)
            fence_tensor_map(w_map)
            for stage in range(STAGES):
                mbarrier_init(full, stage, 1)  # arrival, and the bytes that it says
            fence_mbarrier_init()
        cuda.syncthreads()
        for step in range(1 - STAGES, steps):
            ahead = step + STAGES - 1
            if t == 0 and ahead < steps:
                position, part = first + ahead // PARTS, ahead % PARTS * BK
                stage, c = uint32(ahead % STAGES), indices[position] * B + part
                at, block = uint32(base + stage * STAGE), blocks[position]
                fetch(x_map, c, top, w_map, part, block, ring, at, full, stage)
            if step >= 0:
                stage = uint32(step % STAGES)
                mbarrier_wait(full, stage, uint32(step // STAGES % 2))
                xs = uint32(base + stage * STAGE + t // 128 * WM * LINE)
                ws = uint32(base + stage * STAGE + XS)
                acc = multiply(acc, ring, xs, ring, ws)
                cuda.syncthreads()
        # A warp has 16 rows; a lane two neighbours of a row, and the same two eight rows below.
        to_local(acc, sums)
        for h in range(2):
            n = uint32(top + warp * 16 + h * 8 + lane // 4)
            for k in range(B // 8):
                y_at = uint32(n * out_features + column * B + k * 8 + lane % 4 * 2)
                y[y_at // 2] = pack_half2(sums[4 * k + 2 * h], sums[4 * k + 2 * h + 1])

    return kernel
