"""The warps of a block of threads: producers request the tiles of each step, consumers multiply.

Producer warps take turns; `parts.records` says how they read the plan ahead. One lane requests the
tiles, chosen by `elect`: for any other choice the compiler emits a loop over the lanes. A request
takes about as long as a step of small blocks is multiplied, and so there may be several such warps.
The copy engine loads 16-bit blocks of w as they are, and float32's as `parts.images`.

Warpgroups of consumers have 64 M_TILES rows of y each, in their share of a group's strips. Which
strips have a block at an input is known only at run time, and accumulators are registers: so every
product has its own code, and the mask of the step skips absent ones. Both 16-bit operands are read
from shared memory. Of float32 a lane reads its values of x, splits them into hi and lo, and gives
them to wgmma for one image of w or for two side by side.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.plan import (
    BEFORE,
    LAST,
    LINE,
    MOST,
    SCALED,
    TO_SCALE,
    Form,
)
from numbsparse.kernels.parts.fragments_tf32 import rows_of_warpgroup
from numbsparse.kernels.parts.images import load_image
from numbsparse.kernels.parts.records import counting, walking
from numbsparse.kernels.parts.store import Sums, by_boxes
from numbsparse.kernels.parts.store_boxes import finishing
from numbsparse.kernels.parts.store_float32 import finishing as finishing_float32
from numbsparse.kernels.parts.swizzle import load_block_for, load_boxes_for
from numbsparse.kernels.ptx import (
    Operand,
    bulk_wait_read,
    fence_tensor_map,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_expect,
    mbarrier_wait,
    redux_or,
    shfl_idx,
    sync_warp,
    to_local,
    wgmma,
    wgmma_split,
    zeros,
)

X, W, SCALED_W = 0, 1, 3  # tensor maps; after W and SCALED_W those that end where x does, then y


@cache
def producer(form: Form) -> Any:
    """produce(fetcher, fresh, source, plan, first, last, shared, base, bars, info).

    source : the maps; of float32, and the images of w; the rows of a tile; gates, if any
    info : the masks of all stages
    """
    tile = form.tile
    N_MAPS = X + 1 if tile.ITEM == 4 else W + form.w_maps
    thinned: tuple[Any, ...] = ()
    if form.gated:
        from numbsparse.kernels.matmul.k6_hopper.gated import gates_in, showing, thinning

        thinned = thinning(tile), showing(tile), gates_in(tile)
    how = requesting(form), tile.FETCHERS, tile.CLUSTER, form.ahead, *thinned
    walk = walking(tile.RECORD, tile.STAGES, *how)

    @cuda.jit(device=True)
    def produce(fetcher, fresh, source, plan, first, last, shared, base, bars, info):
        if fresh != 0:
            for m in range(N_MAPS):
                fence_tensor_map(source[0][m])
        places, gates = (source[2], first, last), source[3]
        walk(fetcher, plan.records, plan.tiles, *places, bars, gates, source, shared, base, info)

    return produce


@cache
def requesting(form: Form) -> Any:
    """What `walking` does for a step: it publishes masks and requests tiles."""
    tile, STAGES, SHARES = form.tile, form.tile.STAGES, form.tile.SHARES
    INPUTS, BLOCKS, UNIT, CLUSTER = tile.INPUTS, tile.BLOCKS, tile.UNIT, tile.CLUSTER
    STAGE, W_START, X_BYTES, W_BYTES = tile.STAGE_BYTES, tile.W_START, tile.X_BYTES, tile.W_BYTES
    COUNTS, FIRST_INPUT, FIRST_BLOCK = SHARES, SHARES + 1, SHARES + 1 + INPUTS
    EVEN, LINE_BYTES = form.even, tile.ITEM * tile.DEPTH
    many, before, has = counting(form.gated)
    DEPTH, ROWS, BOX = tile.DEPTH, tile.ROWS, x_box(form)[1 if form.x_transposed else 0]
    fetch_x = load_boxes_for(form.x_transposed, ROWS // BOX, BOX, X_BYTES * BOX // ROWS // UNIT)
    FLOAT32 = tile.ITEM == 4
    fetch_w = load_image(tile.W_BYTES) if FLOAT32 else fetch_block(form)

    @cuda.jit(device=True)
    def request(step, row, stage, bars, source, shared, base, info):
        for s in range(SHARES):
            info[s * STAGES + stage] = step[s]
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        inputs, blocks = uint32(step[COUNTS] & 255), uint32(step[COUNTS] >> 8)
        x_bytes = uint32(source[2] * LINE_BYTES) if EVEN else X_BYTES
        mbarrier_expect(bars, stage, many(inputs) * x_bytes + many(blocks) * W_BYTES)
        start = uint32(base + stage * (STAGE // UNIT))
        for e in range(INPUTS):
            if has(inputs, e):
                at = start + e * (X_BYTES // UNIT)
                feature, rows = int32(step[FIRST_INPUT + e] * DEPTH), source[2] if EVEN else ROWS
                fetch_x(shared, at, source[0][X], feature, row, rows, bars, stage)
        for b in range(BLOCKS):
            # The blocks of a cluster take turns; each one's copies are for all of them.
            nth = before(blocks, b)
            if has(blocks, b) and (CLUSTER == 1 or (stage + nth) % CLUSTER == rank):
                at = start + W_START // UNIT + nth * (W_BYTES // UNIT)
                w = source[1] if FLOAT32 else source[0]
                fetch_w(w, step[FIRST_BLOCK + b], shared, at, bars, stage)

    return request


def x_box(form: Form, rows: int = 0) -> tuple[int, int]:
    """The box of x that one copy loads, of even tiles `rows`; of x.T where x is feature-major."""
    depth, item, rows = form.tile.DEPTH, form.tile.ITEM, rows or min(form.tile.ROWS, 256)
    return (depth, LINE // item) if form.x_transposed else (rows, depth)


def w_box(form: Form) -> tuple[int, int, int]:
    """The box of w that one copy loads."""
    tile = form.tile
    return (1, tile.B, tile.DEPTH) if form.transposed else (1, tile.DEPTH, min(tile.B, 64))


@cache
def fetch_block(form: Form) -> Any:
    """DEPTH rows of a block of w, or columns for w.T, in panels of at most 64 columns."""
    tile, transposed, ragged, in_two = form.tile, form.transposed, form.ragged, form.w_maps > 2
    DEPTH, PARTS, (_, LINES, WIDTH) = tile.DEPTH, tile.PARTS, w_box(form)
    PANELS, BYTES = 1 if transposed else tile.B // WIDTH, 2 * LINES * WIDTH
    load = load_block_for(tile.CLUSTER)

    @cuda.jit(device=True)
    def fetch_from(w_map, kept, shared, place, bars, stage):
        block, part = int32(kept // PARTS), int32(kept % PARTS * DEPTH)
        for i in range(PANELS):
            at = place + i * BYTES
            if transposed:
                load(shared, at, w_map, part, 0, block, bars, stage)
            else:
                load(shared, at, w_map, i * WIDTH, part, block, bars, stage)

    @cuda.jit(device=True)
    def fetch(maps, kept, shared, place, bars, stage):
        first = W
        if in_two and kept & SCALED:
            first, kept = SCALED_W, uint32(kept ^ uint32(SCALED))
        if ragged and kept >> 31:
            fetch_from(maps[first + 1], kept & 0x7FFFFFFF, shared, place, bars, stage)
        else:
            fetch_from(maps[first], kept, shared, place, bars, stage)

    return fetch


@cache
def consumer(form: Form) -> Any:
    """consume(plan, tile_rows, fresh, first, last, shared, base, bars, info, y, more).

    more : the map of y; of float32, what is multiplied
    """
    tile = form.tile
    STAGES, STAGE_BYTES = tile.STAGES, tile.STAGE_BYTES
    W_START, OWN_ROWS, UNIT = tile.W_START, 64 * tile.M_TILES, tile.UNIT
    SHARE, SHARES, BITS = tile.SHARE, tile.SHARES, (1 << tile.INPUTS * tile.SHARE) - 1
    CLUSTER, MASKS, CUT = tile.CLUSTER, STAGES * tile.SHARES, tile.SPLIT > 1
    COUNTED = CUT and not form.gated  # gates leave fewer steps, the last of which says so
    LINE_BYTES = tile.ITEM * tile.DEPTH  # of x in a stage, on average where it is feature-major
    BOXES, FLOAT32, EVEN = tile.ITEM == 2 and by_boxes(form.order), tile.ITEM == 4, form.even
    # Of float32 one lane reads masks, of one share, and strips are read when they are stored.
    BY_LANE, EARLY, W_BYTES = (False, 0, 0) if FLOAT32 else (True, SHARE, tile.W_BYTES)
    SUMS = SHARE * tile.M_TILES * tile.N // 2
    begin, multiply, end = (products_of_float32 if FLOAT32 else products)(form)
    RING_BYTES, BUFFER = tile.RING_BYTES, tile.BUFFER_BYTES
    BLOCKS, FACTORS = tile.BLOCKS, tile.MASKS
    SCALES: bool = form.gated and not FLOAT32
    scale: Any = None
    if SCALES:
        from numbsparse.kernels.matmul.k6_hopper.gated import scaler

        scale = scaler(form, 2 * STAGES)

    @cuda.jit(device=True)
    def consume(plan, tile_rows, fresh, first, last, shared, base, bars, info, y, more):
        strips, tiles = plan.strips, plan.tiles
        t = uint32(cuda.threadIdx.x)
        warpgroup, lane = shfl_idx(uint32(t // 128), 0), t % 32
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        sums = cuda.local.array(SUMS, float32)
        columns = cuda.local.array(SHARE, int32)
        share, rows = warpgroup % SHARES, warpgroup // SHARES * OWN_ROWS
        own = uint32(base + rows * (LINE_BYTES // UNIT))
        w_place = uint32(base + W_START // UNIT)
        buffer = uint32(base + RING_BYTES + t // 32 * BUFFER)
        # The lane that gives stages back here is the one that reads their masks; others read zeros.
        mask_at = uint32(share * STAGES if lane == rank else MASKS)
        stage, phase, turn = uint32(0), uint32(0), uint32(0)
        if BOXES and fresh != 0:
            fence_tensor_map(more)
        for i in range(first, last):
            group, top = tiles[i, 0], (tiles[i, 1] * CLUSTER + rank) * tile_rows
            row = top + rows
            for c in range(EARLY):
                columns[c] = strips[group, share * SHARE + c]
            # A warpgroup below the last row of y, or of an even tile, only waits.
            below = row >= y[3] or (EVEN and rows >= tile_rows)
            bits = uint32(0 if FLOAT32 and below else BITS)
            acc = begin(sums)
            left = tiles[i, 3] - tiles[i, 2] if CUT else int32(1)
            mask = uint32(0 if left > 0 else LAST)
            while left > 0 if COUNTED else mask >> 31 == 0:
                if COUNTED:
                    left -= int32(1)
                mbarrier_wait(bars, stage, phase)
                mask = redux_or(
                    info[mask_at if BY_LANE else stage] if BY_LANE or lane == 0 else uint32(0)
                )
                start = uint32(stage * (STAGE_BYTES // UNIT))
                before = mask >> BEFORE & MOST
                w_start = w_place + start + before * W_BYTES
                if SCALES and mask & TO_SCALE:
                    at, count = FACTORS + stage * BLOCKS + before, cuda.popc(uint32(mask & bits))
                    scale(shared, w_start, info, at, count, share, warpgroup, bars, turn)
                    turn = uint32(turn ^ 1)
                acc = multiply(acc, sums, shared, own + start, w_start, uint32(mask & bits))
                if (FLOAT32 or CUT) and lane == 0:  # the first of a cluster may be another block
                    mbarrier_arrive(bars, STAGES + stage)
                if not (FLOAT32 or CUT) and lane < CLUSTER:
                    mbarrier_arrive_at(bars, STAGES + stage, lane)
                stage, mask_at = uint32(stage + 1), uint32(mask_at + 1)
                if stage == STAGES:
                    stage, mask_at, phase = uint32(0), uint32(mask_at - STAGES), uint32(phase ^ 1)
            for c in range(EARLY, SHARE):
                columns[c] = strips[group, share * SHARE + c]
            place = row + t // 32 % 4 * 16, top + tile_rows
            end(acc, sums, columns, place, base, shared, buffer, y, more)
        if BOXES:
            bulk_wait_read()

    return consume


def products(form: Form) -> Any:
    """(begin, multiply, end) of 16-bit values, whose accumulators are one tuple until the end."""
    tile, of = form.tile, form.tile.sums(form.kind)
    DEPTH, WIDTH = tile.DEPTH, of.WIDTH
    x = Operand(128, 128 * DEPTH, True) if form.x_transposed else Operand(2 * DEPTH, 0)
    w = Operand(2 * DEPTH, 0) if form.transposed else Operand(2 * WIDTH, 2 * WIDTH * DEPTH, True)
    shape = tile.M_TILES, tile.B, DEPTH // 16
    add = wgmma(form.kind, *shape, x, w, tile.SHARE, tile.INPUTS, tile.X_BYTES)
    no_sums = zeros(tile.SHARE * tile.M_TILES * tile.B // 2)
    finish = finishing(of, form.order, form.even, tile.SPLIT)

    @cuda.jit(device=True)
    def begin(sums):
        return no_sums()

    @cuda.jit(device=True)
    def multiply(acc, sums, ring, x_at, w_at, mask):
        return add(acc, ring, x_at, ring, w_at, mask)

    @cuda.jit(device=True)
    def end(acc, sums, columns, place, base, shared, buffer, y, y_map):
        row, last = place
        to_local(acc, sums)
        finish(sums, columns, row, last, base, shared, buffer, y, y_map)

    return begin, multiply, end


def products_of_float32(form: Form) -> Any:
    """(begin, multiply, end) with the sums in place."""
    tile, exact = form.tile, form.kind == "highest"
    ALL, SPLIT, N, COLUMNS = (1 << tile.COLUMNS) - 1, tile.DEPTH // 2, tile.N, tile.COLUMNS
    EACH, EVEN, COUNT = N // 2, form.even, COLUMNS * N // 2  # sums of a strip, of all
    AFTER = COUNT - EACH
    read, row_of = rows_of_warpgroup(tile.DEPTH, form.x_transposed, exact)
    one, all_of_them = (wgmma_split(n, tile.DEPTH // 8, exact, 1, True) for n in (N, COLUMNS * N))
    of = Sums(form.kind, N, COLUMNS, 1, APART=64)
    finish = finishing_float32(of, form.order, row_of, form.x_transposed, form.gated, tile.B)

    @cuda.jit(device=True)
    def begin(sums):
        for k in range(COUNT):
            sums[k] = 0
        return uint32(0)

    @cuda.jit(device=True)
    def multiply(acc, sums, ring, x_at, w_at, mask):
        hi, lo = cuda.local.array(SPLIT, uint32), cuda.local.array(SPLIT, uint32)
        if mask != 0:  # after a product all lanes have read
            read(ring, uint32(x_at), hi, lo)
            if mask == ALL:
                all_of_them(sums, hi, lo, ring, w_at)
            elif mask == 1:
                one(sums[:EACH], hi, lo, ring, w_at)
            elif mask == 2:
                one(sums[AFTER:], hi, lo, ring, w_at)
        sync_warp()
        return acc

    @cuda.jit(device=True)
    def end(acc, sums, columns, place, base, shared, buffer, y, dense):
        row, last = place
        if EVEN and row >= last:  # behind the rows of an even tile sums may be anything
            return
        finish(sums, columns, row, y, dense)

    return begin, multiply, end
