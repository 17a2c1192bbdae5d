"""y = x @ w: every strip of columns reads each feature of x that it needs once.

A block of threads holds ROWS x (32 WARPS) values of y in registers. The features of x pass through
a ring in shared memory, with the blocks of w that need them, and each warp multiplies those that
its own 32 columns keep. Some warps only have the copy engine fill the ring: a request takes some
100 cycles, so each requests some of a stage's copies. The others wait for a stage at one barrier,
release it at another, and do not wait for each other: some find more blocks in a stage than others,
and may be as many stages apart as the ring has. The blocks of threads are persistent, and the
copies for the next strip run while one is written. Two of a cluster have neighbouring
strips, and load each feature of x for both.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import freed, plan_strips, strip_of
from numbsparse.kernels.parts.aligned import aligned_values, of_any_blocks, of_bits, readable
from numbsparse.kernels.parts.deal import even_rows, schedule
from numbsparse.kernels.parts.packed import packed, products
from numbsparse.kernels.parts.pieces import add_parts, meeting
from numbsparse.kernels.parts.pixels import IMAGES, finding, loading
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.repair import dense_of
from numbsparse.kernels.parts.ring import begin_ring, following, show_barriers
from numbsparse.kernels.parts.store import FEATURES, KINDS, PIXELS, Sums, order_of, output_of
from numbsparse.kernels.parts.store import ROWS as BY_ROWS
from numbsparse.kernels.parts.store_float32 import finishing
from numbsparse.kernels.parts.store_pixels import looking
from numbsparse.kernels.parts.stored_blocks import Copying, copying
from numbsparse.kernels.parts.strip import Strip, registers_of
from numbsparse.kernels.parts.swizzle import PERIOD, box_of, rows_of
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    bulk_load,
    cluster_sync,
    elect,
    fence_tensor_map,
    fewer_registers,
    first_multiple,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_wait,
    more_registers,
    prefetch_tensor_map,
    shfl_idx,
    store_4xu32,
    sync_warp,
    wait_for_earlier_kernels,
)


@of_any_blocks
def along_strips(
    x: Any, values: Any, index: Any, y: Any, transposed: bool, precision: str, gates: Any = None
) -> None:
    """y[:] = x @ w, or with w transposed; with a gate for each block, if any."""
    (batch, features), B, item = x.shape, values.shape[1], x.itemsize
    values, y_order = aligned_values(values), order_of(y, lines=True)
    x, x_transposed = readable(x)
    sizes, gated = (batch, features, y.shape[1]), "" if gates is None else values.dtype.name
    even = not x_transposed and (item == 4 or y_order != FEATURES)
    strip = strip_of(index, B, item, transposed, sizes, gated, even, x_transposed)
    row_tiles = -(-batch // strip.ROWS)
    rows = even_rows(batch, row_tiles) if even and item == 2 else strip.ROWS
    high = min(rows, strip.BOX_ROWS(x_transposed))
    x_map = tensor_map(x, box_of(high, strip.WIDTH, x_transposed))
    lengths, *steps = planned(index, plan_strips, transposed, features, strip.bare)
    strip = freed(strip, lengths)
    units = multiprocessors() // strip.CLUSTER
    tiles = planned(index, schedule, lengths, row_tiles, units, strip.SPLIT)
    all_gates = () if gates is None else gates
    plan = Plan._make((*steps, *tiles, rows, (), all_gates, rows, ()))
    arithmetic, dense = precision if item == 4 else y.dtype.name, None
    if arithmetic == "highest":  # for sums that a split made NaN
        own = x.T if x_transposed else x
        dense = dense_of(own, values, index, transposed, all_gates)
    x_order = FEATURES if x_transposed else BY_ROWS
    kernel = strip_kernel(strip, arithmetic, x_order, y_order, transposed)
    launch_strips(kernel, strip, plan, values, transposed, x_map, output_of(y), dense or ())


class Plan(NamedTuple):
    """What each block of threads does: see `plan_strips` and `parts.deal`."""

    words: Any
    codes: Any
    begins: Any
    groups: Any
    lines: Any
    tiles: Any
    tile_starts: Any
    rows: int  # of each tile of the batch: see `even_rows`
    tops: Any  # of tiles of images: see `pixels`
    gates: Any  # of blocks that lanes copy, if any
    loaded: int  # rows that a copy of a group has
    within: Any  # of boxes that taps share, where each row of a tile begins


def launch_strips(
    kernel: Any, strip: Strip, plan: Plan, values: Any, transposed: bool, x_map: Any, *sink: Any
) -> None:
    """A kernel of `strip_kernel`, which stores to this sink; before it, where w is packed, the one
    that packs it, last: it is all that the kernel waits for (see `producer`)."""
    w = of_bits(values.span)
    if strip.PACKED and strip.GATED:
        from numbsparse.kernels.matmul.k7_small_blocks.gated import packed_by_gates

        w, words, begins = packed_by_gates(values, plan, strip, transposed)
        plan = plan._replace(words=words, begins=begins)
    elif strip.PACKED:
        w = packed(values, plan.codes, transposed)
    together = strip.CLUSTER * strip.SPLIT
    launch(
        kernel,
        (plan.tile_starts.size - 1) * strip.CLUSTER,
        32 * (strip.WARPS + strip.FETCHERS),
        *(x_map, unannounced(x_map), w, plan, *sink),
        shared_bytes=strip.SHARED_BYTES,
        cluster=(together,) if together > 1 else None,
        overlap=True,
    )


@cache
def strip_kernel(
    strip: Strip, arithmetic: str, x_order: str, y_order: str, transposed: bool
) -> Any:
    WARPS, FETCHERS, CLUSTER, SPLIT = strip.WARPS, strip.FETCHERS, strip.CLUSTER, strip.SPLIT
    STAGES, BARRIERS, THREADS = strip.STAGES, 2 * strip.STAGES, 32 * (WARPS + FETCHERS)
    # A stage is full when all that fetchers requested and their lanes copied is there, and empty
    # when all warps of the cluster have read it.
    READERS = WARPS * CLUSTER
    FILLERS = FETCHERS * (1 if strip.PACKED else 33)
    produce = producer(strip, x_order, transposed)
    consume = consumer(strip, arithmetic, x_order, y_order, transposed)
    meet, MEET = meeting(strip.FREE), SPLIT if strip.FREE else CLUSTER
    STAGE_BYTES, WORDS = strip.STAGE_BYTES, strip.ZERO_BYTES // 4
    ZEROS = strip.X_START + strip.GROUPS * strip.GROUP_BYTES

    @cuda.jit(**registers_of(strip)[2])
    def kernel(x_map, fresh, w, plan, y, dense):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        base, t = first_multiple(shared, PERIOD), uint32(cuda.threadIdx.x)
        unit = cuda.blockIdx.x // CLUSTER
        first, last = plan.tile_starts[unit], plan.tile_starts[unit + 1]
        if WORDS:  # what steps lack are the zeros after all groups
            for stage in range(STAGES):
                zeros = (base + stage * STAGE_BYTES + ZEROS) // 4
                for i in range(4 * t, WORDS, 4 * THREADS):
                    store_4xu32(words, zeros + i, uint32(0), uint32(0), uint32(0), uint32(0))
        if t == 0:
            if fresh == 0:
                prefetch_tensor_map(x_map)
            begin_ring(bars, 0, STAGES, FILLERS, READERS)
        show_barriers(t, MEET)
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            ring = shared, base, bars
            produce(uint32(warp - WARPS), x_map, fresh, w, plan, first, last, ring)
            if SPLIT > 1:
                meet()
        else:
            consume(plan, first, last, shared, words, base, bars, y, dense)
        if CLUSTER > 1:
            cluster_sync()  # the others may still copy to here, and arrive at barriers

    return kernel


@cache
def consumer(strip: Strip, arithmetic: str, x_order: str, y_order: str, transposed: bool) -> Any:
    ROWS, WARPS, STAGES, STAGE_BYTES = strip.ROWS, strip.WARPS, strip.STAGES, strip.STAGE_BYTES
    SUMS, CLUSTER, SPLIT, SLICES = strip.ROWS, strip.CLUSTER, strip.SPLIT, strip.SLICES
    TILES, IN_BOXES = strip.ROWS // 16, strip.BOX > 0
    PARTS_AT, OWN, COLUMNS = strip.PARTS_AT, strip.SLICE, strip.COLUMNS
    x_transposed = x_order == FEATURES
    add_stage = products(strip, arithmetic, x_transposed, transposed)
    add_sums = add_parts(SPLIT, SLICES, COLUMNS, ROWS // 16, strip.B // 8, strip.FREE)
    of = Sums(KINDS.get(arithmetic, arithmetic), strip.B, COLUMNS, OWN // 16, APART=16)
    row_of = rows_of(strip.ITEM, strip.WIDTH, x_transposed).row_of
    finish = finishing(of, y_order, row_of, x_transposed, strip.GATED != "")
    look, placed = looking(y_order == PIXELS, COLUMNS, OWN, SPLIT)
    _, MORE, _ = registers_of(strip)

    @cuda.jit(device=True)
    def consume(plan, first, last, shared, words, base, bars, y, dense):
        if MORE:
            more_registers(MORE)
        tiles = plan.tiles
        t, rank = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x) % CLUSTER
        warp, lane = t // 32, t % 32
        acc, within = cuda.local.array(SUMS, float32), cuda.local.array(TILES, uint32)
        columns = cuda.local.array(COLUMNS, int32)
        for m in range(TILES if IN_BOXES else 0):
            within[m] = plan.within[16 * m + lane % 16]
        stage, phase = uint32(0), uint32(0)
        wait_for_earlier_kernels()
        for i in range(first, last):
            known = look(plan, i, y, warp)
            place = (rank * WARPS + warp) * COLUMNS
            for c in range(COLUMNS):
                columns[c] = plan.lines[tiles[i, 0], place + c]
            for k in range(SUMS):
                acc[k] = 0
            for _ in range(tiles[i, 2], tiles[i, 3]):
                mbarrier_wait(bars, stage, phase)
                start = uint32(base + stage * STAGE_BYTES)
                add_stage(shared, words, start, warp, within, acc)
                sync_warp()
                if CLUSTER == 1:
                    if lane == 0:
                        mbarrier_arrive(bars, STAGES + stage)
                elif lane < CLUSTER:
                    mbarrier_arrive_at(bars, STAGES + stage, lane)
                stage, phase = following(stage, phase, STAGES)
            row = tiles[i, 1] * plan.rows
            own_y = y[0], y[1], y[2], min(y[3], row + plan.rows), y[4]
            if SPLIT > 1:  # the blocks of a cluster have a tile each, and store a slice of its sum
                own, part = cuda.local.array(OWN, float32), uint32(cuda.blockIdx.x) % SPLIT
                add_sums(acc, own, warp, base + PARTS_AT)
                if part < SLICES:
                    finish(own, columns, *placed(row + part * OWN, own_y, known), dense)
            else:
                finish(acc, columns, *placed(row, own_y, known), dense)

    return consume


@cache
def producer(strip: Strip, x_order: str, transposed: bool) -> Any:
    """produce(fetcher, x_map, fresh, w, plan, first, last, ring): of tiles `first` to `last`.

    A load from global memory takes longer than the rest of a stage. So the lanes know the groups of
    some stages, and the stored blocks of the next one, before these are requested; two arrays take
    turns with the latter, since copying a register would mean waiting for it.
    """
    GROUPS, CLUSTER = strip.GROUPS, strip.CLUSTER
    ROW_BYTES = strip.ITEM * strip.WIDTH
    PER = 32 // GROUPS  # stages of which the warp knows the groups, a lane each
    PACKED, scaled = strip.PACKED, "" if strip.GATES else strip.GATED
    how = strip.STEPS, strip.FETCHERS, transposed, scaled, strip.GATES
    blocks = copying(strip.B, strip.ITEM, *how)
    OF_GATES = PACKED and strip.GATED != ""  # the launch before wrote what the lanes know,
    EACH = 2 if OF_GATES else 1  # with where the steps of each stage end
    look_up, weigh, CODES = blocks.look_up, blocks.weigh, 1 if PACKED else blocks.codes
    turn, other_turn = (turning(strip, x_order, blocks) for _ in range(2))
    top = finding(x_order == IMAGES)
    FEWER, *_ = registers_of(strip)

    @cuda.jit(device=True)
    def looked_up(groups, begins, at):
        """Of the stages from `at` on: the groups, and where their steps begin and end."""
        lane, rank = uint32(cuda.threadIdx.x) % 32, uint32(cuda.blockIdx.x) % CLUSTER
        i = EACH * min((at + lane) * CLUSTER + rank, (begins.size - 2) // EACH)
        return groups[min(at * GROUPS + lane, groups.size - 1)], begins[i], begins[i + 1]

    @cuda.jit(device=True)
    def produce(fetcher, x_map, fresh, w, plan, first, last, ring):
        if FEWER:
            fewer_registers(FEWER)
        words, codes, begins, groups, _, tiles, _, rows, tops, gates, loaded, _ = plan
        sources = x_map, w, codes, words, uint32(loaded * ROW_BYTES), gates
        if OF_GATES:
            wait_for_earlier_kernels()
        if fresh != 0:
            fence_tensor_map(x_map)
        stage, phase = uint32(0), uint32(1)
        ahead = tiles[first, 2]  # the stage from which on the lanes know
        known = looked_up(groups, begins, ahead)
        own, others = cuda.local.array(CODES, int32), cuda.local.array(CODES, int32)
        if not PACKED:
            look_up(codes, known, 0, fetcher, own)
        then = tiles[min(first + 1, last - 1), 2]
        coming_from = ahead + PER if ahead + PER < tiles[first, 3] else then
        coming = looked_up(groups, begins, coming_from)
        if not OF_GATES and (fetcher == 0 or not PACKED):  # x was there before w was packed
            wait_for_earlier_kernels()
        if not PACKED:
            weigh(gates, own)
        for i in range(first, last):
            row, at, end = top(tops, rows, tiles[i, 1]), tiles[i, 2], tiles[i, 3]
            then = tiles[min(i + 1, last - 1), 2]
            if at < end and at != ahead:  # the strip before has no blocks
                known = looked_up(groups, begins, at)
                if not PACKED:
                    look_up(codes, known, 0, fetcher, own)
                    weigh(gates, own)
            while at < end:
                count = min(PER, end - at)
                # The next ones are under way while these are requested.
                ahead = at + PER if at + PER < end else then
                if ahead != coming_from:
                    coming, coming_from = looked_up(groups, begins, ahead), ahead
                for k in range(0, count, 2):
                    of = fetcher, known, coming, k, count, at, row
                    stage, phase = turn(of, sources, own, others, ring, stage, phase)
                    if k + 1 < count:
                        of = fetcher, known, coming, k + 1, count, at, row
                        stage, phase = other_turn(of, sources, others, own, ring, stage, phase)
                    else:
                        for c in range(CODES):
                            own[c] = others[c]
                at += PER
                known = coming

    return produce


def turning(strip: Strip, x_order: str, blocks: Copying) -> Any:
    """turn(of, sources, own, others, ring, stage, phase): fill an empty stage; gives the next one.

    of : (fetcher, what the lanes know, and of those to come, which of `count` stages that they know
        this is, the first of these, where its rows are, see `pixels.finding`)
    own : what a lane knows of the stage's blocks; others : of the next stage's, from here on
    """
    STAGES, STAGE_BYTES, W_START = strip.STAGES, strip.STAGE_BYTES, strip.W_START
    ask, PACKED = asking(strip, x_order), strip.PACKED
    look_up, weigh, copy = blocks.look_up, blocks.weigh, blocks.copy

    @cuda.jit(device=True)
    def turn(of, sources, own, others, ring, stage, phase):
        fetcher, known, coming, k, count, at, row = of
        shared, base, bars = ring
        if not PACKED:
            if k + 1 < count:
                look_up(sources[2], known, k + 1, fetcher, others)
            else:
                look_up(sources[2], coming, 0, fetcher, others)
        mbarrier_wait(bars, STAGES + stage, phase)
        ask(fetcher, sources, known, at + k, k, row, (shared, base, bars, stage))
        if not PACKED:
            many = shfl_idx(known[2], k) - shfl_idx(known[1], k)
            start = uint32(base + stage * STAGE_BYTES + W_START)
            copy(sources[1], sources[5], own, many, shared, start, bars, stage, fetcher)
            weigh(sources[5], others)
        return following(stage, phase, STAGES)

    return turn


def asking(strip: Strip, x_order: str) -> Any:
    """ask(fetcher, sources, known, number, k, row, ring): what the copy engine loads."""
    GROUPS, GROUP_BYTES, STAGE_BYTES = strip.GROUPS, strip.GROUP_BYTES, strip.STAGE_BYTES
    W_START, X_START, STEP_BYTES = strip.W_START, strip.X_START, strip.STEP_BYTES
    HEAD, CLUSTER, FETCHERS = strip.HEAD, strip.CLUSTER, strip.FETCHERS
    SHARES, PACKED = -(-GROUPS // (FETCHERS * CLUSTER)), strip.PACKED
    load = loading(strip, x_order)
    ASKED = 4 + (STEP_BYTES if PACKED else 0)  # bytes of a step

    @cuda.jit(device=True)
    def ask(fetcher, sources, known, number, k, row, ring):
        """The fetcher's copies for a stage, the k-th of those that the lanes know.

        The blocks of a cluster take turns with the groups; each one's copies are for all of them.
        """
        x_map, w, _, words_of, group_bytes, _ = sources
        shared, base, bars, stage = ring
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        first, end = shfl_idx(known[1], k), shfl_idx(known[2], k)
        own = cuda.local.array(SHARES, int32)
        many, nbytes = uint32(end - first), uint32(0)
        if fetcher == 0:
            nbytes = uint32(many * ASKED + HEAD * 4)
        for i in range(SHARES):
            for c in range(CLUSTER):
                g = (i * FETCHERS + fetcher) * CLUSTER + c
                group = shfl_idx(known[0], k * GROUPS + min(g, GROUPS - 1))
                if g >= GROUPS:
                    group = int32(-1)
                if group >= 0:
                    nbytes = uint32(nbytes + group_bytes)
                if c == rank:
                    own[i] = group
        if elect() != 0:
            start = uint32(base + stage * STAGE_BYTES)
            mbarrier_expect(bars, stage, nbytes)
            for i in range(SHARES):
                if own[i] >= 0:
                    g = (i * FETCHERS + fetcher) * CLUSTER + rank
                    to = start + X_START + g * GROUP_BYTES
                    load(shared, to, x_map, own[i], row, bars, stage)
            if fetcher == 0:
                at = int64(first) + (number * CLUSTER + rank) * HEAD
                nbytes = uint32((HEAD + many) * 4)
                bulk_load(shared, start, words_of, at, nbytes, bars, stage)
                if PACKED and many > 0:
                    at, nbytes = int64(first) * (STEP_BYTES // 4), uint32(many * STEP_BYTES)
                    bulk_load(shared, start + W_START, w, at, nbytes, bars, stage)

    return ask
