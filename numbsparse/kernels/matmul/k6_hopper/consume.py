"""The warpgroups that multiply: 64 M_TILES rows of y each, in their share of a group's strips.

Which strips have a block at an input is known only at run time, and accumulators are registers: so
every product has its own code, and the mask of the step skips absent ones.

Both 16-bit operands are read from shared memory. Of float32 a lane reads its values of x, splits
them into hi and lo, and gives them to wgmma for one image of w or for two side by side.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.plan import BEFORE, LAST, MOST, TO_SCALE, Form
from numbsparse.kernels.parts.fragments_tf32 import rows_of_warpgroup
from numbsparse.kernels.parts.store import Sums, by_boxes
from numbsparse.kernels.parts.store_boxes import finishing
from numbsparse.kernels.parts.store_float32 import finishing as finishing_float32
from numbsparse.kernels.ptx import (
    Operand,
    bulk_wait_read,
    fence_tensor_map,
    mbarrier_arrive,
    mbarrier_arrive_at,
    mbarrier_wait,
    redux_or,
    shfl_idx,
    sync_warp,
    to_local,
    wgmma,
    wgmma_split,
    zeros,
)


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
