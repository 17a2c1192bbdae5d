"""The weight-gradient: what taps see in a box, transposed, times the tile of dy behind it.

Rows of a product are features of x, as several taps see them; its sum runs over 64 pixels, in
groups of 8 at equal distances, as in `lines`. Warpgroups share the units of an item, and where
there are fewer, the pieces of a tile; their sums are added in shared memory.
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.conv.boxes import (
    fetch_box,
    in_box,
    pixel_map,
    spread,
    start_rings,
    tile_of,
)
from numbsparse.kernels.conv.k4_wgmma.lines import cut_for
from numbsparse.kernels.conv.walks import Items, block_items
from numbsparse.kernels.conv.window import PIXELS
from numbsparse.kernels.parts.calls import unannounced
from numbsparse.kernels.parts.pieces_of_blocks import (
    add_up,
    leave_piece,
    pieces_of,
    sums_into,
)
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.store import KINDS
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    Operand,
    elect,
    fence_tensor_map,
    first_multiple,
    let_next_kernel_start,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    shfl_idx,
    tma_load_5d,
    to_local,
    wait_for_earlier_kernels,
    wgmma_units,
    zeros,
)


class Shape(NamedTuple):
    """How a block of threads is made; one on a multiprocessor."""

    WARPGROUPS: int
    UNITS: int  # of a warpgroup
    MOST_UNITS: int  # of an item
    STAGES: int
    MOST_ROWS: int  # of a box
    ROWS: int  # pixels of a tile


SHAPES = {  # by the features of a block; larger ones are taken as several
    16: Shape(4, 3, 6, 4, 640, 256),
    32: Shape(4, 3, 6, 3, 448, 256),
    64: Shape(4, 2, 3, 2, 448, 256),
}
if SIMULATED:
    SHAPES = {size: Shape(2, 2, 4, 2, 384, 128) for size in SHAPES}


def weight_grad(x, dy, index, window, dvalues):
    """Returns whether all rows of tiles are outputs, or of no image.

    The others are zeros times pixels of the image, NaN if these are not finite.
    """
    size, batch, dtype = min(dvalues.shape[1], max(SHAPES)), x.shape[0], x.dtype.name
    parts, shape = dvalues.shape[1] // size, SHAPES[size]
    x, dy, dvalues = (a.view(np.uint16) for a in (x, dy, dvalues))
    of = window.whole("weight_grad")
    how, chunks = cut_for(of, batch, shape, size)
    cuts = of, how.box, chunks, PIXELS // size, parts, shape.MOST_UNITS
    plan = Items(*planned(index, block_items, window.taps, *cuts))
    items = plan.items.shape[0]
    pieces = pieces_of(items, prod(how.tiles), multiprocessors(), dvalues.size)
    sums = sums_into(dvalues, pieces)
    stage = (how.rows + shape.ROWS) * size
    taps = shape.MOST_UNITS * (PIXELS // size)
    beyond = (PIXELS // size - 1) * how.rows * 2 * size  # what units with fewer taps may read
    shared = max(2 * shape.STAGES * stage + beyond, 4 * taps * size * size) + 1024
    x_map = pixel_map(x, window.big, how.images, how.box, size, of.view.scale)
    dy_map = pixel_map(dy, window.small, how.images, how.tile, size)
    fresh = max(map(unannounced, (x_map, dy_map)))
    launch(
        item_kernel(dtype, size, parts, shape, how.group),
        items * pieces, 128 * shape.WARPGROUPS + 32,
        x_map, dy_map, fresh, how, plan, sums, stage,
        shared_bytes=shared,
        overlap=True,
    )  # fmt: skip
    add_up(dtype, sums)
    return all(n % t == 0 for n, t in zip(of.view.counts, how.tile, strict=True))


@cache
def item_kernel(dtype: str, B: int, PARTS: int, shape: Shape, GROUP: int) -> Any:
    WARPGROUPS, UNITS, _, STAGES, _, BM = shape
    LINE, PANELS, SUMS = 2 * B, PIXELS // B, (UNITS, B // 8, 4)
    ROW16, BARS, THREADS = LINE // 16, 2 * STAGES, 128 * WARPGROUPS
    x_operand = Operand(LINE, 0, True, GROUP * LINE)
    dy_operand = Operand(LINE, 0, True)
    multiply = wgmma_units(KINDS[dtype], UNITS, (B,), PIXELS // 16, x_operand, dy_operand)
    start_from, placed = zeros(UNITS * B // 2), places_from(0, UNITS)
    fetch, gather = step_fetcher(B, STAGES), gather_sums(B, UNITS)
    leave = leave_piece(dtype, B, THREADS, PARTS)

    @cuda.jit(**registers(128 * (WARPGROUPS + 1)))
    def kernel(x_map, dy_map, fresh, tiling, plan, sums, stage):
        whole = cuda.shared.array(0, uint16)
        # Stages, each a box of x and a tile of dy; from where swizzled lines begin.
        ring = whole[first_multiple(whole, uint32(1024)) :]
        gathered = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory, in the end
        bars = cuda.shared.array(BARS, uint64)
        places = cuda.shared.array(BM, int64)
        words = cuda.local.array(UNITS, uint32)
        items, tiles = uint32(plan.items.shape[0]), tiling.tiles
        number, piece = uint32(cuda.blockIdx.x) % items, uint32(cuda.blockIdx.x) // items
        all_tiles = tiles[0] * tiles[1] * tiles[2] * tiles[3]
        begin, end = all_tiles * piece // sums.pieces, all_tiles * (piece + 1) // sums.pieces
        unit = plan.ptr[number]
        count = plan.ptr[number + 1] - unit
        spread(places, BM, tiling.images, tiling.tile)
        start_rings(bars, STAGES, 0, 4 * WARPGROUPS)
        let_next_kernel_start()
        wait_for_earlier_kernels()
        t = uint32(cuda.threadIdx.x)
        warp = shfl_idx(uint32(t // 32), 0)
        groups = uint32((count + UNITS - 1) // UNITS)
        slices = uint32(WARPGROUPS // groups)
        group, part = uint32(warp // 4 % groups), uint32(warp // 4 // groups)
        mine = uint32(0)
        if part < slices:
            mine = uint32(min(count - group * UNITS, UNITS))
        acc = start_from()
        if warp == 4 * WARPGROUPS:
            mine, part = uint32(0), slices
            c, k = int32(plan.items[number, 0] * B), int32(plan.items[number, 1] * B)
            origin = plan.origins[plan.items[number, 2]]
            if fresh != 0:
                fence_tensor_map(x_map)
                fence_tensor_map(dy_map)
            fetch(x_map, dy_map, c, k, begin, end, tiling, origin, ring, stage, bars)
        else:
            for u in range(UNITS):
                words[u] = 0
                if u < mine:
                    where = plan.where[unit + group * UNITS + u]
                    words[u] = uint32((where & 0xFFFF) * ROW16 | (where >> 16) * ROW16 << 16)
            tile = tiling.tile
            filled = uint32(tiling.images * tile[0] * tile[1] * tile[2] // PIXELS)
            at, phase = uint32(0), uint32(0)
            for _ in range(begin, end):
                mbarrier_wait(bars, at, phase)
                start = uint32(at * stage // 8)
                if mine > 0:
                    for p in range(part, filled, slices):
                        x_at = uint32(start + in_box(places[p * PIXELS], tiling.box) * ROW16)
                        dy_at = uint32(start + (tiling.rows + p * PIXELS) * ROW16)
                        acc = multiply(acc, ring, 0, placed(words, x_at, dy_at), mine)
                if t % 32 == 0:
                    mbarrier_arrive(bars, STAGES + at)
                at, phase = following(at, phase, STAGES)
        results = cuda.local.array(SUMS, float32)
        to_local(acc, results)
        gather(results, gathered, slices, part, group, mine)
        first, count = unit * PANELS, count * PANELS
        leave(gathered, plan.blocks, first, count, piece, sums)

    return kernel


@cache
def step_fetcher(B: int, STAGES: int) -> Any:
    """Requests the box of x and the tile of dy behind it, of one tile of outputs after another."""

    @cuda.jit(device=True)
    def fetch(x_map, dy_map, c, k, begin, end, tiling, origin, ring, stage, bars):
        tile, box = tiling.tile, tiling.box
        pixels = tiling.images * (box[0] * box[1] * box[2] + tile[0] * tile[1] * tile[2])
        nbytes = uint32(pixels * (2 * B))
        at, phase = uint32(0), uint32(1)
        for step in range(begin, end):
            image, top = tile_of(step, tiling)
            mbarrier_wait(bars, STAGES + at, phase)
            if elect() != 0:
                start = uint32(at * stage)
                mbarrier_expect(bars, at, nbytes)
                fetch_box(ring, start, x_map, c, top, tiling, origin, image, bars, at)
                start = uint32(start + tiling.rows * B)
                tma_load_5d(ring, start, dy_map, k, top[2], top[1], top[0], image, bars, at)
            at, phase = following(at, phase, STAGES)

    return fetch


@cache
def gather_sums(B: int, UNITS: int) -> Any:
    """gather(acc, sums, slices, part, group, mine): the sums of all warps, one unit after another.

    A unit has 16 rows of each of four warps. Parts 0 to slices - 1 of a group share its units, of
    which there are `mine`: they add to `sums`, in shared memory, in their order.
    """

    @cuda.jit(device=True)
    def gather(acc, sums, slices, part, group, mine):
        t = uint32(cuda.threadIdx.x)
        own = t // 32 % 4 * 16 + t % 32 // 4  # row, in a unit
        for s in range(slices):
            cuda.syncthreads()
            if s == part:
                for u in range(UNITS):
                    if u < mine:
                        for n in range(B // 8):
                            for i in range(4):
                                row = uint32((group * UNITS + u) * PIXELS + own + i // 2 * 8)
                                at = uint32(row * B + 8 * n + t % 4 * 2 + i % 2)
                                if s == 0:
                                    sums[at] = acc[u, n, i]
                                else:
                                    sums[at] += acc[u, n, i]
        cuda.syncthreads()

    return gather


def places_from(u: int, units: int) -> Any:
    """The places of both operands of the units from u on, as a tuple of two words for each."""

    rest = places_from(u + 1, units) if u + 1 < units else no_places

    @cuda.jit(device=True)
    def placed(words, x_at, dy_at):
        return uint32(words[u] + x_at), dy_at, *rest(words, x_at, dy_at)

    return placed


@cuda.jit(device=True)
def no_places(words, x_at, dy_at):
    return ()
