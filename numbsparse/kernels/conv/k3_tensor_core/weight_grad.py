"""The weight-gradient: what a chunk of taps sees in a box, times the tile of dy behind it."""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.conv.boxes import (
    fetch_rows,
    find_outputs,
    find_pixels,
    in_box,
    rows_of,
    spread,
    tile_of,
)
from numbsparse.kernels.conv.k3_tensor_core.products import box_product
from numbsparse.kernels.conv.walks import Items, block_items
from numbsparse.kernels.conv.window import cut
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.parts.fragments import PIECE, coordinates
from numbsparse.kernels.parts.pieces import clear
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.turns import add_in_turn, pieces_of, sums_into
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait

TILE = 32 if SIMULATED else 128  # outputs
STAGES = 3
PER_SM = 2  # blocks of threads that a multiprocessor holds


class Shape(NamedTuple):
    """Of a block of threads; a warp sums PER taps, or a half of each, in up to 96 registers."""

    taps: int  # of an item
    ROWS: int  # of a box
    WARPS: int
    PER: int


SHAPES = {16: Shape(9, 512, 6, 3), 32: Shape(9, 384, 6, 3), 64: Shape(3, 256, 6, 1)}
if SIMULATED:
    SHAPES = {16: Shape(9, 512, 3, 3), 32: Shape(9, 384, 3, 3), 64: SHAPES[64]}


def weight_grad(x, dy, index, window, dvalues):
    """Returns whether outputs filled all tiles: see `Cut.fills`."""
    size, batch = dvalues.shape[1], x.shape[0]
    if not dvalues.size:
        return True
    if not batch:
        fill(dvalues, 0.0)
        return True
    shape, dtype = SHAPES[size], x.dtype.name
    x, dy, dvalues = (a.view(np.uint16) for a in (x, dy, dvalues))
    x, dy = rows_of(x), rows_of(dy)
    (of,) = window.passes("weight_grad")
    how = cut(of, batch, TILE, shape.taps, shape.ROWS)
    items = Items(*planned(index, block_items, window.taps, of, how.box, how.chunks))
    n = items.items.shape[0]
    pieces = pieces_of(n, prod(how.tiles), PER_SM * multiprocessors())
    stage = (how.rows + TILE) * size
    shared = max(STAGES * stage * dvalues.itemsize, 4 * shape.taps * size * size)
    launch(
        item_kernel(dtype, size, TILE), n * pieces, 32 * shape.WARPS,
        x, dy, batch, how.tiling(), window.view("weight_grad", of), items,
        sums_into(dvalues, n, pieces), stage,
        shared_bytes=shared,
    )  # fmt: skip
    return how.fills(of, TILE)


@cache
def item_kernel(dtype: str, B: int, BM: int) -> Any:
    _, ROWS, WARPS, PER = SHAPES[B]
    THREADS, HEIGHT = 32 * WARPS, min(B, 32)  # of the part of a block that a warp sums at once
    TA, TB, PARTS = HEIGHT // 16, B // 8, B // HEIGHT
    AHEAD, PENDING, ACC = STAGES - 1, STAGES - 2, (PER, TA, TB, 4)
    TABLES, OUT_TABLES = (2, ROWS), (2, BM)
    place_in, begin_dy, add_rows = box_product(dtype, B, PER)
    fetch = fetch_rows(B, THREADS, PIECE, place_in)
    gather, clear_sums = gather_sums(dtype, B, PER, TA, 1), clear(TA, TB)
    add = add_in_turn(dtype, B, THREADS)

    @cuda.jit(**registers(PER_SM * THREADS))
    def kernel(x, dy, batch, tiling, view, items, sums, stage):
        ring = cuda.shared.array(0, uint16, ALIGNMENT)  # stages, each a box of x and a tile of dy
        whole = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory, in the end
        rows = cuda.shared.array(TABLES, int32)
        out_rows = cuda.shared.array(OUT_TABLES, int32)
        bases = cuda.shared.array(BM, int32)
        places = cuda.shared.array(ROWS, int64)  # of the pixels of a box
        out_places = cuda.shared.array(BM, int64)  # of the outputs of a tile
        acc = cuda.local.array(ACC, float32)
        shifts = cuda.local.array(PER, int32)
        n_items = items.items.shape[0]
        item = cuda.blockIdx.x % n_items
        piece, tiles = cuda.blockIdx.x // n_items, tiling.tiles
        all_tiles = tiles[0] * tiles[1] * tiles[2] * tiles[3]
        begin, end = all_tiles * piece // sums.pieces, all_tiles * (piece + 1) // sums.pieces
        entry = items.ptr[item]
        count = items.ptr[item + 1] - entry
        c, k = items.items[item, 0] * B, items.items[item, 1] * B
        origin = items.origins[items.items[item, 2]]

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
                shifts[p] = items.where[entry + (group * PER + p) // PARTS]
            clear_sums(acc[p])
        spread(places, tiling.rows, tiling.images, tiling.box)
        spread(out_places, BM, tiling.images, tiling.tile)
        cuda.syncthreads()
        for m in range(t, BM, THREADS):
            bases[m] = in_box(out_places[m], tiling.box)
        half = group * PER % PARTS
        dy_lane = tiling.rows * B + begin_dy(0, 0)
        now = then = int64(0)
        for step in range(begin - STAGES, end):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if begin <= coming < end:
                table = coming % 2
                fetch(x, c, rows[table], tiling.rows, ring, then)
                at = then + tiling.rows * B
                fetch(dy, k, out_rows[table], BM, ring, at)
                then = then + stage if then + stage < STAGES * stage else 0
            cp_async_commit()
            if coming + 1 < end:  # its rows, for the next step to fetch
                table = (coming + 1) % 2
                image, top = tile_of(coming + 1, tiling)
                find_pixels(
                    rows[table], places, tiling.rows, image, batch, top, view, origin,
                    x.stride // PIECE,
                )  # fmt: skip
                find_outputs(
                    out_rows[table], out_places, BM, image, batch, top, view, dy.stride // PIECE
                )
            if step >= begin:
                x_start, dy_at = uint32(now), uint32(now + dy_lane)
                if mine > 0:
                    for i in range(part, BM // 16, slices):
                        add_rows(mine, ring, x_start, dy_at, bases, i, shifts, half, acc)
                now = now + stage if now + stage < STAGES * stage else 0

        cp_async_wait(0)
        gather(acc, whole, slices, part, group, mine)
        add(whole, items.blocks, entry, count, piece, item, sums)

    return kernel


@cache
def gather_sums(dtype: str, B: int, UNITS: int, TA: int, WARPS: int) -> Any:
    """gather(acc, sums, slices, part, group, mine): the sums of all warps, one unit after another.

    A unit has 16 TA rows of each of WARPS. Parts 0 to slices - 1 of a group share its units, of
    which there are `mine`: they add to `sums`, in shared memory, in their order.
    """
    TB, HEIGHT = B // 8, 16 * TA * WARPS
    row_in, column_in = coordinates(dtype, 2 * TA), coordinates(dtype, TB)

    @cuda.jit(device=True)
    def gather(acc, sums, slices, part, group, mine):
        t = uint32(cuda.threadIdx.x)
        g, q, top = t % 32 // 4, t % 4, t // 32 % WARPS * (16 * TA)
        for s in range(slices):
            cuda.syncthreads()
            if s == part:
                for u in range(UNITS):
                    if u < mine:
                        first = uint32((group * UNITS + u) * HEIGHT + top)
                        for m in range(TA):
                            for n in range(TB):
                                for i in range(4):
                                    row = uint32(first + row_in(2 * m + i // 2, g))
                                    at = uint32(row * B + column_in(n, 2 * q + i % 2))
                                    if s == 0:
                                        sums[at] = acc[u, m, n, i]
                                    else:
                                        sums[at] += acc[u, m, n, i]
        cuda.syncthreads()

    return gather
