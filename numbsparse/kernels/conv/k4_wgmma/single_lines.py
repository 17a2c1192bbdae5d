"""forward and input-gradient of float32: `lines`, with rows of a product that threads read.

A lane reads the pixels of its rows wherever they are: so tiles may have any shape.
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.conv.k2_tensor_core.boxes import in_box, spread, tile_of
from numbsparse.kernels.conv.k2_tensor_core.tiles import cut
from numbsparse.kernels.conv.k4_wgmma.copies import box_rows, pixel_map
from numbsparse.kernels.conv.k4_wgmma.rings import Rings, fetcher, start_rings, walker
from numbsparse.kernels.conv.k4_wgmma.schedule import line_items
from numbsparse.kernels.conv.k4_wgmma.singles import add_tap, pixel_of, split_blocks, storer
from numbsparse.kernels.conv.k4_wgmma.tiles import PIXELS
from numbsparse.kernels.conv.walks import planned
from numbsparse.kernels.ptx import (
    bulk_load,
    first_multiple,
    shfl_idx,
)
from numbsparse.kernels.views import span

LARGEST = 32  # features of a block; larger ones are taken as several


class Shape(NamedTuple):
    """A block of threads, one on a multiprocessor."""

    WARPGROUPS: int
    MOST_ROWS: int  # of a box
    rings: Rings

    @property
    def ROWS(self) -> int:
        return PIXELS * self.WARPGROUPS

    @property
    def options(self) -> dict[str, Any]:
        """For cuda.jit: a quarter of a multiprocessor has 16384 registers for its warps."""
        registers = min(16384 // (32 * (self.WARPGROUPS + 1)) // 8 * 8, 248)
        return {} if SIMULATED else {"max_registers": registers}


SHAPES = {16: Shape(4, 640, Rings(3, 8, 2)), 32: Shape(4, 512, Rings(2, 6, 1))}
if SIMULATED:
    SHAPES = {size: Shape(1, 384, Rings(2, 2, 1)) for size in SHAPES}


def multiply_lines(product, x, values, index, window, y, precision):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    size, batch, features = min(values.shape[1], LARGEST), x.shape[0], y.shape[2]
    parts, shape, turned = values.shape[1] // size, SHAPES[size], product == "input_grad"
    sizes, out_sizes = window.big, window.small
    if turned:
        sizes, out_sizes = out_sizes, sizes
    images = split_blocks(values, size, turned)
    for of in window.passes(product):
        how = cut(of, batch, shape.ROWS, max(len(of.taps), 1), shape.MOST_ROWS)
        cuts = of, how.box, how.chunks, prod(how.tiles), multiprocessors(), parts
        plan = planned(index, window, line_items, product, *cuts)
        rows = box_rows(how, 2 * size)
        launch(
            line_kernel(precision, size, shape),
            plan[-1].size - 1, 128 * shape.WARPGROUPS + 32,
            pixel_map(x, sizes, how.images, how.box, size), images, batch,
            how.images, how.tile, how.box, rows, how.tiles, of.counts, of.step, of.first,
            out_sizes, *plan, span(y), features,
            shared_bytes=shape.rings.nbytes(rows, 4 * size, 8 * size * size) + 1024,
        )  # fmt: skip


@cache
def line_kernel(precision: str, B: int, shape: Shape) -> Any:
    WARPGROUPS, BM, SUMS, SLOT = shape.WARPGROUPS, shape.ROWS, B // 2, 2 * B * B
    X_STAGES, W_STAGES, _ = shape.rings
    BARS = 2 * (X_STAGES + W_STAGES)
    fetch = fetcher(B, shape.rings, 4, SLOT, image_fetcher(SLOT))
    walk = walker(shape.rings, SLOT, add_tap(precision, B))
    store, pixel = storer(B), pixel_of(B)

    @cuda.jit(**shape.options)
    def kernel(
        x_map, images_of_w, batch, images, tile, box, x_rows, tiles, counts, step, first, out_sizes,
        unit_ptr, unit_line, unit_other, unit_chunk, entry_ptr, entry_block, entry_shift, origins,
        items, item_ptr, y, features,
    ):  # fmt: skip
        whole = cuda.shared.array(0, float32)
        ring = whole[first_multiple(whole, uint32(1024)) :]  # boxes, then blocks of w
        bars = cuda.shared.array(BARS, uint64)
        places = cuda.shared.array(BM, int64)
        spread(places, BM, images, tile)
        start_rings(bars, X_STAGES, W_STAGES, 4 * WARPGROUPS)
        begin, end = item_ptr[cuda.blockIdx.x], item_ptr[cuda.blockIdx.x + 1]
        t = uint32(cuda.threadIdx.x)
        warp = shfl_idx(uint32(t // 32), 0)
        if warp == 4 * WARPGROUPS:
            cut = (images, tile, box, x_rows, tiles)
            units = (unit_ptr, unit_other, unit_chunk, entry_ptr, entry_block, origins)
            fetch(x_map, images_of_w, items, begin, end, cut, units, ring, bars)
            return
        acc = cuda.local.array(SUMS, float32)
        of = (counts, step, first, out_sizes, features)
        own = warp * 16 + pixel(t % 32 // 4)
        rows = in_box(places[own], box), in_box(places[own + 8], box)
        box_size = uint32(x_rows * B)
        walked = (unit_ptr, entry_ptr, entry_shift)
        at = (uint32(0), uint32(0), uint32(0), uint32(0))
        for item in range(begin, end):
            line = items[item, 1]
            for i in range(SUMS):
                acc[i] = 0
            _, at = walk(None, (acc, rows), walked, line, ring, box_size, bars, at)
            image, top = tile_of(items[item, 0], images, tile, tiles)
            for h in range(2):
                packed = places[own + 8 * h]
                store(acc, y, packed, h, image, batch, top, of, int32(line * B))

    return kernel


@cache
def image_fetcher(SLOT: int) -> Any:
    """(begin, fetch) for blocks of w that are split: gapless, one after another."""

    @cuda.jit(device=True)
    def begin(images):
        pass

    @cuda.jit(device=True)
    def fetch(images, block, ring, start, bars, full):
        source = int64(block) * SLOT
        bulk_load(ring, start, images, source, uint32(4 * SLOT), bars, full)

    return begin, fetch
