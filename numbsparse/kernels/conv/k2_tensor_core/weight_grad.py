"""The weight-gradient: what a chunk of taps sees in a box, times the tile of dy behind it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.conv.k2_tensor_core import products, singles
from numbsparse.kernels.conv.k2_tensor_core.boxes import (
    fetch_rows,
    in_box,
    see,
    spread,
    stand,
    tile_of,
)
from numbsparse.kernels.conv.k2_tensor_core.tiles import block_items, cut
from numbsparse.kernels.conv.turns import add_in_turn, room_for_turns
from numbsparse.kernels.conv.walks import planned
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned_rows
from numbsparse.kernels.parts import fragments as halves
from numbsparse.kernels.parts.fragments_tf32 import places as single_places
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait
from numbsparse.kernels.views import span

WARPS = {16: 3, 32: 3, 64: 6} if SIMULATED else {16: 6, 32: 6, 64: 6}
MOST_TAPS = {16: 9, 32: 9, 64: 3}
MOST_ROWS = {16: 512, 32: 384, 64: 256}
PER_WARP = {16: 3, 32: 3, 64: 1}  # taps of a warp, or halves of them: up to 96 sums in registers
SINGLE_WARPS = {16: 3, 32: 3, 64: 6} if SIMULATED else {16: 6, 32: 9, 64: 6}
SINGLE_TAPS = {16: 9, 32: 3 if SIMULATED else 9, 64: 3}
SINGLE_ROWS = {16: 384, 32: 256, 64: 224}
SINGLE_PER_WARP = {16: 3, 32: 1, 64: 1}
TILE = 32 if SIMULATED else 128  # outputs
STAGES = 3
PER_SM = 2  # blocks of threads that a multiprocessor holds
MOST_PIECES = 16
LEAST_TILES = 4  # of a piece


class Limits(NamedTuple):
    """Of an item's taps and a box's rows; warps, and what each sums."""

    taps: int
    rows: int
    warps: int
    per_warp: int


def limits_of(arithmetic: str, B: int) -> Limits:
    if arithmetic in halves.MMA:
        return Limits(MOST_TAPS[B], MOST_ROWS[B], WARPS[B], PER_WARP[B])
    return Limits(SINGLE_TAPS[B], SINGLE_ROWS[B], SINGLE_WARPS[B], SINGLE_PER_WARP[B])


def weight_grad(x, dy, index, window, dvalues, arithmetic):
    """Gives whether tiles were filled by outputs: see `Cut.fills`."""
    size = dvalues.shape[1]
    if not dvalues.size:
        return True
    limits = limits_of(arithmetic, size)
    (batch, _, in_features), out_features = x.shape, dy.shape[2]
    if not batch:
        fill(dvalues, 0.0)
        return True
    if x.itemsize == 2:
        x, dy, dvalues = (a.view(np.uint16) for a in (x, dy, dvalues))
    x, x_stride = aligned_rows(x.reshape(-1, in_features))
    dy, dy_stride = aligned_rows(dy.reshape(-1, out_features))
    (of,) = window.passes("weight_grad")
    how = cut(of, batch, TILE, limits.taps, limits.rows)
    plan = planned(index, window, block_items, of, how.box, how.chunks)
    items, tiles, stages = plan[0].size, int(np.prod(how.tiles)), 3 if x.itemsize == 2 else 2
    pieces = pieces_of(items, tiles)
    totals, turns = room_for_turns(pieces, items, dvalues.size)
    stage = (how.rows + TILE) * size
    shared = max(stages * stage * x.itemsize, 4 * limits.taps * size * size)
    launch(
        item_kernel(arithmetic, size, TILE, stages), items * pieces, 32 * limits.warps,
        x, x_stride, in_features, dy, dy_stride, out_features, batch,
        how.images, how.tile, how.box, how.rows, how.tiles, of.counts, of.scale,
        window.big, window.small, *plan, pieces, totals, turns, span(dvalues), stage,
        shared_bytes=shared,
    )  # fmt: skip
    return how.fills(of, TILE)


def pieces_of(items: int, tiles: int) -> int:
    """Into how many pieces each item is cut along the batch, so that the GPU is full."""
    places = PER_SM * multiprocessors()

    def time(pieces: int) -> float:
        return -(-items * pieces // places) / pieces + 0.01 * pieces

    return min(range(1, max(1, min(MOST_PIECES, tiles // LEAST_TILES)) + 1), key=time)


@cache
def item_kernel(arithmetic: str, B: int, BM: int, STAGES: int) -> Any:
    _, ROWS, WARPS, PER = limits_of(arithmetic, B)
    THREADS, HEIGHT = 32 * WARPS, min(B, 32)  # of the part of a block that a warp sums at once
    TA, TB, PARTS = HEIGHT // 16, B // 8, B // HEIGHT
    AHEAD, PENDING, ACC = STAGES - 1, STAGES - 2, (PER, TA, TB, 4)
    TABLES, OUT_TABLES = (2, ROWS), (2, BM)
    if arithmetic in halves.MMA:
        ITEM, PIECE = uint16, halves.PIECE
        add_rows, begin_dy = products.add_shifted(arithmetic, B, PER)
        x_place = dy_place = halves.places(B // PIECE)[0]
    else:
        ITEM, PIECE = float32, singles.PIECE
        add_rows, begin_dy = singles.add_shifted(arithmetic, B, PER)
        x_place = singles.places_in_columns(B // PIECE)
        dy_place = single_places(B // PIECE, False, TB)[0]
    fetch_x, fetch_dy = (fetch_rows(B, THREADS, PIECE, place) for place in (x_place, dy_place))
    gather = products.gather_sums(arithmetic, B, PER)
    add = add_in_turn(arithmetic, B, THREADS)
    most = 65536 // (PER_SM * THREADS) // 8 * 8 if B < 64 or uint16 == ITEM else 248
    limit = {} if SIMULATED else {"max_registers": min(most, 248)}

    @cuda.jit(**limit)
    def kernel(
        x, x_stride, in_features, dy, dy_stride, out_features, batch, images, tile, box, box_rows,
        tiles, counts, scale, sizes, out_sizes, item_row, item_column, item_chunk, order, entry_ptr,
        entry_block, entry_shift, origins, pieces, totals, turns, dvalues, stage,
    ):  # fmt: skip
        ring = cuda.shared.array(0, ITEM, ALIGNMENT)  # stages, each a box of x and a tile of dy
        sums = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory, in the end
        rows = cuda.shared.array(TABLES, int32)
        out_rows = cuda.shared.array(OUT_TABLES, int32)
        bases = cuda.shared.array(BM, int32)
        places = cuda.shared.array(ROWS, int64)  # of the pixels of a box
        out_places = cuda.shared.array(BM, int64)  # of the outputs of a tile
        acc = cuda.local.array(ACC, float32)
        shifts = cuda.local.array(PER, int32)
        items = item_row.size
        item, piece = order[cuda.blockIdx.x % items], cuda.blockIdx.x // items
        all_tiles = tiles[0] * tiles[1] * tiles[2] * tiles[3]
        begin, end = all_tiles * piece // pieces, all_tiles * (piece + 1) // pieces
        entry = entry_ptr[item]
        count = entry_ptr[item + 1] - entry
        c, k = item_row[item] * B, item_column[item] * B
        origin = origins[item_chunk[item]]

        # Warps take PER parts of blocks each, and where there are fewer, some rows of a tile.
        t = uint32(cuda.threadIdx.x)
        warp = t // 32
        groups = (count * PARTS + PER - 1) // PER
        slices = WARPS // groups
        group, part = warp % groups, warp // groups
        mine = min(count * PARTS - group * PER, PER) if part < slices else 0
        for p in range(PER):
            shifts[p] = 0
            if p < mine:
                shifts[p] = entry_shift[entry + (group * PER + p) // PARTS]
            for m in range(TA):
                for n in range(TB):
                    for i in range(4):
                        acc[p, m, n, i] = 0
        spread(places, box_rows, images, box)
        spread(out_places, BM, images, tile)
        cuda.syncthreads()
        for m in range(t, BM, THREADS):
            bases[m] = in_box(out_places[m], box)
        half = group * PER % PARTS
        dy_lane = box_rows * B + begin_dy(0, 0)
        zero = (0, 0, 0)
        one = (1, 1, 1)
        now = then = int64(0)
        for step in range(begin - STAGES, end):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if begin <= coming < end:
                table = coming % 2
                fetch_x(x, in_features, c, rows[table], box_rows, ring, then)
                at = then + box_rows * B
                fetch_dy(dy, out_features, k, out_rows[table], BM, ring, at)
                then = then + stage if then + stage < STAGES * stage else 0
            cp_async_commit()
            if coming + 1 < end:  # its rows, for the next step to fetch
                table = (coming + 1) % 2
                image, top = tile_of(coming + 1, images, tile, tiles)
                see(
                    rows[table], places, box_rows, image, batch, top, scale, origin, sizes,
                    x_stride // PIECE,
                )  # fmt: skip
                stand(
                    out_rows[table], out_places, BM, image, batch, top, counts, one, zero,
                    out_sizes, dy_stride // PIECE,
                )  # fmt: skip
            if step >= begin:
                x_start, dy_at = uint32(now), uint32(now + dy_lane)
                if mine > 0:
                    for i in range(part, BM // 16, slices):
                        add_rows(mine, ring, x_start, dy_at, bases, i, shifts, half, acc)
                now = now + stage if now + stage < STAGES * stage else 0

        cp_async_wait(0)
        gather(acc, sums, slices, slices, part, group, mine)
        add(sums, entry_block, entry, count, piece, pieces, totals, turns, item, dvalues)

    return kernel
