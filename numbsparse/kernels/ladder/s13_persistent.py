"""Step 13: blocks of threads that stay for the whole launch.

There is one block of threads for each multiprocessor (they are persistent), and it computes tile
after tile of y. The ring continues from one tile to the next: while the consumers store y, the
producer already fetches what the next tile needs, as far as stages of the ring are free.

What changed since the step before: producer and consumers each have a loop over tiles around the
loop over steps, and `turn` counts the steps of all tiles, for stages and phases. Tiles go down the
groups first and the rows of x last, so that those rows stay in the L2 cache meanwhile.

Reads per output, for a sum of K products: K / (B U) + K / BM from global memory, K / B + K / 64
from shared memory, as before.

The limit: the L2 cache again, and storing y. Each multiprocessor fetches its own copy of w, though
its neighbour multiplies other rows by the same blocks. The next step fetches them once for two.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.ladder.s12_grouped import plan
from numbsparse.kernels.ladder.taught import check, pairs, taught
from numbsparse.kernels.parts.plans import planned
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

BM = 256  # rows of y for a block of threads
BN = 128  # its columns, in blocks of B
TERMS = 64  # of a sum in a step: of one input block, or of two of 32
WM = 64  # rows of a warpgroup
WARPS = BM // WM * 4  # the consumers; the producer follows
THREADS = 32 * WARPS + 32
RING = 192 * 1024  # bytes
ALIGNED = 1024  # bytes: where the ring begins, so that a swizzle depends only on the line

unsupported = taught("s13_persistent", "float16", BM, (9, 0))


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    (batch, out_features), B = y.shape, values.shape[1]
    check(x, values, y, BN // B)
    grid = min(multiprocessors(), batch // BM * (out_features // BN))
    BK = min(B, 64)
    x_map, w_map = tensor_map(x, (BM, BK)), tensor_map(values, (1, BK, BK))
    steps = planned(index, plan, BN // B, TERMS // BK)
    args = x_map, w_map, *steps, pairs(y), batch, out_features
    launch(line_kernel(B), grid, THREADS, *args, shared_bytes=RING + ALIGNED)


@cache
def line_kernel(B: int) -> Any:
    COLUMNS = BN // B
    BK = min(B, 64)  # terms of an input block in a step
    INPUTS = TERMS // BK
    BLOCKS = INPUTS * COLUMNS  # of a step, at most
    NUMBERS = 2 + INPUTS + BLOCKS  # of a record
    LINE = 2 * BK  # bytes of a line of either tile
    XS, WS = BM * LINE, B * LINE  # bytes of a tile, and of a part of a block
    W_START, PANEL = INPUTS * XS, BK * LINE  # of a stage; a panel of w: BK of its columns
    STAGE = W_START + BLOCKS * WS
    STAGES = RING // STAGE
    PARTS = B // BK  # steps for an input block, and panels
    SUMS = WM * BN // 128  # of a thread
    x_operand, w_operand = Operand(LINE, 0), Operand(LINE, PANEL, True)
    multiply = wgmma("f16", 1, B, BK // 16, x_operand, w_operand, COLUMNS, INPUTS, XS)
    no_sums = zeros(SUMS)

    @cuda.jit(device=True)
    def fetch(x_map, row, w_map, part, record, ring, at, full, stage):
        mbarrier_expect(full, stage, uint32(W_START + record[0] * WS))
        for e in range(INPUTS):
            feature = int32(record[2 + e] * B + part)
            tma_load_2d(ring, uint32(at + e * XS), x_map, feature, int32(row), full, stage)
        for b in range(BLOCKS):
            if b < record[0]:
                for p in range(PARTS):
                    there = uint32(at + W_START + b * WS + p * PANEL)
                    corner = int32(p * BK), int32(part), record[2 + INPUTS + b]
                    tma_load_3d(ring, there, w_map, *corner, full, stage)

    @cuda.jit
    def kernel(x_map, w_map, groups, starts, records, y, batch, out_features):
        ring = cuda.shared.array(0, uint8)
        full = cuda.shared.array(STAGES, uint64)
        empty = cuda.shared.array(STAGES, uint64)
        sums, record = cuda.local.array(SUMS, float32), cuda.local.array(NUMBERS, int32)
        t, n_groups = uint32(cuda.threadIdx.x), starts.size - 1
        tiles = n_groups * (batch // BM)
        warp, lane = shfl_idx(uint32(t // 32), 0), t % 32  # said to be the same for all lanes
        turn = uint32(0)  # steps done, in all tiles
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
            for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
                group, top = tile % n_groups, tile // n_groups * BM
                coming = records[starts[group], lane]
                for step in range(starts[group] * PARTS, starts[group + 1] * PARTS):
                    number, part = coming, step % PARTS * BK
                    coming = records[(step + 1) // PARTS, lane]
                    stage, phase = uint32(turn % STAGES), uint32(turn // STAGES % 2)
                    mbarrier_wait(empty, stage, phase ^ 1)
                    for e in range(NUMBERS):
                        record[e] = shfl_idx(number, e)
                    if elect() != 0:
                        at = uint32(base + stage * STAGE)
                        fetch(x_map, top, w_map, part, record, ring, at, full, stage)
                    turn = uint32(turn + 1)
        else:  # a consumer
            for tile in range(cuda.blockIdx.x, tiles, cuda.gridDim.x):
                group, top = tile % n_groups, tile // n_groups * BM
                acc = no_sums()
                for step in range(starts[group] * PARTS, starts[group + 1] * PARTS):
                    mask = uint32(records[step // PARTS, 1])
                    stage, phase = uint32(turn % STAGES), uint32(turn // STAGES % 2)
                    mbarrier_wait(full, stage, phase)
                    xs = uint32(base + stage * STAGE + warp // 4 * WM * LINE)
                    ws = uint32(base + stage * STAGE + W_START)
                    acc = multiply(acc, ring, xs, ring, ws, mask)
                    if lane == 0:
                        mbarrier_arrive(empty, stage)
                    turn = uint32(turn + 1)
                # A warp has 16 rows; a lane two neighbours of a row, and of the eighth below it.
                to_local(acc, sums)
                for h in range(2):
                    n = uint32(top + warp * 16 + h * 8 + lane // 4)
                    for k in range(BN // 8):
                        left = groups[group, k * 8 // B] * B
                        y_at = uint32(n * out_features + left + k * 8 % B + lane % 4 * 2)
                        y[y_at // 2] = pack_half2(sums[4 * k + 2 * h], sums[4 * k + 2 * h + 1])

    return kernel
