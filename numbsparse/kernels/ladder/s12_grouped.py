"""Step 12: block columns that keep the same input blocks share x's tile.

A block of threads computes COLUMNS block columns together. Which ones is chosen on the host, once
for a layout: columns that keep much the same input blocks form a group. A step loads TERMS terms of
x, two input blocks of 32, and the blocks of all columns of the group that keep these, side by side,
as one wide operand; a mask says to which column and input each block belongs.

What changed since the step before: `plan` writes a record of what a group does in each step, and
the kernel reads that in place of the layout. The producer must not wait for it: lane e loads number
e of a record while the step before is requested, and `shfl_idx` gives it to all lanes. A column's
sums are registers, so each has its own products in the code, and those that the mask does not name
are skipped. BM is 256: four warpgroups share w.

Reads per output, for a sum of K products: K / (B U) + K / BM from global memory, where a tile of x
serves U columns; K / B + K / 64 from shared memory.

The limit: a block of threads begins with an empty ring and ends with a store, and there is only one
on a multiprocessor, because its ring fills shared memory. At both ends the tensor cores are idle.
The next step lets blocks of threads stay.
"""

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
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

unsupported = taught("s12_grouped", "float16", BM, (9, 0))


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    (batch, out_features), B = y.shape, values.shape[1]
    check(x, values, y, BN // B)
    grid = batch // BM * (out_features // BN)
    BK = min(B, 64)
    x_map, w_map = tensor_map(x, (BM, BK)), tensor_map(values, (1, BK, BK))
    steps = planned(index, plan, BN // B, TERMS // BK)
    args = x_map, w_map, *steps, pairs(y), out_features
    launch(line_kernel(B), grid, THREADS, *args, shared_bytes=RING + ALIGNED)


def plan(index, COLUMNS, INPUTS):
    """(groups, starts, records): the columns of each group, and what it does step by step.

    Of each step of group g, records[starts[g]] to records[starts[g + 1] - 1]: how many blocks it
    loads; a mask, whose bit e COLUMNS + c says whether column c of the group keeps the e-th input;
    the INPUTS inputs, of which one may stand twice; the blocks, in the order of the bits; zeros.
    """
    walk, columns = index.columns, len(index.columns.indptr) - 1
    kept = np.full((columns, len(index.rows.indptr) - 1), -1)
    kept[np.repeat(np.arange(columns), np.diff(walk.indptr)), walk.indices] = walk.blocks
    groups, records, starts = grouped((kept >= 0).astype(np.float32), COLUMNS), [], [0]
    for group in groups:
        own = kept[group].T  # (inputs, COLUMNS)
        inputs = np.flatnonzero((own >= 0).any(1))
        for first in range(0, len(inputs), INPUTS):
            these = inputs[first : first + INPUTS]
            bits = np.flatnonzero(own[these].reshape(-1) >= 0)
            head = len(bits), sum(1 << bits), *np.resize(these, INPUTS)
            record = *head, *own[these].reshape(-1)[bits]
            records.append(np.pad(record, (0, 32 - len(record))))
        starts.append(len(records))
    records.append(np.zeros(32))  # read ahead
    return tuple(np.array(array, np.int32) for array in (groups, starts, records))


def grouped(keeps, COLUMNS):
    """(groups, COLUMNS): each column with those left that keep most of what its group keeps."""
    left, groups = np.arange(len(keeps)), []
    while left.size:
        own: list[int] = []
        together = np.zeros_like(keeps[0])
        for _ in range(COLUMNS):
            # Inputs in common with the group, less those whose tiles it would load besides.
            best = np.argmax(keeps[left] @ (2 * together - 1) if own else keeps[left].sum(1))
            own.append(left[best])
            together, left = np.maximum(together, keeps[left[best]]), np.delete(left, best)
        groups.append(own)
    return np.array(groups)


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
    def kernel(x_map, w_map, groups, starts, records, y, out_features):
        ring = cuda.shared.array(0, uint8)
        full = cuda.shared.array(STAGES, uint64)
        empty = cuda.shared.array(STAGES, uint64)
        sums, record = cuda.local.array(SUMS, float32), cuda.local.array(NUMBERS, int32)
        t, tiles = uint32(cuda.threadIdx.x), starts.size - 1
        group = uint32(cuda.blockIdx.x % tiles)
        top = uint32(cuda.blockIdx.x // tiles * BM)
        warp, lane = shfl_idx(uint32(t // 32), 0), t % 32  # said to be the same for all lanes
        first = starts[group]
        steps = (starts[group + 1] - first) * PARTS
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
            coming = records[first, lane]
            for step in range(steps):
                number, part = coming, step % PARTS * BK
                coming = records[first + (step + 1) // PARTS, lane]
                stage, phase = uint32(step % STAGES), uint32(step // STAGES % 2)
                mbarrier_wait(empty, stage, phase ^ 1)
                for e in range(NUMBERS):
                    record[e] = shfl_idx(number, e)
                if elect() != 0:
                    at = uint32(base + stage * STAGE)
                    fetch(x_map, top, w_map, part, record, ring, at, full, stage)
        else:  # a consumer
            acc = no_sums()
            for step in range(steps):
                mask = uint32(records[first + step // PARTS, 1])
                stage, phase = uint32(step % STAGES), uint32(step // STAGES % 2)
                mbarrier_wait(full, stage, phase)
                xs = uint32(base + stage * STAGE + warp // 4 * WM * LINE)
                ws = uint32(base + stage * STAGE + W_START)
                acc = multiply(acc, ring, xs, ring, ws, mask)
                if lane == 0:
                    mbarrier_arrive(empty, stage)
            # A warp has 16 rows; a lane two neighbours of a row, and the same two eight rows below.
            to_local(acc, sums)
            for h in range(2):
                n = uint32(top + warp * 16 + h * 8 + lane // 4)
                for k in range(BN // 8):
                    left = groups[group, k * 8 // B] * B
                    y_at = uint32(n * out_features + left + k * 8 % B + lane % 4 * 2)
                    y[y_at // 2] = pack_half2(sums[4 * k + 2 * h], sums[4 * k + 2 * h + 1])

    return kernel
