"""forward and input-gradient: tiles of outputs times the blocks of w, line after line.

A block of threads has WARPGROUPS of consumers and a producer warp, which requests copies. Each
warpgroup has UNITS pieces of 64 outputs, whose sums stay in registers along a line. Blocks of
threads are persistent, and go from line to line while copies for the next already run.
Boxes and blocks of w have a ring each: for a box there are as many blocks as the line keeps taps of
it.

What differs between 16 bits and float32, where operands are and how y is stored, is in `products`.
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.conv.boxes import fetch_box, pixel_map, spread, start_rings, tile_of
from numbsparse.kernels.conv.k4_wgmma.products import (
    LineProduct,
    output_of,
    product_of_16_bit,
    product_of_float32,
    weight_of,
)
from numbsparse.kernels.conv.walks import Schedule, Units, line_items
from numbsparse.kernels.conv.window import PIXELS, Pass, cut, even_shapes, square_shapes
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    bulk_wait_read,
    elect,
    fence_tensor_map,
    first_multiple,
    let_next_kernel_start,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    shfl_idx,
    wait_for_earlier_kernels,
)


class Shape(NamedTuple):
    """How a block of threads is made: RESIDENT of them on a multiprocessor."""

    WARPGROUPS: int
    UNITS: int  # of a warpgroup
    RESIDENT: int
    MOST_ROWS: int  # of a box
    X_STAGES: int  # of boxes
    W_STAGES: int  # of W_TAPS blocks of w
    W_TAPS: int

    @property
    def ROWS(self) -> int:
        """Outputs of a tile."""
        return PIXELS * self.UNITS * self.WARPGROUPS

    def shared_items(self, box: int, adds: LineProduct) -> int:
        """Of boxes of `box` items, blocks of w, and what warps store y from."""
        w_items = self.W_STAGES * self.W_TAPS * adds.SLOT
        return self.X_STAGES * box + w_items + 4 * self.WARPGROUPS * adds.BUFFER


# By the bytes of a value, and the features of a block; larger ones are taken as several. The first
# one where all tiles run at once, else the last: in longer rings more copies are under way. By the
# last ones ten forward products of 1 to 8 images took 1.12 to 1.5 times as long, without tiles of
# 64 outputs six of 1 to 16 images 1.01 to 1.14 times (H200).
SHAPES: dict[int, dict[int, tuple[Shape, ...]]] = {
    2: {
        16: (Shape(1, 2, 2, 320, 6, 6, 9), Shape(4, 2, 2, 896, 3, 2, 9)),
        32: (
            Shape(1, 1, 2, 256, 4, 3, 9),
            Shape(1, 2, 1, 320, 6, 4, 9),
            Shape(2, 2, 2, 448, 2, 2, 9),
        ),
        64: (
            Shape(1, 1, 2, 160, 3, 6, 1),
            Shape(1, 2, 1, 256, 4, 8, 1),
            Shape(2, 2, 1, 448, 2, 8, 1),
        ),
    },
    4: {
        16: (Shape(2, 1, 1, 320, 6, 8, 2), Shape(4, 1, 1, 640, 3, 8, 2)),
        32: (Shape(2, 1, 1, 256, 4, 8, 1), Shape(4, 1, 1, 512, 2, 6, 1)),
    },
}
if SIMULATED:
    for itemsize, few in ((2, 2), (4, 1)):
        shapes = Shape(1, few, 1, 384, 3, 4, few), Shape(1, few, 1, 384, 2, 2, few)
        SHAPES[itemsize] = dict.fromkeys(SHAPES[itemsize], shapes)


def shape_for(of: Pass, batch: int, itemsize: int, size: int, lines: int) -> Shape:
    """The shape for a pass whose residues have so many lines each, of `size` features."""
    for shape in SHAPES[itemsize][size][:-1]:
        how, _ = cut_for(of, batch, shape, size, itemsize, itemsize == 2)
        items = prod(how.tiles) * prod(of.view.residues) * lines
        if items <= shape.RESIDENT * multiprocessors():
            return shape
    return SHAPES[itemsize][size][-1]


def cut_for(of: Pass, batch: int, shape: Any, size: int, itemsize: int, squares: bool) -> Any:
    """See `cut`; for boxes of `size` features, and tiles of 8 x 8 pixels if in `squares`."""
    how = square_shapes if squares else even_shapes, itemsize * size
    return cut(of, batch, shape.ROWS, max(len(of.taps), 1), shape.MOST_ROWS, *how)


def multiply_lines(product, x, values, index, window, y, precision):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    itemsize, batch, transposed = x.itemsize, x.shape[0], product == "input_grad"
    arithmetic = precision if itemsize == 4 else x.dtype.name
    size = min(values.shape[1], max(SHAPES[itemsize]))
    parts, lines = values.shape[1] // size, -(-y.shape[2] // size)
    if itemsize == 2:
        x, values, y = (a.view(np.uint16) for a in (x, values, y))
    w = weight_of(values, index.block_rows, size, transposed, arithmetic)
    of = window.seeing(product)
    shape = shape_for(of, batch, itemsize, size, lines)
    if arithmetic == "high":  # whose blocks of w are hi alone
        shape = shape._replace(W_TAPS=2 * shape.W_TAPS)
    places = shape.RESIDENT * multiprocessors()
    how, chunks = cut_for(of, batch, shape, size, itemsize, itemsize == 2)
    cuts = of, how.box, chunks, prod(how.tiles), places, parts
    *units, items, ptr = planned(index, line_items, window.taps, product, *cuts)
    if itemsize == 2:
        adds = product_of_16_bit(arithmetic, size, parts, shape.UNITS, how.group, transposed)
    else:
        adds = product_of_float32(arithmetic, size)
    x_map = pixel_map(x, of.view.sizes, how.images, how.box, size, of.view.scale)
    out = output_of(y, of.view, how.tile, size)
    fresh = max(map(unannounced, (x_map, w, out) if itemsize == 2 else (x_map,)))
    launch(
        line_kernel(adds, size, shape, prod(of.view.residues)),
        ptr.size - 1, 128 * shape.WARPGROUPS + 32,
        x_map, w, out, fresh, how, Units(*units), Schedule(items, ptr),
        shared_bytes=itemsize * shape.shared_items(how.rows * size, adds) + 1024,
        overlap=True,
    )  # fmt: skip


@cache
def line_kernel(adds: LineProduct, B: int, shape: Shape, RESIDUES: int) -> Any:
    WARPGROUPS, BM = shape.WARPGROUPS, shape.ROWS
    X_STAGES, W_STAGES, W_TAPS = shape[4:]
    SUMS, BARS, OF_MAPS = adds.SUMS, 2 * (X_STAGES + W_STAGES), adds.NBYTES == 2
    ITEM, PIECE, W_ITEMS = adds.item, 16 // adds.NBYTES, W_STAGES * W_TAPS * adds.SLOT
    begin, start, store = adds.begin, adds.start, adds.store
    fetch, walk = fetcher(B, shape, adds), walker(shape, adds)

    @cuda.jit(**registers(shape.RESIDENT * 128 * (WARPGROUPS + 1)))
    def kernel(x_map, w, y, fresh, tiling, units, schedule):
        whole = cuda.shared.array(0, ITEM)
        # Boxes, blocks of w, and of each warp what it stores; from where swizzled lines begin.
        ring = whole[first_multiple(whole, uint32(1024)) :]
        bars = cuda.shared.array(BARS, uint64)
        places = cuda.shared.array(BM, int64)
        spread(places, BM, tiling.images, tiling.tile)
        start_rings(bars, X_STAGES, W_STAGES, 4 * WARPGROUPS)
        let_next_kernel_start()
        first, last_item = schedule.ptr[cuda.blockIdx.x], schedule.ptr[cuda.blockIdx.x + 1]
        t = uint32(cuda.threadIdx.x)
        warp = shfl_idx(uint32(t // 32), 0)
        if warp == 4 * WARPGROUPS:
            if fresh != 0:
                fence_tensor_map(x_map)
                if OF_MAPS:
                    fence_tensor_map(w)
            fetch(x_map, w, first, last_item, tiling, units, schedule, ring, bars)
            return
        sums = cuda.local.array(SUMS, float32)
        if OF_MAPS and fresh != 0:
            for residue in range(RESIDUES):
                fence_tensor_map(y[residue])
        rows = begin(y, places, warp, t % 32, tiling.box)
        wait_for_earlier_kernels()
        box = uint32(tiling.rows * (B // PIECE))
        buffer = uint32(X_STAGES * tiling.rows * B + W_ITEMS)
        at = (uint32(0), uint32(0), uint32(0), uint32(0))
        for item in range(first, last_item):
            line = schedule.items[item, 1]
            acc, at = walk(start(sums), (sums, rows), units, line, ring, box, bars, at)
            image, top = tile_of(schedule.items[item, 0], tiling)
            residue, column = int32(0), int32(line * B)
            if RESIDUES > 1:
                residue, column = schedule.items[item, 2], int32(schedule.items[item, 3] * B)
            store(acc, sums, y, residue, places, warp, ring, buffer, image, top, column)
        bulk_wait_read()

    return kernel


@cache
def fetcher(B: int, shape: Shape, adds: LineProduct) -> Any:
    """Requests the box of each unit, and for the blocks of w that are multiplied by it.

    What the first ones are is looked up before it waits for earlier kernels.
    """
    X_STAGES, W_STAGES, W_TAPS = shape[4:]
    W_FULL, ITEM, SLOT = 2 * X_STAGES, adds.NBYTES, adds.SLOT
    fetch_block = adds.fetch_block

    @cuda.jit(device=True)
    def fetch(x_map, w, first, last_item, tiling, units, schedule, ring, bars):
        box, items = tiling.box, schedule.items
        box_bytes = uint32(tiling.images * box[0] * box[1] * box[2] * (ITEM * B))
        w_ring = uint32(X_STAGES * tiling.rows * B)
        x_at, x_phase, w_at, w_phase = uint32(0), uint32(1), uint32(0), uint32(1)
        waits = True
        for item in range(first, last_item):
            image, top = tile_of(items[item, 0], tiling)
            line = items[item, 1]
            for unit in range(units.ptr[line], units.ptr[line + 1]):
                entry, last = uint32(units.entry_ptr[unit]), uint32(units.entry_ptr[unit + 1])
                if entry < last:
                    origin, c = units.origins[units.chunk[unit]], int32(units.other[unit] * B)
                    if waits:
                        wait_for_earlier_kernels()
                        waits = False
                    mbarrier_wait(bars, X_STAGES + x_at, x_phase)
                    if elect() != 0:
                        start = uint32(x_at * tiling.rows * B)
                        mbarrier_expect(bars, x_at, box_bytes)
                        fetch_box(ring, start, x_map, c, top, tiling, origin, image, bars, x_at)
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


@cache
def walker(shape: Shape, adds: LineProduct) -> Any:
    """Takes what `fetch` requests: multiplies the box of each unit by its blocks of w.

    `box` is the size of one, in pieces of 16 bytes; `at` is where a warp is in the rings.
    """
    X_STAGES, W_STAGES, W_TAPS = shape[4:]
    W_FULL, SLOT, add = 2 * X_STAGES, adds.SLOT * adds.NBYTES // 16, adds.add

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
