"""forward and input-gradient: tiles of outputs times the blocks of w, line after line.

A block of threads has WARPGROUPS that multiply and a warp that asks for copies. Each warpgroup has
UNITS pieces of 64 outputs, whose sums stay in registers along a line. Boxes and blocks of w come
through two rings: for a box there are as many blocks as the line keeps taps of it. Blocks of
threads stay for the whole launch, and go from line to line while copies for the next already run.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.conv.k2_tensor_core.boxes import in_box, spread, tile_of
from numbsparse.kernels.conv.k2_tensor_core.tiles import Cut, cut
from numbsparse.kernels.conv.k4_wgmma.copies import block_map, box_rows, pixel_map
from numbsparse.kernels.conv.k4_wgmma.rings import (
    Rings,
    block_fetcher,
    fetcher,
    start_rings,
    walker,
)
from numbsparse.kernels.conv.k4_wgmma.schedule import line_items
from numbsparse.kernels.conv.k4_wgmma.store import ROWS, output_map, room_bytes, storer
from numbsparse.kernels.conv.k4_wgmma.tiles import (
    LARGEST,
    PIXELS,
    group_lines,
    is_filled,
    square_shapes,
)
from numbsparse.kernels.conv.walks import planned
from numbsparse.kernels.conv.window import Pass, Window
from numbsparse.kernels.ptx import (
    Operand,
    bulk_wait_read,
    fence_tensor_map,
    first_multiple,
    shfl_idx,
    to_local,
    wgmma_units,
    zeros,
)

UNITS = 2
KINDS = {"float16": "f16", "bfloat16": "bf16"}


class Shape(NamedTuple):
    """How a block of threads is made: RESIDENT of them on a multiprocessor."""

    WARPGROUPS: int
    RESIDENT: int
    MOST_ROWS: int  # of a box
    rings: Rings

    @property
    def ROWS(self) -> int:
        """Outputs of a tile."""
        return PIXELS * UNITS * self.WARPGROUPS

    def shared_bytes(self, rows: int, B: int) -> int:
        """With boxes of so many rows."""
        return (
            self.rings.nbytes(rows, 2 * B, 2 * B * B) + 4 * self.WARPGROUPS * room_bytes(B) + 1024
        )

    @property
    def options(self) -> dict[str, Any]:
        """For cuda.jit: a quarter of a multiprocessor has 16384 registers for its warps."""
        warps = self.RESIDENT * (self.WARPGROUPS + 1)
        return {} if SIMULATED else {"max_registers": min(16384 // (32 * warps) // 8 * 8, 248)}


SHAPES = {
    16: Shape(4, 2, 768, Rings(3, 2, 9)),
    32: Shape(2, 2, 448, Rings(2, 2, 9)),
    64: Shape(2, 1, 448, Rings(2, 8, 1)),
}
if SIMULATED:
    SHAPES = {size: Shape(1, 1, 384, Rings(2, 2, 2)) for size in SHAPES}


def fits(product: str, batch: int, window: Window, size: int) -> bool:
    """Whether tiles are mostly filled by the outputs of each pass."""
    shape = SHAPES[min(size, LARGEST)]
    return all(
        is_filled(cut_for(of, batch, shape), shape.ROWS, of, batch) for of in window.passes(product)
    )


def cut_for(of: Pass, batch: int, shape: Shape) -> Cut:
    return cut(of, batch, shape.ROWS, max(len(of.taps), 1), shape.MOST_ROWS, square_shapes)


def multiply_lines(product, x, values, index, window, y):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    size, dtype, batch = min(values.shape[1], LARGEST), x.dtype.name, x.shape[0]
    parts, shape, turned = values.shape[1] // size, SHAPES[size], product == "input_grad"
    sizes, out_sizes = window.big, window.small
    if turned:
        sizes, out_sizes = out_sizes, sizes
    x, values, y = (a.view(np.uint16) for a in (x, values, y))
    places = shape.RESIDENT * multiprocessors()
    for of in window.passes(product):
        how = cut_for(of, batch, shape)
        cuts = of, how.box, how.chunks, prod(how.tiles), places, parts
        plan = planned(index, window, line_items, product, *cuts)
        rows = box_rows(how, size)
        launch(
            line_kernel(dtype, size, parts, shape, group_lines(how), turned),
            plan[-1].size - 1, 128 * shape.WARPGROUPS + 32,
            pixel_map(x, sizes, how.images, how.box, size), block_map(values, size),
            output_map(y, out_sizes, of, how.tile, size),
            how.images, how.tile, how.box, rows, how.tiles, *plan,
            shared_bytes=shape.shared_bytes(rows, size),
        )  # fmt: skip


@cache
def line_kernel(dtype: str, B: int, PARTS: int, shape: Shape, GROUP: int, turned: bool) -> Any:
    WARPGROUPS, BM, LINE, COUNT = shape.WARPGROUPS, shape.ROWS, 2 * B, UNITS * B // 2
    X_STAGES, W_STAGES, W_TAPS = shape.rings
    BARS = 2 * (X_STAGES + W_STAGES)
    ROW16, SLOT16 = LINE // 16, B * LINE // 16  # pieces of 16 bytes of a row, and of a block
    ROOM, W_ITEMS = room_bytes(B) // 2, W_STAGES * W_TAPS * B * B
    x_operand, w_operand = Operand(LINE, 0, group=GROUP * LINE), Operand(LINE, 0, not turned)
    multiply = wgmma_units(KINDS[dtype], UNITS, (B,), B // 16, x_operand, w_operand)
    start_from, store = zeros(COUNT), storer(dtype, B)
    fetch = fetcher(B, shape.rings, 2, B * B, block_fetcher(B, PARTS))

    @cuda.jit(device=True)
    def add(acc, ring, x_place, shift, w_place, starts):
        at = uint32(x_place + shift * ROW16)
        where = uint32(at + starts[0]), w_place, uint32(at + starts[1]), w_place
        return multiply(acc, ring, 0, where, uint32(UNITS))

    walk = walker(shape.rings, SLOT16, add)

    @cuda.jit(**shape.options)
    def kernel(
        x_map, w_map, y_map, images, tile, box, x_rows, tiles, unit_ptr, unit_line, unit_other,
        unit_chunk, entry_ptr, entry_block, entry_shift, origins, items, item_ptr,
    ):  # fmt: skip
        whole = cuda.shared.array(0, uint16)
        # Boxes, blocks of w, and of each warp what it stores; from where swizzled lines begin.
        ring = whole[first_multiple(whole, uint32(1024)) :]
        bars = cuda.shared.array(BARS, uint64)
        places = cuda.shared.array(BM, int64)
        spread(places, BM, images, tile)
        start_rings(bars, X_STAGES, W_STAGES, 4 * WARPGROUPS)
        first, last_item = item_ptr[cuda.blockIdx.x], item_ptr[cuda.blockIdx.x + 1]
        t = uint32(cuda.threadIdx.x)
        warp = shfl_idx(uint32(t // 32), 0)
        if warp == 4 * WARPGROUPS:
            cut = (images, tile, box, x_rows, tiles)
            units = (unit_ptr, unit_other, unit_chunk, entry_ptr, entry_block, origins)
            fetch(x_map, w_map, items, first, last_item, cut, units, ring, bars)
            return
        fence_tensor_map(y_map)
        sums = cuda.local.array(COUNT, float32)
        own = uint32(warp // 4 * (UNITS * PIXELS))
        starts = (
            uint32(in_box(places[own], box) * ROW16),
            uint32(in_box(places[own + PIXELS], box) * ROW16),
        )
        box16 = uint32(x_rows * ROW16)
        room = uint32(X_STAGES * x_rows * B + W_ITEMS + warp * ROOM)
        walked = (unit_ptr, entry_ptr, entry_shift)
        at = (uint32(0), uint32(0), uint32(0), uint32(0))
        for item in range(first, last_item):
            line = items[item, 1]
            acc, at = walk(start_from(), starts, walked, line, ring, box16, bars, at)
            image, top = tile_of(items[item, 0], images, tile, tiles)
            to_local(acc, sums)
            for u in range(UNITS):
                packed = places[own + u * PIXELS + warp % 4 * ROWS]
                column = int32(line * B)
                store(sums, u * (B // 2), ring, room, y_map, packed, image, top, column)
        bulk_wait_read()

    return kernel
