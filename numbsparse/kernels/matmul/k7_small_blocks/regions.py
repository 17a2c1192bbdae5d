"""dvalues = x.T @ dy at the kept blocks: each region of w reads the features that it needs once.

Rows of x and dy pass through a ring in shared memory, in groups of features; the sums of a warp's
slots stay in its registers. Some warps only request copies, so that they request a stage as
soon as the last warp has released it; those that multiply never wait for each other, and of float32
they have the registers that the others lack.
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint8, uint32, uint64

from numbsparse.device import SIMULATED, empty
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import handed_over, multiprocessors
from numbsparse.kernels.matmul.k7_small_blocks.gated import thinning
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import (
    Cuts,
    Sums,
    Ways,
    cuts_of,
    region_for,
    ways_of,
)
from numbsparse.kernels.matmul.k7_small_blocks.region_products import places_tf32, products
from numbsparse.kernels.matmul.k7_small_blocks.region_slots import (
    Into,
    add_up,
    plan_boxes,
    storer,
    storer_of_cluster,
)
from numbsparse.kernels.parts.aligned import aligned_either_way, of_any_rows, of_bits
from numbsparse.kernels.parts.deal import even_rows
from numbsparse.kernels.parts.pieces import SOON, clear
from numbsparse.kernels.parts.pixels import (
    UNEVEN,
    Images,
    finding,
    is_whole,
    load_pixels,
    tile_that_fits,
)
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.repair import factors_of
from numbsparse.kernels.parts.ring import begin_ring, following, show_own_barriers
from numbsparse.kernels.parts.strip import LINE, Region
from numbsparse.kernels.parts.swizzle import PERIOD, box_of, load_for, rows_of_lane
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cluster_sync,
    fence_proxy_async,
    fence_tensor_map,
    fewer_registers,
    first_multiple,
    let_next_kernel_start,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    more_registers,
    shfl_idx,
    store_4xu32,
    sync_warp,
    wait_for_earlier_kernels,
)

# Rows from which on a weight-gradient leaves out blocks, by bytes of a value. Of 512 rows of 16
# bits all gates one took 1.06 times as long, every other one zero 0.78, with blocks of 16 0.90; of
# 1,024 rows of float32 0.99 and 0.66; of 331 to 527 1.00 and 0.72 to 0.81 (H200).
LEAVES_FROM = {2: 512, 4: 256}
FULL = 0 if SIMULATED else 16  # groups of a region, more than which it is no small one
A_TILE = 512  # see `pixels.tile_that_fits`: what a stage takes hardly depends on its pixels


@of_any_rows
def in_regions(
    x: Any, dy: Any, index: Any, dvalues: Any, precision: str, gates: Any = None,
    ways: Ways = (), tile: Any = None,
) -> bool:  # fmt: skip
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]; of matrices, or `pixels.Images`.

    Anything where gates[b] is 0. Of images sums that a split made NaN stay so; returns whether
    images are made of whole tiles: else zeros are multiplied by pixels, and may give NaN. Where
    taps share boxes of pixels there are `ways` to do so, and the `tile` of a stage's outputs.
    """
    B, batch, widths = dvalues.shape[1], x.shape[0], (x.shape[1], dy.shape[1])
    arithmetic, item = precision if dvalues.itemsize == 4 else dvalues.dtype.name, dvalues.itemsize
    gates = gates if batch >= LEAVES_FROM[item] else None
    x_transposed = dy_transposed = False
    if type(x) is not Images:
        (x, dy), (x_transposed, dy_transposed) = aligned_either_way(*map(of_bits, (x, dy)))
    of_images, transposed = type(x) is Images, x_transposed or dy_transposed
    places = multiprocessors()
    ways = ways or ways_of(index, B, widths[1], arithmetic, transposed, of_images)
    region, parts = region_for(index, B, widths, batch, ways, places)
    within: Any = ()
    loaded: Any = ()
    rows, tops, offsets, whole_tiles = region.DEPTH, (), None, True
    if of_images:
        shared, tile = tile, tile or tile_that_fits(x.batch, x.outputs, rows, A_TILE, UNEVEN)
        if shared:
            within, loaded = x.within(index, tile, rows), prod(x.seen(tile))
        offsets, whole_tiles = x.taps, is_whole(tile, x.outputs)
        rows, tops = prod(tile), x.tops(index, tile)
        batch = tops.shape[0] * region.DEPTH
        maps = tensor_maps(*(a.boxes(tile, region.FEATURES) for a in (x, dy)))
    else:
        if has_even_rows(B, region, not transposed):
            rows = even_rows(batch, -(-batch // rows))
        box = rows, region.FEATURES
        maps = tensor_maps((x, box_of(*box, x_transposed)), (dy, box_of(*box, dy_transposed)))
    boxes, codes, used, blocks = planned(index, plan_boxes, B, widths, region, offsets)
    n = used.size // region.WARPS
    cuts = cuts_of(n, places, parts)
    orders, gated = (x_transposed, dy_transposed), gates is not None
    sums = Sums(B, arithmetic, region, *orders, bool(offsets), gated)
    slots = cuts.left * region.CODES
    partials = empty((max(slots * parts * 16 * B, 1),), "float32")
    out = dvalues.reshape(-1).view("uint32" if dvalues.itemsize == 2 else "float32")
    into = Into(partials, empty(blocks.shape, "int32") if gated else blocks, out)
    dense: Any = ()
    if arithmetic == "highest" and not offsets:  # for sums that a split made NaN
        dense = factors_of(x, dy, orders, index)
    tiles = rows, tops, within, loaded
    plan = Plan(cuts, boxes, codes, used, *tiles, blocks, gates if gated else ())
    launch(
        region_kernel(sums),
        cuts.whole * region.SPLIT + cuts.left * parts,
        32 * (region.WARPS + region.FETCHERS),
        *(maps, unannounced(maps), batch, plan, into, dense),
        shared_bytes=region.SHARED_BYTES,
        cluster=(region.SPLIT,) if region.SPLIT > 1 else None,
        overlap=True,
    )
    add_up(sums, cuts, into, dense, not of_images and x.nbytes + dy.nbytes < SOON)
    return whole_tiles


class Plan(NamedTuple):
    """What each block of threads computes: see `plan_boxes`."""

    cuts: Cuts
    boxes: Any
    codes: Any
    used: Any
    rows: int  # of a stage
    tops: Any  # of tiles of images: see `pixels`
    within: Any  # of boxes that taps share, where each row of a tile begins, and their lines
    loaded: Any
    blocks: Any
    gates: Any  # of all blocks, if any


def has_even_rows(B: int, region: Region, by_rows: bool) -> bool:
    """Whether stages have as many rows each (`even_rows`), and zeros behind them, where x and dy
    lie `by_rows`.

    4,096 features, density 0.1, 65, 97 and 257 rows took 0.94 to 0.96 of the time, 33 rows 1.05;
    8,192 and 0.02 0.80 to 0.86, 33 rows 0.85 (H200). With stages of 16 rows or small regions they
    took 1.0 to 1.2 times as long, in blocks of 8 of 4,096 features 1.0 to 1.07, in float32 to 1.1.
    """
    large = region.DEPTH == 32 and region.GROUPS > FULL
    return by_rows and B == 16 and region.ITEM == 2 and large


def lie_by_rows(sums: Sums) -> bool:
    return not (sums.of_images or sums.x_transposed or sums.dy_transposed)


@cache
def region_kernel(sums: Sums) -> Any:
    region, tf32 = sums.region, sums.region.ITEM == 4
    WARPS, SLOTS, DEPTH, STAGES = region.WARPS, region.SLOTS, region.DEPTH, region.STAGES
    FETCHERS, CODES, BARRIERS = region.FETCHERS, WARPS * SLOTS, 2 * region.STAGES
    SPLIT, OF_IMAGES, ALL = region.SPLIT, sums.of_images, STAGES * region.STAGE_BYTES // 4
    GATED, GROUPS, A_GROUP = sums.gated, region.GROUPS, region.GROUP_BYTES // 4
    EVEN = has_even_rows(sums.B, region, lie_by_rows(sums))
    THREADS, WORDS = 32 * (WARPS + FETCHERS), 4 * CODES if tf32 else 4
    supply, multiply, places = supplier(sums), multiplier(sums), places_tf32(sums)

    @cuda.jit(**handed_over(region.WARPS, region.FETCHERS)[2])
    def kernel(maps, fresh, batch, plan, into, dense):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        own = cuda.shared.array(WORDS, uint32, ALIGNMENT)  # where the operands of slots are
        base, t = first_multiple(shared, PERIOD), uint32(cuda.threadIdx.x)
        codes, (item, piece, pieces, _) = plan.codes, piece_of_block(plan.cuts, SPLIT)
        if tf32 and not GATED:
            for i in range(t, CODES, THREADS):
                four = places(codes[item * CODES + i])
                own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3] = four
        if OF_IMAGES and plan.rows < DEPTH:  # stages are not filled, and none of it may be NaN
            for i in range(4 * t, ALL, 4 * THREADS):
                store_4xu32(words, base // 4 + i, uint32(0), uint32(0), uint32(0), uint32(0))
            fence_proxy_async()
        if EVEN:  # lines of a group behind the rows that are copied
            for group in range(t // 32, STAGES * GROUPS, WARPS + FETCHERS):
                begin = base // 4 + group * A_GROUP + LINE // 4 * uint32(plan.rows)
                for i in range(4 * (t % 32), LINE // 4 * uint32(DEPTH - plan.rows), 128):
                    store_4xu32(words, begin + i, uint32(0), uint32(0), uint32(0), uint32(0))
        if t == 0:
            begin_ring(bars, 0, STAGES, FETCHERS, WARPS)
        if OF_IMAGES or plan.cuts.left == 0:
            let_next_kernel_start()
        show_own_barriers(t, 1)
        chunks = (batch + DEPTH - 1) // DEPTH
        first = chunks * piece // pieces
        steps = int32(chunks * (piece + 1) // pieces - first)
        warp, ring = shfl_idx(uint32(t // 32), 0), (shared, base, bars)
        if warp >= WARPS:
            supply(int32(warp - WARPS), maps, fresh, plan, item, first, steps, ring)
            cuda.syncthreads()
            if SPLIT > 1:
                cluster_sync()
        else:
            multiply(item, warp, plan, own, steps, ring, words, into, dense)
        if SPLIT > 1:
            cluster_sync()  # the others may still read here

    return kernel


@cuda.jit(device=True)
def piece_of_block(cuts, split):
    """(region, which of how many pieces of the batch the block sums over, and where its sums are
    among those that a second pass adds up, or -1); `split` blocks of a cluster have a region."""
    block, whole, left = int32(cuda.blockIdx.x), int32(cuts.whole), int32(cuts.left)
    if split > 1:
        return block // split, block % split, int32(split), int32(-1)
    if block < whole:
        return block, int32(0), int32(1), int32(-1)
    which, piece, pieces = (block - whole) % left, (block - whole) // left, int32(cuts.pieces)
    return whole + which, piece, pieces, which * pieces + piece


@cache
def supplier(sums: Sums) -> Any:
    """The warps that request boxes, each for its share of every stage, and each lane for some: a
    request takes some 100 cycles a time."""
    region = sums.region
    STAGES, STAGE_BYTES, DEPTH = region.STAGES, region.STAGE_BYTES, region.DEPTH
    GROUPS, FETCHERS, GROUP_BYTES = region.GROUPS, region.FETCHERS, region.GROUP_BYTES
    SHARE = -(-GROUPS // (32 * FETCHERS))
    (FEWER, *_), BOX = handed_over(region.WARPS, region.FETCHERS), region.BOX
    OF_IMAGES, top = sums.of_images, finding(True) if sums.of_images else as_it_is
    EVEN, STEP = has_even_rows(sums.B, region, lie_by_rows(sums)), 1 if OF_IMAGES else DEPTH
    load_x, load_dy = load_box(sums, sums.x_transposed), load_box(sums, sums.dy_transposed)

    @cuda.jit(device=True)
    def supply(own, maps, fresh, plan, item, first, steps, ring):
        (shared, base, bars), boxes, tops = ring, plan.boxes, plan.tops
        if FEWER:
            fewer_registers(FEWER)
        mine, nbytes = cuda.local.array(SHARE, int32), uint32(0)
        box_codes = cuda.local.array(SHARE, int32)
        for k in range(SHARE):
            at = own + FETCHERS * (32 * k + cuda.threadIdx.x % 32)
            mine[k] = boxes[item, at] if at < GROUPS else -1
            box_codes[k] = boxes[item, GROUPS + min(at, GROUPS - 1)] if OF_IMAGES else 0
        for at in range(own, GROUPS, FETCHERS):
            if boxes[item, at] >= 0:
                lines = plan.loaded if BOX and boxes[item, at] & 1 == 0 else plan.rows
                nbytes = uint32(nbytes + lines * LINE)
        if fresh != 0:
            for m in range(2):
                fence_tensor_map(maps[m])
        wait_for_earlier_kernels()
        stage, phase = uint32(0), uint32(1)
        step = int32(plan.rows) if EVEN else int32(STEP)
        row = int32(first * step)
        for _ in range(steps):
            mbarrier_wait(bars, STAGES + stage, phase)
            if cuda.threadIdx.x % 32 == 0:
                mbarrier_expect(bars, stage, nbytes)
            sync_warp()
            where = top(tops, DEPTH, row)
            for k in range(SHARE):
                box, place = mine[k], own + FETCHERS * (32 * k + cuda.threadIdx.x % 32)
                to = uint32(base + stage * STAGE_BYTES + place * GROUP_BYTES)
                if box >= 0 and box & 1:
                    load_dy(shared, to, maps[1], box, box_codes[k], where, bars, stage)
                elif box >= 0:
                    load_x(shared, to, maps[0], box, box_codes[k], where, bars, stage)
            row = int32(row + step)
            stage, phase = following(stage, phase, STAGES)

    return supply


@cuda.jit(device=True)
def as_it_is(tops, rows, row):
    return row


@cache
def load_box(sums: Sums, transposed: bool) -> Any:
    """Request a box that begins at a row of the batch, or of images one with such a code."""
    FEATURES, load_features = sums.region.FEATURES, load_for(transposed)
    load_tile = load_pixels(FEATURES)

    @cuda.jit(device=True)
    def load_of_images(shared, to, own_map, box, code, top, bars, stage):
        load_tile(shared, to, own_map, code, top, bars, stage)

    @cuda.jit(device=True)
    def load(shared, to, own_map, box, code, row, bars, stage):
        load_features(shared, to, own_map, int32((box >> 1) * FEATURES), row, bars, stage)

    return load_of_images if sums.of_images else load


@cache
def multiplier(sums: Sums) -> Any:
    """The warps that multiply: the sums of their slots over all steps, and on to dvalues."""
    region, ACC = sums.region, (sums.region.SLOTS, sums.TILES, 4)
    WARPS, SLOTS = region.WARPS, region.SLOTS
    STAGES, STAGE_BYTES = region.STAGES, region.STAGE_BYTES
    _, MORE, _ = handed_over(region.WARPS, region.FETCHERS)
    SPLIT, (place, add_products) = region.SPLIT, products(sums)
    store = storer(sums) if SPLIT == 1 else storer_of_cluster(sums)
    thin, placed, GATED = thinning(16 // sums.B, region), places_tf32(sums), sums.gated
    tf32, BOX = region.ITEM == 4, region.BOX

    @cuda.jit(device=True)
    def multiply(item, warp, plan, own, steps, ring, words, into, dense):
        (shared, base, bars), codes = ring, plan.codes
        if MORE:
            more_registers(MORE)
        lane, own_warp = uint32(cuda.threadIdx.x) % 32, int32(item * WARPS + warp)
        used = plan.used[own_warp]
        acc, code = cuda.local.array(ACC, float32), cuda.local.array(SLOTS, uint32)
        wait_for_earlier_kernels()
        if GATED:
            left, used = thin(plan, warp, own_warp, into.blocks)
            if tf32 and lane < SLOTS:
                four, at = placed(left), 4 * (warp * SLOTS + lane)
                own[at], own[at + 1], own[at + 2], own[at + 3] = four
            sync_warp()
        for p in range(SLOTS):
            slot = shfl_idx(left, uint32(p)) if GATED else codes[own_warp * SLOTS + p]
            code[p] = place(slot, lane)
        rows = cuda.local.array(2, uint32)
        if BOX:
            rows_of_lane(plan.within, lane, rows)
        places = rows if BOX else own
        clear(acc)
        stage = phase = uint32(0)
        for _ in range(steps):
            mbarrier_wait(bars, stage, phase)
            start = uint32(base + stage * STAGE_BYTES)
            add_products(shared, start, code, places, warp * SLOTS, used, acc)
            sync_warp()
            if lane == 0:
                mbarrier_arrive(bars, STAGES + stage)
            stage, phase = following(stage, phase, STAGES)
        cuda.syncthreads()  # the ring is free
        partial = piece_of_block(plan.cuts, SPLIT)[3]
        if partial >= 0:
            let_next_kernel_start()
        store(acc, warp, own_warp * SLOTS, partial, used, words, base // 4, into, dense)

    return multiply
