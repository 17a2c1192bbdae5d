"""The weight-gradient of float32: regions as for the half types, with three products of tf32.

The copy engine brings the groups of features of each stage, DEPTH rows of 32 features, their pieces
of 16 bytes swizzled. Every warp asks for some of them, waits for a stage at one barrier, multiplies
what its slots need of it, and gives it back at another: a warp may be a stage ahead of others.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, shared_memory
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import BYTES, aligned
from numbsparse.kernels.matmul.k7_small_blocks.card import registers
from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.single_boxes import (
    WIDE,
    fetch_boxes,
    map_of,
    plan_boxes,
)
from numbsparse.kernels.matmul.k7_small_blocks.single_slots import (
    Sums,
    products,
    translated,
)
from numbsparse.kernels.matmul.k7_small_blocks.single_sums import (
    any_nan,
    mend_slots,
    store_slots,
    total_kernel,
)
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import SWIZZLED, steps_in_strips
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    first_multiple,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    shfl_idx,
    sync_warp,
)
from numbsparse.kernels.views import span


def in_regions(x: Any, dy: Any, index: Any, dvalues: Any, precision: str) -> None:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    n_blocks, B, _ = dvalues.shape
    (batch, in_features), out_features = x.shape, dy.shape[1]
    if n_blocks == 0:
        return
    if batch == 0:
        fill(dvalues, 0)
        return
    kept, *_ = planned(index, steps_in_strips, B, False, min(512, -(-out_features // B) * B), 32, 1)
    region = region_of(B, kept)
    widths = in_features, out_features
    plan = planned(index, plan_boxes, B, widths, region, multiprocessors())
    segments, boxes, codes, used, blocks, cut, pieces = plan
    slots = region.WARPS * region.SLOTS * cut.size
    partials = empty((max(slots * pieces * 16 * B, 1),), "float32")
    edge = in_features % B > 0 or out_features % B > 0
    wide = not edge and dvalues.address % BYTES == 0
    sums = Sums(B, region, wide, precision == "highest")
    x, dy = aligned(x), aligned(dy)
    strides = x.strides[0] // x.itemsize, dy.strides[0] // dy.itemsize
    operands = (
        *(batch, span(x), strides[0], span(dy), strides[1], blocks),
        *(index.block_rows, index.block_columns, in_features, out_features, partials),
        span(dvalues),
    )
    launch(
        region_kernel(sums),
        segments.size // 4,
        32 * region.WARPS,
        *operands,
        *(map_of(a, groups, region) for a in (x, dy) for groups in (1, WIDE)),
        segments,
        boxes,
        codes,
        used,
        shared_bytes=region.SHARED_BYTES,
    )
    launch(total_kernel(sums), slots, 32, *operands, cut, pieces)


def region_of(B: int, kept: float) -> Region:
    """As many blocks as the registers of a multiprocessor hold, if shared memory holds their x and
    dy; where few are kept near each other, more features of fewer rows or stages."""
    limit = shared_memory()
    if limit is None:
        return Region(2, 4, 4, 16, 2, ITEM=4) if kept > 0.2 else Region(2, 4, 8, 8, 2, ITEM=4)
    if B == 8:
        shape = (16, 16, 37, 16, 3) if kept > 0.05 else (16, 16, 54, 16, 2)
    elif kept > 0.05:
        shape = (12, 12, 37, 16, 3) if kept > 0.12 else (12, 12, 54, 16, 2)
    else:
        shape = 16, 8, 108, 8, 2
    region = Region(*shape, ITEM=4)
    limit -= SWIZZLED + 16 * (region.WARPS * region.SLOTS + 1) + 16 * region.STAGES
    return region._replace(GROUPS=min(region.GROUPS, limit // (region.STAGES * region.GROUP_BYTES)))


@cache
def region_kernel(sums: Sums) -> Any:
    B, region, exact = sums.B, sums.region, sums.exact
    WARPS, SLOTS, DEPTH, STAGES = region.WARPS, region.SLOTS, region.DEPTH, region.STAGES
    THREADS, CODES, BARRIERS, COUNT = 32 * WARPS, WARPS * SLOTS, 2 * STAGES, sums.PER_LANE
    WORDS, ACC, STAGE_BYTES = 4 * (CODES + 1), (SLOTS, COUNT), region.STAGE_BYTES
    AHEAD, SHARE = max(STAGES - 2, 1), -(-region.GROUPS // WARPS)
    look_up, fetch = fetch_boxes(region)
    add_products, translate = products(sums), translated(region)
    store, nan_in, mend = store_slots(sums, SLOTS), any_nan(*ACC), mend_slots(B)

    @cuda.jit(**registers(WARPS))
    def kernel(
        batch,
        x,
        x_stride,
        dy,
        dy_stride,
        blocks,
        block_rows,
        block_columns,
        in_features,
        out_features,
        partials,
        dvalues,
        x_map,
        x_wide,
        dy_map,
        dy_wide,
        segments,
        boxes,
        codes,
        useds,
    ):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        ring = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        own = cuda.shared.array(WORDS, uint32, ALIGNMENT)
        base = first_multiple(shared, SWIZZLED)
        acc = cuda.local.array(ACC, float32)
        for p in range(SLOTS):
            for i in range(COUNT):
                acc[p, i] = 0
        t = uint32(cuda.threadIdx.x)
        warp, lane = shfl_idx(uint32(t // 32), 0), t % 32
        item, piece = segments[4 * cuda.blockIdx.x], segments[4 * cuda.blockIdx.x + 1]
        pieces, partial = segments[4 * cuda.blockIdx.x + 2], segments[4 * cuda.blockIdx.x + 3]
        for i in range(t, 4, THREADS):  # of a slot that is read ahead of
            own[4 * CODES + i] = 0
        for i in range(t, CODES, THREADS):
            own[4 * i], own[4 * i + 1], own[4 * i + 2] = translate(codes[item * CODES + i])
        mine = cuda.local.array(SHARE, int32)
        nbytes = look_up(boxes, item, warp, mine)
        maps = x_map, x_wide, dy_map, dy_wide
        if t == 0:
            for i in range(STAGES):
                mbarrier_init(bars, i, WARPS)
                mbarrier_init(bars, STAGES + i, WARPS)
            fence_mbarrier_init()
        for m in maps:
            fence_tensor_map(m)
        cuda.syncthreads()
        chunks = (batch + DEPTH - 1) // DEPTH
        first = chunks * piece // pieces
        steps = int32(chunks * (piece + 1) // pieces - first)
        row = int32(first * DEPTH)
        used = useds[item * WARPS + warp]

        stage = then = phase = uint32(0)  # the stages that are multiplied and fetched
        then_phase = uint32(1)
        for step in range(int32(-AHEAD), steps):
            if step + AHEAD < steps:
                mbarrier_wait(bars, STAGES + then, then_phase)
                if elect() != 0:
                    mbarrier_expect(bars, then, nbytes)
                    start = uint32(base + then * STAGE_BYTES)
                    fetch(maps, mine, row, shared, start, bars, then)
                row = int32(row + DEPTH)
                then = uint32(then + 1)
                if then == STAGES:
                    then, then_phase = uint32(0), uint32(then_phase ^ 1)
            if step >= 0:
                mbarrier_wait(bars, stage, phase)
                start = uint32(base + stage * STAGE_BYTES)
                add_products(shared, ring, start, own, warp * SLOTS, used, acc)
                sync_warp()
                if lane == 0:
                    mbarrier_arrive(bars, STAGES + stage)
                stage = uint32(stage + 1)
                if stage == STAGES:
                    stage, phase = uint32(0), uint32(phase ^ 1)

        slot = (item * WARPS + warp) * SLOTS
        if partial >= 0:
            at = (int64(partial) * WARPS + warp) * (SLOTS * COUNT * 32) + lane
            for p in range(SLOTS):
                for i in range(COUNT):
                    partials[at + (p * COUNT + i) * 32] = acc[p, i]
        else:
            store(acc, used, blocks, slot, block_rows, block_columns, in_features, out_features,
                  dvalues)  # fmt: skip
            if exact and cuda.syncthreads_or(nan_in(acc)):
                mend(batch, x, x_stride, dy, dy_stride, blocks, block_rows, block_columns, dvalues,
                     slot, used)  # fmt: skip

    return kernel
