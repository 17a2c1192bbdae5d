"""Strips by the copy engine: some warps ask for copies, and no warp waits for the others.

A warp that multiplies waits for a stage at one barrier and gives it back at another. Some find more
blocks in a stage than others; they may be as many stages apart as the ring has. The blocks of
threads stay for the whole launch, and the copies for the next strip run while one is written.

To ask takes time, some 100 cycles, so the copies of a stage are asked for by several warps. Two
blocks of threads of a cluster have neighbouring strips, and bring each feature of x to both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.kernels.matmul.k7_small_blocks.card import load_for, registers
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import SWIZZLED, Strip
from numbsparse.kernels.matmul.k7_small_blocks.strip_products import clear_zeros, products
from numbsparse.kernels.matmul.k7_small_blocks.strip_store import storer
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    bulk_load,
    cluster_sync,
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    first_multiple,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    shfl_idx,
    sync_warp,
)


@cache
def bulk_kernel(name: str, strip: Strip, x_turned: bool, y_lies: str) -> Any:
    WARPS, CLUSTER, BARRIERS = strip.WARPS, strip.CLUSTER, 2 * strip.STAGES
    FETCHERS, begin, produce = strip.FETCHERS, barriers(strip), producer(strip, x_turned)
    consume = consumer(strip, products(name, strip, x_turned), storer(name, strip, y_lies))
    clear = clear_zeros(strip, WARPS + FETCHERS)

    @cuda.jit(**registers(WARPS + FETCHERS))
    def kernel(x_map, w, words_of, begins, groups, lines, tiles, tile_starts, y, sizes):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        base = first_multiple(shared, SWIZZLED)
        t = uint32(cuda.threadIdx.x)
        clear(words, base)
        begin(bars)
        if CLUSTER > 1:
            cluster_sync()
        unit = cuda.blockIdx.x // CLUSTER
        first, last = tile_starts[unit], tile_starts[unit + 1]
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            walk = w, words_of, begins, groups, tiles
            produce(uint32(warp - WARPS), x_map, walk, first, last, shared, base, bars)
        else:
            consume(tiles, first, last, shared, words, base, bars, (lines, y, sizes))
        if CLUSTER > 1:
            cluster_sync()  # the others may still copy to here, and arrive at barriers

    return kernel


@cache
def barriers(strip: Strip) -> Any:
    """A stage is full when all fetchers' copies are there, and empty when all lanes have read it:
    those of the block each by itself, as `racecheck` knows lanes only, others' by one of a warp."""
    STAGES, FETCHERS = strip.STAGES, strip.FETCHERS
    READERS = strip.WARPS * (32 + strip.CLUSTER - 1)

    @cuda.jit(device=True)
    def begin(bars):
        if cuda.threadIdx.x == 0:
            for i in range(STAGES):
                mbarrier_init(bars, i, FETCHERS)
                mbarrier_init(bars, STAGES + i, READERS)
            fence_mbarrier_init()
        cuda.syncthreads()

    return begin


@cache
def consumer(strip: Strip, add_stage: Any, store: Any) -> Any:
    ROWS, WARPS, STAGES, STAGE_BYTES = strip.ROWS, strip.WARPS, strip.STAGES, strip.STAGE_BYTES
    SUMS, CLUSTER = strip.ROWS, strip.CLUSTER

    @cuda.jit(device=True)
    def consume(tiles, first, last, shared, words, base, bars, into):
        t, rank = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x) % CLUSTER
        warp, lane = t // 32, t % 32
        acc = cuda.local.array(SUMS, float32)
        stage, phase = uint32(0), uint32(0)
        for i in range(first, last):
            for k in range(SUMS):
                acc[k] = 0
            for _ in range(tiles[i, 2], tiles[i, 3]):
                mbarrier_wait(bars, stage, phase)
                add_stage(shared, words, uint32(base + stage * STAGE_BYTES), warp, acc)
                mbarrier_arrive(bars, STAGES + stage)
                if CLUSTER > 1:
                    sync_warp()
                    if lane < CLUSTER and lane != rank:
                        mbarrier_arrive_at(bars, STAGES + stage, lane)
                stage, phase = following(stage, phase, STAGES)
            store(acc, tiles[i, 0], rank * WARPS + warp, int64(tiles[i, 1]) * ROWS, into)

    return consume


@cache
def producer(strip: Strip, x_turned: bool) -> Any:
    ROWS, STAGES, GROUPS, CLUSTER = strip.ROWS, strip.STAGES, strip.GROUPS, strip.CLUSTER
    PER = 32 // GROUPS  # stages of which the warp knows the groups, a lane each
    ask = asker(strip, x_turned)

    @cuda.jit(device=True)
    def looked_up(groups, begins, at):
        """Of the stages from `at` on: the groups, and where their steps begin and end."""
        lane, rank = uint32(cuda.threadIdx.x) % 32, uint32(cuda.blockIdx.x) % CLUSTER
        i = min((at + lane) * CLUSTER + rank, begins.size - 2)
        return groups[min(at * GROUPS + lane, groups.size - 1)], begins[i], begins[i + 1]

    @cuda.jit(device=True)
    def produce(fetcher, x_map, walk, first, last, shared, base, bars):
        w, words_of, begins, groups, tiles = walk
        sources = x_map, w, words_of
        fence_tensor_map(x_map)
        stage, phase = uint32(0), uint32(1)
        ahead = tiles[first, 2]  # the stage from which on the lanes know
        known = looked_up(groups, begins, ahead)
        for i in range(first, last):
            row, at, end = int32(tiles[i, 1] * ROWS), tiles[i, 2], tiles[i, 3]
            then = tiles[min(i + 1, last - 1), 2]
            if at < end and at != ahead:  # the strip before has no blocks
                known = looked_up(groups, begins, at)
            while at < end:
                count = min(PER, end - at)
                at += PER
                # The next ones are under way while these are asked for.
                ahead = at if at < end else then
                coming = looked_up(groups, begins, ahead)
                for k in range(count):
                    mbarrier_wait(bars, STAGES + stage, phase)
                    ring = shared, base, bars, stage
                    ask(fetcher, sources, known, at - PER + k, k, row, ring)
                    stage, phase = following(stage, phase, STAGES)
                known = coming

    return produce


@cache
def asker(strip: Strip, x_turned: bool) -> Any:
    GROUPS, GROUP_BYTES, STAGE_BYTES = strip.GROUPS, strip.GROUP_BYTES, strip.STAGE_BYTES
    W_START, X_START, STEP_BYTES = strip.W_START, strip.X_START, strip.STEP_BYTES
    HEAD, WIDTH = strip.HEAD, strip.WIDTH
    CLUSTER, FETCHERS = strip.CLUSTER, strip.FETCHERS
    TURNS = -(-GROUPS // (FETCHERS * CLUSTER))
    load, BOXES, BOX_ROWS = load_for(x_turned, CLUSTER), 1, 0
    if x_turned:
        BOX_ROWS = strip.rows_of_box(x_turned)
        BOXES = strip.ROWS // BOX_ROWS
    BOX_BYTES = GROUP_BYTES // BOXES

    @cuda.jit(device=True)
    def ask(fetcher, sources, known, number, k, row, ring):
        """The fetcher's copies for a stage, the k-th of those that the lanes know.

        The blocks of a cluster take turns with the groups; each one's copies are for all of them.
        """
        x_map, w, words_of = sources
        shared, base, bars, stage = ring
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        first, end = shfl_idx(known[1], k), shfl_idx(known[2], k)
        own = cuda.local.array(TURNS, int32)
        many, nbytes = uint32(end - first), uint32(0)
        if fetcher == 0:
            nbytes = uint32(many * (STEP_BYTES + 4) + HEAD * 4)
        for i in range(TURNS):
            for c in range(CLUSTER):
                g = (i * FETCHERS + fetcher) * CLUSTER + c
                group = shfl_idx(known[0], k * GROUPS + min(g, GROUPS - 1))
                if g >= GROUPS:
                    group = int32(-1)
                if group >= 0:
                    nbytes = uint32(nbytes + GROUP_BYTES)
                if c == rank:
                    own[i] = group
        if elect() != 0:
            start = base + stage * STAGE_BYTES
            mbarrier_expect(bars, stage, nbytes)
            for i in range(TURNS):
                if own[i] >= 0:
                    g = (i * FETCHERS + fetcher) * CLUSTER + rank
                    to, feature = start + X_START + g * GROUP_BYTES, int32(own[i] * WIDTH)
                    for b in range(BOXES):
                        box, first_row = to + b * BOX_BYTES, int32(row + b * BOX_ROWS)
                        load(shared, box, x_map, feature, first_row, bars, stage)
            if fetcher == 0:
                at = int64(first) + (number * CLUSTER + rank) * HEAD
                nbytes = uint32((HEAD + many) * 4)
                bulk_load(shared, start, words_of, at, nbytes, bars, stage)
                if many > 0:
                    at, nbytes = int64(first) * (STEP_BYTES // 4), uint32(many * STEP_BYTES)
                    bulk_load(shared, start + W_START, w, at, nbytes, bars, stage)

    return ask
