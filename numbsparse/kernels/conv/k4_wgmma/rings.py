"""What the copy engine fetches, and the rings in shared memory that hold it: who fills, who reads.

Boxes of pixels have a ring. In forward and input-gradient blocks of w have another one: for a box
there are as many blocks as a line keeps taps of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.conv.boxes import tile_of
from numbsparse.kernels.conv.window import Three
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    tma_load_5d,
)


class Rings(NamedTuple):
    """Stages of boxes, and stages of W_TAPS blocks of w."""

    X_STAGES: int
    W_STAGES: int
    W_TAPS: int

    def nbytes(self, rows: int, line: int, slot: int) -> int:
        """Of boxes of so many rows, with so many bytes of a row and of a block of w."""
        return self.X_STAGES * rows * line + self.W_STAGES * self.W_TAPS * slot


def pixel_map(x: DeviceArray, sizes: Three, images: int, box: Three, B: int) -> DeviceArray:
    """The map of images (batch, pixels, features) for boxes of B features of some images."""
    whole = x.reshape(x.shape[0], *sizes, x.shape[2])
    return tensor_map(whole, (images, *box, B), x.itemsize * B)


@cuda.jit(device=True)
def start_rings(bars, x_stages, w_stages, consumers):
    """Barriers of each ring, the boxes' first: a stage is full; it is empty, as consumers say."""
    if cuda.threadIdx.x == 0:
        for s in range(x_stages):
            mbarrier_init(bars, s, uint32(1))
            mbarrier_init(bars, x_stages + s, uint32(consumers))
        for s in range(2 * x_stages, 2 * x_stages + w_stages):
            mbarrier_init(bars, s, uint32(1))
            mbarrier_init(bars, w_stages + s, uint32(consumers))
        fence_mbarrier_init()
    cuda.syncthreads()


@cache
def fetcher(B: int, rings: Rings, ITEM: int, SLOT: int, of_w: Any) -> Any:
    """Asks for the box of each unit, and for the blocks of w that are multiplied by it.

    Items have ITEM bytes, and a block of w SLOT of them; `of_w` is (begin, fetch_block).
    """
    X_STAGES, W_STAGES, W_TAPS = rings
    W_FULL = 2 * X_STAGES
    begin_w, fetch_block = of_w

    @cuda.jit(device=True)
    def fetch(x_map, w, first, last_item, tiling, units, schedule, ring, bars):
        box, items = tiling.box, schedule.items
        fence_tensor_map(x_map)
        begin_w(w)
        box_bytes = uint32(tiling.images * box[0] * box[1] * box[2] * (ITEM * B))
        w_ring = uint32(X_STAGES * tiling.rows * B)
        x_at, x_phase, w_at, w_phase = uint32(0), uint32(1), uint32(0), uint32(1)
        for item in range(first, last_item):
            image, top = tile_of(items[item, 0], tiling)
            line = items[item, 1]
            for unit in range(units.ptr[line], units.ptr[line + 1]):
                entry, last = uint32(units.entry_ptr[unit]), uint32(units.entry_ptr[unit + 1])
                if entry < last:
                    origin, c = units.origins[units.chunk[unit]], int32(units.other[unit] * B)
                    mbarrier_wait(bars, X_STAGES + x_at, x_phase)
                    if elect() != 0:
                        start = uint32(x_at * tiling.rows * B)
                        mbarrier_expect(bars, x_at, box_bytes)
                        fetch_box(ring, start, x_map, c, top, origin, image, bars, x_at)
                    x_at, x_phase = following(x_at, x_phase, X_STAGES)
                while entry < last:
                    stop, full = uint32(min(entry + W_TAPS, last)), uint32(W_FULL + w_at)
                    mbarrier_wait(bars, full + W_STAGES, w_phase)
                    if elect() != 0:
                        mbarrier_expect(bars, full, uint32((stop - entry) * (ITEM * SLOT)))
                        start = uint32(w_ring + w_at * (W_TAPS * SLOT))
                        for k in range(entry, stop):
                            fetch_block(w, units.block[k], ring, start, bars, full)
                            start = uint32(start + SLOT)
                    entry = stop
                    w_at, w_phase = following(w_at, w_phase, W_STAGES)

    return fetch


@cuda.jit(device=True)
def fetch_box(ring, start, x_map, c, top, origin, image, bars, full):
    """Features from c on of the box that a chunk of taps sees from the output `top`."""
    z, y, x = int32(top[0] + origin[0]), int32(top[1] + origin[1]), int32(top[2] + origin[2])
    tma_load_5d(ring, start, x_map, c, x, y, z, image, bars, full)


@cache
def walker(rings: Rings, SLOT: int, add: Any) -> Any:
    """Reads what `fetch` asks for: multiplies the box of each unit by its blocks of w.

    `add(acc, ring, x_place, shift, w_place, own)` gives the sums with a tap added, or adds it to an
    array in `own` and gives None. Places, and the sizes `box` and SLOT, are in its own measure.
    `at` is where a warp is in the rings.
    """
    X_STAGES, W_STAGES, W_TAPS = rings
    W_FULL = 2 * X_STAGES

    @cuda.jit(device=True)
    def walk(acc, own, units, line, ring, box, bars, at):
        x_at, x_phase, w_at, w_phase = at
        w_ring, first_lane = uint32(X_STAGES * box), cuda.threadIdx.x % 32 == 0
        for unit in range(units.ptr[line], units.ptr[line + 1]):
            entry, last = uint32(units.entry_ptr[unit]), uint32(units.entry_ptr[unit + 1])
            if entry < last:
                coming = units.shift[entry]
                mbarrier_wait(bars, x_at, x_phase)
                x_place = uint32(x_at * box)
                while entry < last:
                    stop = uint32(min(entry + W_TAPS, last))
                    w_place = uint32(w_ring + w_at * (W_TAPS * SLOT))
                    mbarrier_wait(bars, W_FULL + w_at, w_phase)
                    while entry < stop:
                        shift, entry = coming, uint32(entry + 1)
                        if entry < last:  # under way while this tap is multiplied
                            coming = units.shift[entry]
                        acc = add(acc, ring, x_place, shift, w_place, own)
                        w_place = uint32(w_place + SLOT)
                    if first_lane:
                        mbarrier_arrive(bars, W_FULL + W_STAGES + w_at)
                    w_at, w_phase = following(w_at, w_phase, W_STAGES)
                if first_lane:
                    mbarrier_arrive(bars, X_STAGES + x_at)
                x_at, x_phase = following(x_at, x_phase, X_STAGES)
        return acc, (x_at, x_phase, w_at, w_phase)

    return walk


@cache
def step_fetcher(B: int, STAGES: int) -> Any:
    """Asks for the box of x and the tile of dy behind it, of one tile of outputs after another."""

    @cuda.jit(device=True)
    def fetch(x_map, dy_map, c, k, begin, end, tiling, origin, ring, stage, bars):
        tile, box = tiling.tile, tiling.box
        fence_tensor_map(x_map)
        fence_tensor_map(dy_map)
        pixels = tiling.images * (box[0] * box[1] * box[2] + tile[0] * tile[1] * tile[2])
        nbytes = uint32(pixels * (2 * B))
        at, phase = uint32(0), uint32(1)
        for step in range(begin, end):
            image, top = tile_of(step, tiling)
            mbarrier_wait(bars, STAGES + at, phase)
            if elect() != 0:
                start = uint32(at * stage)
                mbarrier_expect(bars, at, nbytes)
                fetch_box(ring, start, x_map, c, top, origin, image, bars, at)
                start = uint32(start + tiling.rows * B)
                tma_load_5d(ring, start, dy_map, k, top[2], top[1], top[0], image, bars, at)
            at, phase = following(at, phase, STAGES)

    return fetch
