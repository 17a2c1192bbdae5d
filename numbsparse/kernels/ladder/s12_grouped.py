"""Step 12: block columns that keep the same input blocks share x's tile.

A block of threads computes COLUMNS block columns together. Which ones is chosen on the host, once
for a layout: columns that keep much the same input blocks form a group. A step loads one tile of x
and the blocks of all columns of the group that keep its input block, side by side, as one wide
operand; a mask says which column each block belongs to.

What changed since the step before: `plan` writes what a group does step by step, and the kernel
reads that in place of the layout. A column's sums are registers, so each has its own products in
the code, and those that the mask does not name are skipped. BM is 256: four warpgroups share w.

Reads per output, for a sum of K products: K / (B U) + K / BM from global memory, where a tile of x
serves U columns; K / B + K / 64 from shared memory.

The limit: a block of threads begins with an empty ring and ends with a store, and there is only one
on a multiprocessor, because its ring fills shared memory. At both ends the tensor cores are idle.
The next step lets blocks of threads stay.
"""

from __future__ import annotations

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
    x_map, w_map = tensor_map(x, (BM, BK), 2 * BK), tensor_map(values, (1, BK, BK), 2 * BK)
    steps = planned(index, plan, BN // B)
    args = x_map, w_map, *steps, pairs(y), out_features
    launch(line_kernel(B), grid, THREADS, *args, shared_bytes=RING + ALIGNED)


def plan(index, COLUMNS):
    """(groups, starts, inputs, masks, firsts, blocks): the steps of each group of columns.

    Step s of group g, starts[g] <= s < starts[g + 1], loads the tile of x at block row inputs[s].
    Bit c of masks[s] says whether column groups[g, c] keeps that input; the kept blocks are
    blocks[firsts[s]] to blocks[firsts[s + 1] - 1].
    """
    walk = index.columns
    lines = np.repeat(np.arange(len(walk.indptr) - 1), np.diff(walk.indptr))
    keeps = np.zeros((len(walk.indptr) - 1, len(index.rows.indptr) - 1), np.float32)
    keeps[lines, walk.indices] = 1
    groups = grouped(keeps, COLUMNS)
    group, column = np.divmod(np.argsort(groups.reshape(-1))[lines], COLUMNS)
    order = np.lexsort((column, walk.indices, group))
    group, column, inputs = group[order], column[order], walk.indices[order]
    firsts = np.flatnonzero(np.diff(group, prepend=-1) | np.diff(inputs, prepend=-1))
    masks = np.bitwise_or.reduceat(1 << column, firsts)
    starts = np.searchsorted(group[firsts], np.arange(len(groups) + 1))
    arrays = (
        groups,
        starts,
        inputs[firsts],
        masks,
        np.append(firsts, len(order)),
        walk.blocks[order],
    )
    return tuple(array.astype(np.int32) for array in arrays)


def grouped(keeps, COLUMNS):
    """(groups, COLUMNS): each column with those left that keep most of what its group keeps."""
    left, groups = np.arange(len(keeps)), []
    while left.size:
        own: list[int] = []
        together = np.zeros_like(keeps[0])
        for _ in range(COLUMNS):
            best = np.argmax(keeps[left] @ (2 * together - 1) if own else keeps[left].sum(1))
            own.append(left[best])
            together, left = np.maximum(together, keeps[left[best]]), np.delete(left, best)
        groups.append(own)
    return np.array(groups)


@cache
def line_kernel(B: int) -> Any:
    COLUMNS = BN // B
    BK = min(B, 64)  # terms of the sum in a step
    LINE = 2 * BK  # bytes of a line of either tile
    XS, WS = BM * LINE, B * LINE  # bytes of a tile, and of a part of a block
    PANEL = BK * LINE  # a panel of w: BK of its columns
    STAGE = XS + COLUMNS * WS
    STAGES = RING // STAGE
    PARTS = B // BK  # steps for an input block, and panels
    SUMS = WM * BN // 128  # of a thread
    x_operand, w_operand = Operand(LINE, 0), Operand(LINE, PANEL, True)
    multiply, no_sums = wgmma("f16", 1, B, BK // 16, x_operand, w_operand, COLUMNS), zeros(SUMS)

    @cuda.jit(device=True)
    def fetch(x_map, feature, row, w_map, part, blocks, first, last, ring, at, full, stage):
        mbarrier_expect(full, stage, uint32(XS + (last - first) * WS))
        tma_load_2d(ring, at, x_map, int32(feature), int32(row), full, stage)
        for b in range(first, last):
            for p in range(PARTS):
                there = uint32(at + XS + (b - first) * WS + p * PANEL)
                tma_load_3d(ring, there, w_map, int32(p * BK), int32(part), blocks[b], full, stage)

    @cuda.jit
    def kernel(x_map, w_map, groups, starts, inputs, masks, firsts, blocks, y, out_features):
        ring = cuda.shared.array(0, uint8)
        full = cuda.shared.array(STAGES, uint64)
        empty = cuda.shared.array(STAGES, uint64)
        sums = cuda.local.array(SUMS, float32)
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
            for step in range(steps):
                s, part = first + step // PARTS, step % PARTS * BK
                c, begin, end = inputs[s] * B + part, firsts[s], firsts[s + 1]
                stage, phase = uint32(step % STAGES), uint32(step // STAGES % 2)
                mbarrier_wait(empty, stage, phase ^ 1)
                if elect() != 0:
                    at = uint32(base + stage * STAGE)
                    fetch(x_map, c, top, w_map, part, blocks, begin, end, ring, at, full, stage)
        else:  # a consumer
            acc = no_sums()
            for step in range(steps):
                mask = uint32(masks[first + step // PARTS])
                stage, phase = uint32(step % STAGES), uint32(step // STAGES % 2)
                mbarrier_wait(full, stage, phase)
                xs = uint32(base + stage * STAGE + warp // 4 * WM * LINE)
                ws = uint32(base + stage * STAGE + XS)
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
