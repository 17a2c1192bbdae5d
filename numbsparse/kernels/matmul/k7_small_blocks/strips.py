"""y = x @ w: every strip of columns reads each feature of x that it needs once.

A block of threads holds ROWS x (32 WARPS) values of y in registers. The features of x pass through
a ring in shared memory, with the blocks of w that need them, and each warp multiplies those that
its own 32 columns keep. Some warps only ask the copy engine to fill the ring: asking takes some 100
cycles, so each asks for some of a stage's copies. The others wait for a stage at one barrier and
release it at another, and do not wait for each other: some find more blocks in a stage than others,
and may be as many stages apart as the ring has. The blocks of threads stay for the whole launch,
and the copies for the next strip run while one is written. Two of a cluster have neighbouring
strips, and load each feature of x for both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels import card
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    ROWS,
    Strip,
    plan_strips,
    strip_of,
)
from numbsparse.kernels.matmul.k7_small_blocks.strip_products import (
    clear_zeros,
    in_order,
    packed,
    products,
)
from numbsparse.kernels.parts import store
from numbsparse.kernels.parts.aligned import aligned_either_way
from numbsparse.kernels.parts.cluster_sums import add_parts, meet
from numbsparse.kernels.parts.deal import schedule, schedule_parts
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.repair import dense_of, repairing_lines
from numbsparse.kernels.parts.ring import begin_ring, following
from numbsparse.kernels.parts.swizzle import PERIOD, load_for, map_of, rows_of
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    as_uint32,
    bulk_load,
    cluster_sync,
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    first_multiple,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_wait,
    shfl_idx,
    store_2xu32,
    store_4xf32,
    sync_warp,
    wait_for_earlier_kernels,
)
from numbsparse.kernels.views import span


def along_strips(x: Any, values: Any, index: Any, y: Any, transposed: bool, precision: str) -> None:
    """y[:] = x @ w, or with w transposed."""
    B, (batch, features), columns = values.shape[1], x.shape, y.shape[1]
    if batch == 0 or columns == 0:
        return
    if values.shape[0] == 0:
        fill(y, 0)
        return
    arithmetic = precision if x.dtype == "float32" else x.dtype.name
    row_tiles, sizes = -(-batch // ROWS), (batch, features, columns)
    strip = strip_of(index, B, x.itemsize, transposed, sizes)
    plan = planned(index, plan_strips, transposed, features, strip._replace(SPLIT=1))
    lengths, lines, groups, begins, words, pieces = plan
    if strip.SPLIT > 1:
        tiles, tile_starts = planned(index, schedule_parts, lengths, row_tiles, strip.SPLIT)
    else:
        units = multiprocessors() // strip.CLUSTER
        tiles, tile_starts = planned(index, schedule, lengths, row_tiles, units)
    values, (x, x_transposed) = in_order(values), aligned_either_way(of_bits(x))
    x_map = map_of(x, strip.BOX_ROWS(x_transposed), strip.WIDTH, x_transposed)
    # Last before the kernel, which waits for it alone: see `producer`.
    w = packed(values, pieces, transposed)
    args: tuple[Any, ...] = (
        *(x_map, w, words, begins),
        *(groups, lines, tiles, tile_starts, of_bits(span(y))),
        (*(stride // y.itemsize for stride in y.strides), batch, columns),
    )
    if arithmetic == "highest":  # for sums that a split made NaN
        dense = dense_of(x.T if x_transposed else x, values, index, transposed)
        args += dense.x, (*dense.x_strides, features, *dense.w_strides), dense.w, *dense[-3:]
    together = strip.CLUSTER * strip.SPLIT
    launch(
        strip_kernel(strip, arithmetic, x_transposed, store.order_of(y)),
        (tile_starts.size - 1) * strip.CLUSTER,
        32 * (strip.WARPS + strip.FETCHERS),
        *args,
        shared_bytes=strip.SHARED_BYTES,
        cluster=(together,) if together > 1 else None,
        overlap=True,
    )


def of_bits(a: DeviceArray) -> DeviceArray:
    """16-bit values as NumPy and a kernel know them."""
    return a.view("uint16") if a.itemsize == 2 else a


def registers(warps: int) -> dict[str, int]:
    """Options of `cuda.jit`: registers are handed out to four warps at once."""
    return card.registers(128 * -(-warps // 4), most=255)


@cache
def strip_kernel(strip: Strip, arithmetic: str, x_transposed: bool, y_order: str) -> Any:
    WARPS, FETCHERS, CLUSTER, SPLIT = strip.WARPS, strip.FETCHERS, strip.CLUSTER, strip.SPLIT
    STAGES, BARRIERS = strip.STAGES, 2 * strip.STAGES
    # A stage is full when all fetchers' copies are there, and empty when all lanes have read it:
    # those of the block each by itself, as `racecheck` knows lanes only, others' by one of a warp.
    READERS = WARPS * (32 + CLUSTER - 1)
    produce = producer(strip, x_transposed)
    store_sums = storer(strip, arithmetic, x_transposed, y_order)
    consume = consumer(strip, products(strip, arithmetic, x_transposed), store_sums)
    clear = clear_zeros(strip, 32 * (WARPS + FETCHERS))

    @cuda.jit(device=True)
    def run(x_map, walk, tile_starts, into):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        base = first_multiple(shared, PERIOD)
        t = uint32(cuda.threadIdx.x)
        clear(words, base)
        if t == 0:
            begin_ring(bars, 0, STAGES, FETCHERS, READERS)
            fence_mbarrier_init()
        cuda.syncthreads()
        if CLUSTER > 1:
            cluster_sync()
        unit = cuda.blockIdx.x // CLUSTER
        first, last = tile_starts[unit], tile_starts[unit + 1]
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            produce(uint32(warp - WARPS), x_map, walk, first, last, shared, base, bars)
            if SPLIT > 1:
                meet()
        else:
            consume(walk[4], first, last, shared, words, base, bars, into)
        if CLUSTER > 1 or SPLIT > 1:
            cluster_sync()  # the others may still copy to here or read here, and arrive at barriers

    @cuda.jit(**registers(WARPS + FETCHERS))
    def kernel(x_map, w, words_of, begins, groups, lines, tiles, tile_starts, y, sizes):
        into = lines, (y, sizes[0], sizes[1], sizes[2], sizes[3])
        run(x_map, (w, words_of, begins, groups, tiles), tile_starts, into)

    @cuda.jit(**registers(WARPS + FETCHERS))
    def repair_kernel(
        x_map, w, words_of, begins, groups, lines, tiles, tile_starts, y, sizes,
        x, x_sizes, values, indptr, indices, blocks,
    ):  # fmt: skip
        x_strides, w_strides = (x_sizes[0], x_sizes[1]), (x_sizes[3], x_sizes[4])
        dense = x, x_strides, x_sizes[2], values, w_strides, indptr, indices, blocks
        into = lines, (y, sizes[0], sizes[1], sizes[2], sizes[3]), dense
        run(x_map, (w, words_of, begins, groups, tiles), tile_starts, into)

    return repair_kernel if arithmetic == "highest" else kernel


@cache
def consumer(strip: Strip, add_stage: Any, store_sums: Any) -> Any:
    ROWS, WARPS, STAGES, STAGE_BYTES = strip.ROWS, strip.WARPS, strip.STAGES, strip.STAGE_BYTES
    SUMS, CLUSTER, SPLIT, SLICES = strip.ROWS, strip.CLUSTER, strip.SPLIT, strip.SLICES
    OWN = SUMS // SLICES
    add_sums = add_parts(SPLIT, SLICES, strip.COLUMNS, ROWS // 16, strip.B // 8)

    @cuda.jit(device=True)
    def finish(acc, tiles, i, warp, base, into):
        """The sum of a cluster's blocks, which have a tile each."""
        own, rank = cuda.local.array(OWN, float32), uint32(cuda.blockIdx.x) % SPLIT
        add_sums(acc, own, warp, base)
        if rank < SLICES:
            row = int64(tiles[i, 1]) * ROWS
            store_sums(own, tiles[i, 0], warp, row, into)

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
            if SPLIT > 1:
                finish(acc, tiles, i, warp, base, into)
            else:
                store_sums(acc, tiles[i, 0], rank * WARPS + warp, int64(tiles[i, 1]) * ROWS, into)

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
        if fetcher == 0:
            wait_for_earlier_kernels()  # for w: x was there before that was packed
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


@cache
def storer(strip: Strip, arithmetic: str, x_transposed: bool, y_order: str) -> Any:
    """store(acc, of_strip, warp, row, into): a warp's sums, `row` the first one's number.

    into : the block columns of all strips; y, as in `parts.store`; and of exact float32 what is
        multiplied, as in `parts.repair`
    """
    if strip.ITEM == 2:
        return storer_of_16_bit(strip, arithmetic, y_order)
    return storer_of_float32(strip, arithmetic == "highest", x_transposed, y_order)


@cache
def storer_of_16_bit(strip: Strip, arithmetic: str, y_order: str) -> Any:
    COLUMNS, kind = strip.COLUMNS, store.KINDS[arithmetic]
    SLICES, OWN = strip.SLICES, strip.ROWS // strip.SLICES
    store_sums = store.storer(store.Sums(kind, strip.B, COLUMNS, OWN // 16, APART=16), y_order)

    @cuda.jit(device=True)
    def store_all(acc, of_strip, warp, row, into):
        columns = into[0][of_strip, warp * COLUMNS : (warp + 1) * COLUMNS]
        if SLICES > 1:
            row += cuda.blockIdx.x % strip.SPLIT * OWN
        store_sums(acc, columns, row, into[1])

    return store_all


@cache
def storer_of_float32(strip: Strip, exact: bool, x_transposed: bool, y_order: str) -> Any:
    """Lane 4 g + q has columns 2 q and 2 q + 1 of every 8: two neighbours of a row. Where x is
    transposed it has four neighbouring rows too, those of two tiles of 16."""
    B, COLUMNS, SQUARES, SLICES = strip.B, strip.COLUMNS, strip.B // 8, strip.SLICES
    TM, SPLIT = strip.ROWS // 16 // SLICES, strip.SPLIT
    PAIRS, FOURS = y_order == store.ROWS, y_order == store.FEATURES and x_transposed
    row_of, repair, NEXT = rows_of(4, strip.WIDTH, x_transposed).row_of, repairing_lines(B), B // 2
    SUMS = strip.ROWS // SLICES

    @cuda.jit(device=True)
    def own_row(m, half):
        return row_of(uint32(cuda.blockIdx.x) % SPLIT * TM + m if SLICES > 1 else m, half)

    @cuda.jit(device=True)
    def column_of(line, n, e):
        return line * int64(B) + n * 8 + uint32(cuda.threadIdx.x) % 4 * 2 + e % 2

    @cuda.jit(device=True)
    def store_all(acc, of_strip, warp, top, into):
        lines, y = into[0], into[1]
        values, row_stride, column_stride, batch, features = y
        found = 0
        for j in range(COLUMNS):
            line = int64(lines[of_strip, warp * COLUMNS + j])
            for m in range(TM):
                for n in range(SQUARES):
                    for e in range(4):
                        i = ((j * TM + m) * SQUARES + n) * 4 + e
                        row, column = top + own_row(m, e // 2), column_of(line, n, e)
                        at = row * row_stride + column * column_stride
                        if row < batch and line >= 0 and column < features:
                            if FOURS:
                                if m % 2 == 0 and e < 2:
                                    c, d = acc[i + NEXT], acc[i + NEXT + 2]
                                    store_4xf32(values, at, acc[i], acc[i + 2], c, d)
                            elif not PAIRS:
                                values[at] = acc[i]
                            elif e % 2 == 0:
                                store_2xu32(values, at, as_uint32(acc[i]), as_uint32(acc[i + 1]))
                            if acc[i] != acc[i]:
                                found = 1
        if exact:
            for i in range(SUMS if found else 0):
                line = lines[of_strip, warp * COLUMNS + i // (4 * SQUARES * TM)]
                row = top + own_row(i // (4 * SQUARES) % TM, i % 4 // 2)
                column = column_of(line, i // 4 % SQUARES, i)
                if row < batch and line >= 0 and column < features:
                    repair(y, row, column, into[2])

    return store_all
