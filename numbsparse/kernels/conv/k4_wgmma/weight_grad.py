"""The weight-gradient: what taps see in a box, turned, times the tile of dy behind it.

Rows of a product are features of x, as several taps see them; its sum runs over 64 pixels, which
lie as in `lines`, in groups of 8. Warpgroups share the units of an item, and where there are fewer,
the pieces of a tile; their sums meet in shared memory.

Where items are too few for the GPU, each is cut along the batch. The pieces of an item add to the
same float32 numbers, one after another and always in the same order: each waits for its turn, which
comes soon because all end at the same time.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.conv.k2_tensor_core.boxes import in_box, spread
from numbsparse.kernels.conv.k2_tensor_core.tiles import Cut, cut
from numbsparse.kernels.conv.k4_wgmma.copies import (
    box_rows,
    pixel_map,
    start_ring,
    step_fetcher,
)
from numbsparse.kernels.conv.k4_wgmma.items import tap_items
from numbsparse.kernels.conv.k4_wgmma.lines import KINDS
from numbsparse.kernels.conv.k4_wgmma.sums import gather_units, places_from
from numbsparse.kernels.conv.k4_wgmma.tiles import (
    LARGEST,
    PIXELS,
    group_lines,
    is_filled,
    square_shapes,
)
from numbsparse.kernels.conv.turns import add_in_turn, room_for_turns
from numbsparse.kernels.conv.walks import planned
from numbsparse.kernels.conv.window import Pass, Window
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    Operand,
    first_multiple,
    mbarrier_arrive,
    mbarrier_wait,
    shfl_idx,
    wgmma_units,
    zeros,
)
from numbsparse.kernels.views import span

LEAST_TILES = 4  # of a piece


class Shape(NamedTuple):
    """How a block of threads is made; one on a multiprocessor."""

    WARPGROUPS: int
    UNITS: int  # of a warpgroup
    MOST_UNITS: int  # of an item
    STAGES: int
    MOST_ROWS: int  # of a box
    ROWS: int  # pixels of a tile

    @property
    def options(self) -> dict[str, Any]:
        """For cuda.jit: a quarter of a multiprocessor has 16384 registers for its warps."""
        registers = min(16384 // (32 * (self.WARPGROUPS + 1)) // 8 * 8, 248)
        return {} if SIMULATED else {"max_registers": registers}


SHAPES = {
    16: Shape(4, 3, 6, 4, 640, 256),
    32: Shape(4, 3, 6, 3, 448, 256),
    64: Shape(4, 2, 3, 2, 448, 256),
}
if SIMULATED:
    SHAPES = {size: Shape(2, 2, 4, 2, 384, 128) for size in SHAPES}


def fits(batch: int, window: Window, size: int) -> bool:
    """Whether tiles are mostly filled."""
    (of,), shape = window.passes("weight_grad"), SHAPES[min(size, LARGEST)]
    return is_filled(cut_for(of, batch, shape), shape.ROWS, of, batch)


def cut_for(of: Pass, batch: int, shape: Shape) -> Cut:
    return cut(of, batch, shape.ROWS, len(of.taps), shape.MOST_ROWS, square_shapes)


def weight_grad(x, dy, index, window, dvalues):
    """Gives whether tiles were filled by outputs: see `Cut.fills`."""
    size, batch, dtype = min(dvalues.shape[1], LARGEST), x.shape[0], x.dtype.name
    parts, shape = dvalues.shape[1] // size, SHAPES[size]
    x, dy, dvalues = (a.view(np.uint16) for a in (x, dy, dvalues))
    (of,) = window.passes("weight_grad")
    how = cut_for(of, batch, shape)
    cuts = of, how.box, how.chunks, size, parts, shape.MOST_UNITS
    plan = planned(index, window, tap_items, *cuts)
    items, tiles = plan[0].shape[0], prod(how.tiles)
    pieces = pieces_of(items, tiles)
    totals, turns = room_for_turns(pieces, items, dvalues.size)
    rows = box_rows(how, size)
    stage = (rows + shape.ROWS) * size
    taps = shape.MOST_UNITS * (PIXELS // size)
    beyond = (PIXELS // size - 1) * how.rows * 2 * size  # what units of fewer taps may read
    shared = max(2 * shape.STAGES * stage + beyond, 4 * taps * size * size) + 1024
    launch(
        item_kernel(dtype, size, parts, shape, group_lines(how)),
        items * pieces, 128 * shape.WARPGROUPS + 32,
        pixel_map(x, window.big, how.images, how.box, size),
        pixel_map(dy, window.small, how.images, how.tile, size),
        how.images, how.tile, how.box, rows, how.tiles, *plan, pieces, totals, turns, span(dvalues),
        stage, shared_bytes=shared,
    )  # fmt: skip
    return how.fills(of, how.images * prod(how.tile))


@lru_cache(maxsize=1024)
def pieces_of(items: int, tiles: int) -> int:
    """Into how many pieces each item is cut along the batch, so that all end soonest."""
    turn = 2.5  # times as long as a tile

    def time(pieces: int) -> float:
        waves = -(-items * pieces // multiprocessors())
        return waves * -(-tiles // pieces) + turn * pieces

    return min(range(1, max(1, tiles // LEAST_TILES) + 1), key=time)


@cache
def item_kernel(dtype: str, B: int, PARTS: int, shape: Shape, GROUP: int) -> Any:
    WARPGROUPS, UNITS, _, STAGES, _, BM = shape
    LINE, PANELS, COUNT = 2 * B, PIXELS // B, UNITS * B // 2
    ROW16, BARS, THREADS = LINE // 16, 2 * STAGES, 128 * WARPGROUPS
    x_operand = Operand(LINE, 0, True, GROUP * LINE)
    dy_operand = Operand(LINE, 0, True)
    multiply = wgmma_units(KINDS[dtype], UNITS, (B,), PIXELS // 16, x_operand, dy_operand)
    start_from, placed, fetch = zeros(COUNT), places_from(0, UNITS), step_fetcher(B, STAGES)
    gather, add = gather_units(B, UNITS), add_in_turn(dtype, B, THREADS, PARTS)

    @cuda.jit(**shape.options)
    def kernel(
        x_map, dy_map, images, tile, box, x_rows, tiles, item, unit_ptr, unit_where, unit_blocks,
        origins, pieces, totals, turns, dvalues, stage,
    ):  # fmt: skip
        whole = cuda.shared.array(0, uint16)
        # Stages, each a box of x and a tile of dy; from where swizzled lines begin.
        ring = whole[first_multiple(whole, uint32(1024)) :]
        sums = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory, in the end
        bars = cuda.shared.array(BARS, uint64)
        places = cuda.shared.array(BM, int64)
        words = cuda.local.array(UNITS, uint32)
        items = uint32(item.shape[0])
        number, piece = uint32(cuda.blockIdx.x) % items, uint32(cuda.blockIdx.x) // items
        all_tiles = tiles[0] * tiles[1] * tiles[2] * tiles[3]
        begin, end = all_tiles * piece // pieces, all_tiles * (piece + 1) // pieces
        unit = unit_ptr[number]
        count = unit_ptr[number + 1] - unit
        spread(places, BM, images, tile)
        start_ring(bars, STAGES, 4 * WARPGROUPS)
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
            c, k = int32(item[number, 0] * B), int32(item[number, 1] * B)
            cut, origin = (images, tile, box, x_rows, tiles), origins[item[number, 2]]
            fetch((x_map, dy_map), (c, k), begin, end, cut, origin, ring, stage, bars)
        else:
            for u in range(UNITS):
                words[u] = 0
                if u < mine:
                    where = unit_where[unit + group * UNITS + u]
                    words[u] = uint32((where & 0xFFFF) * ROW16 | (where >> 16) * ROW16 << 16)
            filled = uint32(images * tile[0] * tile[1] * tile[2] // PIXELS)
            at, phase = uint32(0), uint32(0)
            for _ in range(begin, end):
                mbarrier_wait(bars, at, phase)
                start = uint32(at * stage // 8)
                if mine > 0:
                    for p in range(part, filled, slices):
                        x_at = uint32(start + in_box(places[p * PIXELS], box) * ROW16)
                        dy_at = uint32(start + (x_rows + p * PIXELS) * ROW16)
                        acc = multiply(acc, ring, 0, placed(words, x_at, dy_at), mine)
                if t % 32 == 0:
                    mbarrier_arrive(bars, STAGES + at)
                at, phase = following(at, phase, STAGES)
        gather(acc, sums, slices, group, part, mine)
        first, count = unit * PANELS, count * PANELS
        add(sums, unit_blocks, first, count, piece, pieces, totals, turns, number, dvalues)

    return kernel
