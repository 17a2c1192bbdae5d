"""Step 11: a warp that fetches, and warpgroups that multiply.

The threads take two roles. One warp, the producer, requests tiles and does nothing else; the
others, the consumers, multiply. Each stage has two barriers: the producer waits until it is empty,
the consumers wait until it is full, and each warp of them arrives at the other barrier when it is
done. Nobody waits for everybody.

What changed since the step before: no `syncthreads` in the loop, but a second array of barriers.
One lane of the producer, chosen by `elect`, does it: of `t == 0` the compiler would make a loop
over the lanes. `step // STAGES % 2` is the phase; who waits for an empty stage waits for the phase
before, so that the first round finds all stages empty.

Reads per output, for a sum of K products: K / B + K / BM from global memory, K / B + K / 64 from
shared memory, as before.

The limit: the L2 cache, which serves x again for every block column that keeps the same input
blocks. The next step computes several of them together.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.ladder.taught import check, pairs, taught
from numbsparse.kernels.ptx import (
    Operand,
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    first_multiple,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    pack_half2,
    shfl_idx,
    tma_load_2d,
    tma_load_3d,
    to_local,
    wgmma,
    zeros,
)

BM = 128  # rows of y for a block of threads
WM = 64  # rows of a warpgroup
WARPS = BM // WM * 4  # the consumers; the producer follows
THREADS = 32 * WARPS + 32
STAGES = 4  # of the ring
ALIGNED = 1024  # bytes: where the ring begins, so that a swizzle depends only on the line

unsupported = taught("s11_producer", "float16", BM, (9, 0))


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
        empty = cuda.shared.array(STAGES, uint64)
        sums = cuda.local.array(SUMS, float32)
        t, columns = uint32(cuda.threadIdx.x), indptr.size - 1
        column = uint32(cuda.blockIdx.x % columns)
        top = uint32(cuda.blockIdx.x // columns * BM)
        warp, lane = shfl_idx(uint32(t // 32), 0), t % 32  # said to be the same for all lanes
        first = indptr[column]
        steps = (indptr[column + 1] - first) * PARTS
        base = first_multiple(ring, ALIGNED)
        if t == 0:
            for stage in range(STAGES):
                mbarrier_init(full, stage, 1)  # arrival, and the bytes that it says
                mbarrier_init(empty, stage, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        if warp == WARPS:  # the producer
            fence_tensor_map(x_map)
            fence_tensor_map(w_map)
            for step in range(steps):
                position, part = first + step // PARTS, step % PARTS * BK
                c, block = indices[position] * B + part, blocks[position]
                stage, phase = uint32(step % STAGES), uint32(step // STAGES % 2)
                mbarrier_wait(empty, stage, phase ^ 1)
                if elect() != 0:
                    at = uint32(base + stage * STAGE)
                    fetch(x_map, c, top, w_map, part, block, ring, at, full, stage)
        else:  # a consumer
            acc = no_sums()
            for step in range(steps):
                stage, phase = uint32(step % STAGES), uint32(step // STAGES % 2)
                mbarrier_wait(full, stage, phase)
                xs = uint32(base + stage * STAGE + warp // 4 * WM * LINE)
                ws = uint32(base + stage * STAGE + XS)
                acc = multiply(acc, ring, xs, ring, ws)
                if lane == 0:
                    mbarrier_arrive(empty, stage)
            # A warp has 16 rows; a lane two neighbours of a row, and the same two eight rows below.
            to_local(acc, sums)
            for h in range(2):
                n = uint32(top + warp * 16 + h * 8 + lane // 4)
                for k in range(B // 8):
                    y_at = uint32(n * out_features + column * B + k * 8 + lane % 4 * 2)
                    y[y_at // 2] = pack_half2(sums[4 * k + 2 * h], sums[4 * k + 2 * h + 1])

    return kernel
