"""y = x @ w: every strip of columns reads each feature of x that it needs once.

A block of threads holds ROWS x (32 WARPS) values of y in registers. The features of x pass through
a ring in shared memory, beside the blocks of w that meet them, and each warp multiplies those that
its own 32 columns keep. Some warps only ask the copy engine to fill the ring: to ask takes some 100
cycles, so each asks for some of a stage's copies. The others wait for a stage at one barrier and
give it back at another, and not for each other: some find more blocks in a stage than others, and
may be as many stages apart as the ring has. The blocks of threads stay for the whole launch, and
the copies for the next strip run while one is written. Two of a cluster have neighbouring strips,
and bring each feature of x to both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.card import multiprocessors, shared_memory
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned_either_way
from numbsparse.kernels.matmul.k6_hopper.lines import how_it_lies as order_of
from numbsparse.kernels.matmul.k6_hopper.steps import schedule
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    ALIGNED,
    WARP_COLUMNS,
    Strip,
    plan_strips,
    steps_in_strips,
)
from numbsparse.kernels.matmul.k7_small_blocks.strip_products import clear_zeros, packed, products
from numbsparse.kernels.matmul.k7_small_blocks.strip_store import storer
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.swizzle import PERIOD
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
    tma_load_2d,
    tma_load_2d_multicast,
)
from numbsparse.kernels.views import span

WIDTH = 32  # features that are fetched together: 64 or 128 bytes of a row of x


def along_strips(x: Any, values: Any, index: Any, y: Any, transposed: bool, precision: str) -> None:
    """y[:] = x @ w, or with w transposed."""
    B, (batch, features), columns = values.shape[1], x.shape, y.shape[1]
    if batch == 0 or columns == 0:
        return
    if values.shape[0] == 0:
        fill(y, 0)
        return
    arithmetic = precision if x.dtype == "float32" else x.dtype.name
    strip = strip_of(index, B, x.itemsize, transposed, columns)
    plan = planned(index, plan_strips, transposed, features, strip)
    lengths, lines, groups, begins, words, pieces = plan
    row_tiles, units = -(-batch // strip.ROWS), multiprocessors() // strip.CLUSTER
    tiles, tile_starts = planned(index, schedule, lengths, row_tiles, units)
    summed = index.block_columns if transposed else index.block_rows
    w = packed(values, pieces, summed, features, transposed)
    x, x_transposed = aligned_either_way(of_bits(x))
    args = (
        *(map_of(x, strip.BOX_ROWS(x_transposed), strip.WIDTH, x_transposed), w, words, begins),
        *(groups, lines, tiles, tile_starts, of_bits(span(y))),
        (*(stride // y.itemsize for stride in y.strides), batch, columns),
    )
    if arithmetic == "highest":  # for sums that a split made NaN
        walk, stride = index.rows if transposed else index.columns, x.strides[0] // 4
        x_sizes = (*((1, stride) if x_transposed else (stride, 1)), features)
        args += span(x), x_sizes, values, walk.indptr, walk.indices, walk.blocks
    launch(
        strip_kernel(strip, arithmetic, transposed, x_transposed, order_of(y)),
        (tile_starts.size - 1) * strip.CLUSTER,
        32 * (strip.WARPS + strip.FETCHERS),
        *args,
        shared_bytes=strip.SHARED_BYTES,
        cluster=(strip.CLUSTER,) if strip.CLUSTER > 1 else None,
    )


def strip_of(index: Any, B: int, item: int, transposed: bool, columns: int) -> Strip:
    """As wide as y is, up to 512 columns, of float32 352; and as many groups to a stage, with room
    for their steps, as leave three stages.

    Where a stage has few steps for a warp, and warps get ahead of each other, four; and two strips
    share their groups in a cluster if they need much the same.
    """
    limit = (shared_memory() or 65 * 1024) - 1024  # beside the ring there are barriers
    factors = 16 // B if item == 2 else 1
    warps = warps_for(columns, item)
    width = warps * WARP_COLUMNS
    kept, mean, most = planned(index, steps_in_strips, B, transposed, width, WIDTH, factors)
    sizes, fetchers, stages, cluster = (14, 8, 6, 4, 3, 2, 1), 4, 3, 1
    if item == 4:
        sizes, fetchers = (4, 2, 1), 1
    elif kept < {8: 0.06, 16: 0.25}[B]:
        stages = 4 if B == 16 else 3
        in_two, *_ = planned(index, steps_in_strips, B, transposed, 2 * width, WIDTH, factors)
        cluster = 2 if columns >= 2 * width and in_two > 0.7 * kept else 1
    for groups in sizes:
        steps = max(most, min(round(1.15 * groups * mean), 256))
        steps = -(-steps // ALIGNED) * ALIGNED
        strip = Strip(B, 64, warps, WIDTH, groups, steps, stages, cluster, fetchers, item)
        if limit >= strip.SHARED_BYTES:
            break
    return strip._replace(STAGES=2 if SIMULATED else (limit - PERIOD) // strip.STAGE_BYTES)


def warps_for(columns: int, item: int) -> int:
    """That multiply: with those that ask, each has the registers that its sums need."""
    if item == 4:
        return min(11, -(-columns // WARP_COLUMNS))
    most = 4 if SIMULATED else 8 if (shared_memory() or 0) < 160 * 1024 else 16
    warps = 1
    while warps < most and warps * WARP_COLUMNS < columns:
        warps *= 2
    return warps


def of_bits(a: DeviceArray) -> DeviceArray:
    """16-bit values as NumPy and a kernel know them."""
    return a.view("uint16") if a.itemsize == 2 else a


def map_of(x: DeviceArray, rows: int, features: int, transposed: bool) -> DeviceArray:
    """The map of x for boxes of so many rows and features; transposed, of x (features, batch)."""
    box = (features, rows) if transposed else (rows, features)
    return tensor_map(x, box, x.itemsize * box[1])


@cache
def load_for(transposed: bool, cluster: int = 1) -> Any:
    """Ask for the box of such a map that begins at a feature and a row, for all of a cluster."""
    RANKS = (1 << cluster) - 1

    @cuda.jit(device=True)
    def load(shared, to, x_map, feature, row, bars, stage):
        column, line = (row, feature) if transposed else (feature, row)
        if cluster == 1:
            tma_load_2d(shared, to, x_map, column, line, bars, stage)
        else:
            tma_load_2d_multicast(shared, to, x_map, column, line, bars, stage, RANKS)

    return load


def registers(warps: int) -> dict[str, int]:
    """Options of `cuda.jit`: the registers of a thread, handed out to four warps at once."""
    if SIMULATED:
        return {}
    return {"max_registers": min(255, 65536 // (128 * -(-warps // 4)) // 8 * 8)}


@cache
def strip_kernel(
    strip: Strip, arithmetic: str, transposed: bool, x_transposed: bool, y_order: str
) -> Any:
    WARPS, CLUSTER, BARRIERS = strip.WARPS, strip.CLUSTER, 2 * strip.STAGES
    FETCHERS, begin, produce = strip.FETCHERS, barriers(strip), producer(strip, x_transposed)
    store = storer(strip, arithmetic, transposed, x_transposed, y_order)
    consume = consumer(strip, products(strip, arithmetic, x_transposed), store)
    clear = clear_zeros(strip, 32 * (WARPS + FETCHERS))

    @cuda.jit(device=True)
    def run(x_map, walk, tile_starts, into):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        base = first_multiple(shared, PERIOD)
        t = uint32(cuda.threadIdx.x)
        clear(words, base)
        begin(bars)
        if CLUSTER > 1:
            cluster_sync()
        unit = cuda.blockIdx.x // CLUSTER
        first, last = tile_starts[unit], tile_starts[unit + 1]
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            produce(uint32(warp - WARPS), x_map, walk, first, last, shared, base, bars)
        else:
            consume(walk[4], first, last, shared, words, base, bars, into)
        if CLUSTER > 1:
            cluster_sync()  # the others may still copy to here, and arrive at barriers

    @cuda.jit(**registers(WARPS + FETCHERS))
    def kernel(x_map, w, words_of, begins, groups, lines, tiles, tile_starts, y, sizes):
        run(x_map, (w, words_of, begins, groups, tiles), tile_starts, (lines, y, sizes))

    @cuda.jit(**registers(WARPS + FETCHERS))
    def mending_kernel(
        x_map, w, words_of, begins, groups, lines, tiles, tile_starts, y, sizes,
        x, x_sizes, values, indptr, indices, blocks,
    ):  # fmt: skip
        into = lines, y, sizes, (x, x_sizes, values, indptr, indices, blocks)
        run(x_map, (w, words_of, begins, groups, tiles), tile_starts, into)

    return mending_kernel if arithmetic == "highest" else kernel


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
def producer(strip: Strip, x_transposed: bool) -> Any:
    ROWS, STAGES, GROUPS, CLUSTER = strip.ROWS, strip.STAGES, strip.GROUPS, strip.CLUSTER
    PER = 32 // GROUPS  # stages of which the warp knows the groups, a lane each
    ask = asker(strip, x_transposed)

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
def asker(strip: Strip, x_transposed: bool) -> Any:
    GROUPS, GROUP_BYTES, STAGE_BYTES = strip.GROUPS, strip.GROUP_BYTES, strip.STAGE_BYTES
    W_START, X_START, STEP_BYTES = strip.W_START, strip.X_START, strip.STEP_BYTES
    HEAD, WIDTH = strip.HEAD, strip.WIDTH
    CLUSTER, FETCHERS = strip.CLUSTER, strip.FETCHERS
    SHARES = -(-GROUPS // (FETCHERS * CLUSTER))
    load, BOXES, BOX_ROWS = load_for(x_transposed, CLUSTER), 1, 0
    if x_transposed:
        BOX_ROWS = strip.BOX_ROWS(x_transposed)
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
        own = cuda.local.array(SHARES, int32)
        many, nbytes = uint32(end - first), uint32(0)
        if fetcher == 0:
            nbytes = uint32(many * (STEP_BYTES + 4) + HEAD * 4)
        for i in range(SHARES):
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
            for i in range(SHARES):
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
