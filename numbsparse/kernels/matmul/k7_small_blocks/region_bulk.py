"""Regions by the copy engine: some warps ask for copies, the others multiply.

To ask takes some 100 cycles, so each asks for some of the groups of a stage.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.kernels.matmul.k7_small_blocks.region import GROUP, Region, Turned
from numbsparse.kernels.matmul.k7_small_blocks.region_products import places_of_lane, products
from numbsparse.kernels.matmul.k7_small_blocks.region_store import storer
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import SWIZZLED
from numbsparse.kernels.matmul.k7_small_blocks.strips import load_for, registers
from numbsparse.kernels.parts.ring import following
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


@cache
def bulk_kernel(B: int, name: str, region: Region, turned: Turned) -> Any:
    WARPS, FETCHERS, STAGES = region.WARPS, region.FETCHERS, region.STAGES
    DEPTH, BARRIERS = region.DEPTH, 2 * region.STAGES
    produce, consume = producer(region, turned), consumer(B, name, region, turned)

    @cuda.jit(**registers(WARPS + FETCHERS))
    def kernel(
        x_map, dy_map, batch, segments, groups, codes, useds, blocks, rows, columns, sides,
        partials, dvalues,
    ):  # fmt: skip
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        base = first_multiple(shared, SWIZZLED)
        t = uint32(cuda.threadIdx.x)
        if t == 0:
            for i in range(STAGES):
                mbarrier_init(bars, i, FETCHERS)
                mbarrier_init(bars, STAGES + i, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        item, piece = segments[4 * cuda.blockIdx.x], segments[4 * cuda.blockIdx.x + 1]
        pieces, partial = segments[4 * cuda.blockIdx.x + 2], segments[4 * cuda.blockIdx.x + 3]
        chunks = (batch + DEPTH - 1) // DEPTH
        first, end = chunks * piece // pieces, chunks * (piece + 1) // pieces
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            produce(
                uint32(warp - WARPS), x_map, dy_map, groups, item, first, end, shared, base, bars
            )
            cuda.syncthreads()
        else:
            places = blocks, rows, columns, sides
            into = item, partial, useds, places, partials, dvalues
            consume(codes, end - first, shared, words, base, bars, into)

    return kernel


@cache
def consumer(B: int, name: str, region: Region, turned: Turned) -> Any:
    WARPS, SLOTS, SUMS = region.WARPS, region.SLOTS, region.SLOTS * B // 2
    STAGES, STAGE_BYTES = region.STAGES, region.STAGE_BYTES
    place, add_stage = places_of_lane(B, region, turned), products(B, name, region, turned)
    store = storer(B, name, region)

    @cuda.jit(device=True)
    def consume(codes, steps, shared, words, base, bars, into):
        item, partial, useds, places, partials, dvalues = into
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        acc = cuda.local.array(SUMS, float32)
        code = cuda.local.array(SLOTS, uint32)
        for p in range(SLOTS):
            code[p] = place(codes[(item * WARPS + warp) * SLOTS + p], lane)
        for i in range(SUMS):
            acc[i] = 0
        stage, phase = uint32(0), uint32(0)
        for _ in range(steps):
            mbarrier_wait(bars, stage, phase)
            add_stage(shared, code, uint32(base + stage * STAGE_BYTES), acc)
            sync_warp()
            if lane == 0:
                mbarrier_arrive(bars, STAGES + stage)
            stage, phase = following(stage, phase, STAGES)
        cuda.syncthreads()  # the ring is free
        store(acc, words, item, partial, useds, places, partials, dvalues)

    return consume


@cache
def producer(region: Region, turned: Turned) -> Any:
    DEPTH, STAGES, GROUPS = region.DEPTH, region.STAGES, region.GROUPS
    STAGE_BYTES, GROUP_BYTES = region.STAGE_BYTES, region.GROUP_BYTES
    FETCHERS, TURNS = region.FETCHERS, -(-GROUPS // region.FETCHERS)
    load_x, load_dy = load_for(turned.x), load_for(turned.dy)

    @cuda.jit(device=True)
    def produce(fetcher, x_map, dy_map, groups, item, first, end, shared, base, bars):
        fence_tensor_map(x_map)
        fence_tensor_map(dy_map)
        own = cuda.local.array(TURNS, int32)
        nbytes = uint32(0)
        for i in range(TURNS):
            g = i * FETCHERS + fetcher
            own[i] = groups[item * GROUPS + g] if g < GROUPS else -1
            if own[i] >= 0:
                nbytes = uint32(nbytes + GROUP_BYTES)
        stage, phase = uint32(0), uint32(1)
        for step in range(first, end):
            mbarrier_wait(bars, STAGES + stage, phase)
            if elect() != 0:
                mbarrier_expect(bars, stage, nbytes)
                start, row = base + stage * STAGE_BYTES, int32(step * DEPTH)
                for i in range(TURNS):
                    to = start + (i * FETCHERS + fetcher) * GROUP_BYTES
                    feature = int32(own[i] // 2 * GROUP)
                    if own[i] >= 0:
                        if own[i] % 2 == 1:
                            load_dy(shared, to, dy_map, feature, row, bars, stage)
                        else:
                            load_x(shared, to, x_map, feature, row, bars, stage)
            stage, phase = following(stage, phase, STAGES)

    return produce
