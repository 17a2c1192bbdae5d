"""The weight-gradient: what a chunk of taps sees in a box, times the tile of dy behind it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.conv.k2_tensor_core.boxes import in_box, spread
from numbsparse.kernels.conv.k2_tensor_core.products import (
    add_shifted,
    gather_sums,
)
from numbsparse.kernels.conv.k2_tensor_core.tiles import block_items, cut
from numbsparse.kernels.conv.k2_tensor_core.weight_grad import (
    MOST_ROWS,
    MOST_TAPS,
    PER_WARP,
    pieces_of,
)
from numbsparse.kernels.conv.k3_hopper.copies import (
    box_rows,
    pixel_map,
    start_ring,
    step_fetcher,
)
from numbsparse.kernels.conv.turns import add_in_turn, room_for_turns
from numbsparse.kernels.conv.walks import planned
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    fence_proxy_async,
    first_multiple,
    mbarrier_arrive,
    mbarrier_wait,
    sync_warp,
)
from numbsparse.kernels.views import span

WARPS = {16: 3, 32: 3, 64: 6} if SIMULATED else {16: 6, 32: 6, 64: 6}
TILE = 32 if SIMULATED else 128  # outputs
STAGES = 2 if SIMULATED else 3


def weight_grad(x, dy, index, window, dvalues):
    """Gives whether tiles were filled by outputs: see `Cut.fills`."""
    size, batch, dtype = dvalues.shape[1], x.shape[0], x.dtype.name
    x, dy, dvalues = (a.view(np.uint16) for a in (x, dy, dvalues))
    (of,) = window.passes("weight_grad")
    how = cut(of, batch, TILE, MOST_TAPS[size], MOST_ROWS[size])
    plan = planned(index, window, block_items, of, how.box, how.chunks)
    items, tiles, warps = plan[0].size, int(np.prod(how.tiles)), WARPS[size]
    pieces = pieces_of(items, tiles)
    totals, turns = room_for_turns(pieces, items, dvalues.size)
    rows = box_rows(how, size)
    stage = (rows + max(TILE, 512 // size)) * size
    shared = max(2 * STAGES * stage, 4 * MOST_TAPS[size] * size * size) + 1024
    launch(
        item_kernel(dtype, size, warps, TILE, STAGES), items * pieces, 32 * (warps + 1),
        pixel_map(x, window.big, how.images, how.box, size),
        pixel_map(dy, window.small, how.images, how.tile, size),
        how.images, how.tile, how.box, rows, how.tiles, *plan, pieces, totals, turns, span(dvalues),
        stage,
        shared_bytes=shared,
    )  # fmt: skip
    return how.fills(of, TILE)


@cache
def item_kernel(dtype: str, B: int, WARPS: int, BM: int, STAGES: int) -> Any:
    THREADS, PER = 32 * WARPS, PER_WARP[B]
    HEIGHT = min(B, 32)  # of the part of a block that a warp sums at once
    TA, TB, PARTS = HEIGHT // 16, B // 8, B // HEIGHT
    ACC, BARS = (PER, TA, TB, 4), 2 * STAGES
    add_rows, begin_dy = add_shifted(dtype, B, PER)
    fetch = step_fetcher(B, STAGES)
    gather, add = gather_sums(dtype, B, PER), add_in_turn(dtype, B, THREADS)
    limit = {} if SIMULATED else {"max_registers": 65536 // (2 * (THREADS + 32)) // 8 * 8}

    @cuda.jit(**limit)
    def kernel(
        x_map, dy_map, images, tile, box, rows, tiles, item_row, item_column, item_chunk, order,
        entry_ptr, entry_block, entry_shift, origins, pieces, totals, turns, dvalues, stage,
    ):  # fmt: skip
        whole = cuda.shared.array(0, uint16)
        # Stages, each a box of x and a tile of dy; from where swizzled lines begin, because places
        # in them are worked out from there.
        ring = whole[first_multiple(whole, uint32(1024)) :]
        sums = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory, in the end
        bars = cuda.shared.array(BARS, uint64)
        bases = cuda.shared.array(BM, int32)
        places = cuda.shared.array(BM, int64)
        items = uint32(item_row.size)
        item, piece = order[uint32(cuda.blockIdx.x) % items], uint32(cuda.blockIdx.x) // items
        all_tiles = tiles[0] * tiles[1] * tiles[2] * tiles[3]
        begin, end = all_tiles * piece // pieces, all_tiles * (piece + 1) // pieces
        entry = entry_ptr[item]
        count = entry_ptr[item + 1] - entry
        start_ring(bars, STAGES, WARPS)
        spread(places, BM, images, tile)
        used = images * tile[0] * tile[1] * tile[2]
        for i in range(used * B + cuda.threadIdx.x, BM * B, cuda.blockDim.x):
            for s in range(STAGES):  # rows that no copy fills
                ring[s * stage + rows * B + i] = 0
        fence_proxy_async()
        cuda.syncthreads()
        for m in range(cuda.threadIdx.x, BM, cuda.blockDim.x):
            bases[m] = in_box(places[m], box)
        cuda.syncthreads()

        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        # Warps take PER parts of blocks each, and where there are fewer, some rows of a tile.
        groups = (count * PARTS + PER - 1) // PER
        slices = WARPS // groups
        group, part = int32(warp % groups), int32(warp // groups)
        mine = min(count * PARTS - group * PER, PER) if part < slices else 0
        acc = cuda.local.array(ACC, float32)
        if warp == WARPS:
            c, k = int32(item_row[item] * B), int32(item_column[item] * B)
            cut = (images, tile, box, rows, tiles)
            origin = origins[item_chunk[item]]
            fetch((x_map, dy_map), (c, k), begin, end, cut, origin, ring, stage, bars)
        else:
            shifts = cuda.local.array(PER, int32)
            for p in range(PER):
                shifts[p] = 0
                if p < mine:
                    shifts[p] = entry_shift[entry + (group * PER + p) // PARTS]
                for m in range(TA):
                    for n in range(TB):
                        for i in range(4):
                            acc[p, m, n, i] = 0
            half = group * PER % PARTS
            dy_lane = uint32(rows * B + begin_dy(0, 0))
            at, phase = uint32(0), uint32(0)
            for _ in range(begin, end):
                x_start, dy_at = uint32(at * stage), uint32(dy_lane + at * stage)
                mbarrier_wait(bars, at, phase)
                if mine > 0:
                    for i in range(part, BM // 16, slices):
                        add_rows(mine, ring, x_start, dy_at, bases, i, shifts, half, acc)
                sync_warp()
                if lane == 0:
                    mbarrier_arrive(bars, STAGES + at)
                at, phase = following(at, phase, STAGES)
        gather(acc, sums, slices if warp < WARPS else 0, slices, part, group, mine)
        add(sums, entry_block, entry, count, piece, pieces, totals, turns, item, dvalues)

    return kernel
