"""The weight-gradient of float32: regions as for the half types, with three products of tf32.

The copy engine brings the groups of features of each stage, DEPTH rows of 32 features, or 32 lines
of DEPTH rows where a factor lies feature-major; their pieces of 16 bytes are swizzled.
`single_roles` says who asks for them and who multiplies.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, shared_memory
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import BYTES, aligned_either_way
from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.single_boxes import (
    WIDE,
    box_map,
    plan_boxes,
)
from numbsparse.kernels.matmul.k7_small_blocks.single_roles import (
    multiplier,
    registers_of,
    supplier,
)
from numbsparse.kernels.matmul.k7_small_blocks.single_slots import Sums, translated
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
    fence_mbarrier_init,
    first_multiple,
    mbarrier_init,
    shfl_idx,
)
from numbsparse.kernels.views import span

# The part of the blocks that is kept, at most; slots at once; warps, slots, groups, rows, stages.
# Features that lie along the batch come 16 rows at once: lines of 64 bytes.
SHAPES = {
    8: [
        (0.03, 2, (12, 14, 54, 16, 2)),
        (0.07, 2, (12, 18, 54, 16, 2)),
        (1, 2, (12, 22, 36, 16, 3)),
    ],
    16: [
        (0.03, 2, (16, 8, 108, 8, 2)),
        (0.12, 1, (12, 12, 54, 16, 2)),
        (1, 1, (12, 12, 36, 16, 3)),
    ],
}


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
    (x, x_turned), (dy, dy_turned) = aligned_either_way(x), aligned_either_way(dy)
    region, at_once = region_of(B, kept, x_turned or dy_turned)
    widths = in_features, out_features
    plan = planned(index, plan_boxes, B, widths, region, multiprocessors())
    segments, boxes, codes, used, blocks, cut, pieces = plan
    slots = region.WARPS * region.SLOTS * cut.size
    partials = empty((max(slots * pieces * 16 * B, 1),), "float32")
    edge = in_features % B > 0 or out_features % B > 0
    wide = not edge and dvalues.address % BYTES == 0
    sums = Sums(B, region, at_once, wide, precision == "highest", x_turned, dy_turned)
    strides = x.strides[0] // x.itemsize, dy.strides[0] // dy.itemsize
    operands = (
        *(batch, span(x), strides[0], span(dy), strides[1], blocks),
        *(index.block_rows, index.block_columns, in_features, out_features, partials),
        span(dvalues),
    )
    launch(
        region_kernel(sums),
        segments.size // 4,
        32 * (region.WARPS + region.FETCHERS),
        *operands,
        *(box_map(x, x_turned, groups, region) for groups in (1, WIDE)),
        *(box_map(dy, dy_turned, groups, region) for groups in (1, WIDE)),
        segments,
        boxes,
        codes,
        used,
        shared_bytes=region.SHARED_BYTES,
    )
    launch(total_kernel(sums), slots, 32, *operands, cut, pieces)


def region_of(B: int, kept: float, turned: bool) -> tuple[Region, int]:
    """As many blocks as the registers of a multiprocessor hold, if shared memory holds their x and
    dy; where few are kept, more features of fewer rows or stages. And the slots taken at once."""
    limit = shared_memory()
    if limit is None:
        groups, depth = (4, 16) if kept > 0.2 else (8, 8)
        return Region(2, 4, groups, depth, 2, FETCHERS=1, ITEM=4), 1 if kept > 0.4 else 2
    rows = (row for row in SHAPES[B] if kept <= row[0])
    ways = ((at_once, Region(*shape, FETCHERS=4, ITEM=4)) for _, at_once, shape in rows)
    at_once, region = next(way for way in ways if way[1].DEPTH >= 16 or not turned)
    limit -= SWIZZLED + 16 * region.WARPS * region.SLOTS + 16 * region.STAGES
    groups = min(region.GROUPS, limit // (region.STAGES * region.GROUP_BYTES))
    return region._replace(GROUPS=groups), at_once


@cache
def region_kernel(sums: Sums) -> Any:
    region, exact = sums.region, sums.exact
    WARPS, SLOTS, DEPTH, STAGES = region.WARPS, region.SLOTS, region.DEPTH, region.STAGES
    FETCHERS, CODES, BARRIERS, COUNT = region.FETCHERS, WARPS * SLOTS, 2 * STAGES, sums.PER_LANE
    THREADS, WORDS, ACC = 32 * (WARPS + FETCHERS), 4 * CODES, (SLOTS, COUNT)
    supply, multiply, translate = supplier(sums), multiplier(sums), translated(sums)
    store, nan_in, mend = store_slots(sums, SLOTS), any_nan(*ACC), mend_slots(sums)

    @cuda.jit(**registers_of(region).options)
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
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        own = cuda.shared.array(WORDS, uint32, ALIGNMENT)
        base, t = first_multiple(shared, SWIZZLED), uint32(cuda.threadIdx.x)
        item, piece = segments[4 * cuda.blockIdx.x], segments[4 * cuda.blockIdx.x + 1]
        pieces, partial = segments[4 * cuda.blockIdx.x + 2], segments[4 * cuda.blockIdx.x + 3]
        for i in range(t, CODES, THREADS):
            words = translate(codes[item * CODES + i])
            own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3] = words
        if t == 0:
            for i in range(STAGES):
                mbarrier_init(bars, i, FETCHERS)
                mbarrier_init(bars, STAGES + i, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        chunks = (batch + DEPTH - 1) // DEPTH
        first = chunks * piece // pieces
        steps = int32(chunks * (piece + 1) // pieces - first)
        warp, lane = shfl_idx(uint32(t // 32), 0), t % 32
        if warp >= WARPS:
            maps, row = (x_map, x_wide, dy_map, dy_wide), int32(first * DEPTH)
            supply(int32(warp - WARPS), maps, boxes, item, row, steps, shared, base, bars)
            return
        used, acc = useds[item * WARPS + warp], cuda.local.array(ACC, float32)
        multiply(warp, used, steps, shared, base, bars, own, acc)
        slot = (item * WARPS + warp) * SLOTS
        if partial >= 0:
            at = (int64(partial) * WARPS + warp) * (SLOTS * COUNT * 32) + lane
            for p in range(SLOTS):
                for i in range(COUNT):
                    partials[at + (p * COUNT + i) * 32] = acc[p, i]
        else:
            store(acc, used, blocks, slot, block_rows, block_columns, in_features, out_features,
                  dvalues)  # fmt: skip
            if exact and nan_in(acc) != 0:
                mend(batch, x, x_stride, dy, dy_stride, blocks, block_rows, block_columns, dvalues,
                     slot, used)  # fmt: skip

    return kernel
