"""The weight-gradient: what taps see in a box, transposed, times the tile of dy behind it.

Rows of a product are features of x, as several taps see them; its sum runs over 64 pixels, in
groups of 8 at equal distances, as in `lines`. Teams of threads share the units of an item, and
where there are fewer, the pixels of a tile; their sums are added as they leave shared memory.
"""

from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.conv.boxes import fetch_box, pixel_map, place_of, start_rings, tile_of
from numbsparse.kernels.conv.k4_wgmma.lines import cut_for
from numbsparse.kernels.conv.k4_wgmma.weight_grad_sums import (
    TeamProduct,
    leave_piece,
    pieces_of,
    place_in_block,
    product_of_16_bit,
    product_of_float32,
    sums_into,
)
from numbsparse.kernels.conv.walks import Items, block_items
from numbsparse.kernels.conv.window import SIDE
from numbsparse.kernels.parts.pieces import Added, add_pieces
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.parts.store import KINDS
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    elect,
    fence_tensor_map,
    first_multiple,
    let_next_kernel_start,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    prefetch_tensor_map,
    shfl_idx,
    tma_load_5d,
    wait_for_earlier_kernels,
)


class Shape(NamedTuple):
    """How a block of threads is made; one on a multiprocessor."""

    TEAMS: int  # warpgroups that multiply, or of float32 warps
    UNITS: int  # of a team
    MOST_UNITS: int  # of an item
    STAGES: int
    MOST_ROWS: int  # of a box
    ROWS: int  # pixels of a tile


SHAPES = {  # by the bytes of a value, and the features of a block; larger ones are several
    2: {
        16: Shape(4, 3, 6, 4, 640, 256),
        32: Shape(4, 3, 6, 3, 448, 256),
        64: Shape(4, 2, 3, 2, 448, 256),
    },
    4: {16: Shape(15, 5, 15, 3, 640, 256), 32: Shape(15, 2, 10, 2, 448, 256)},
}
if SIMULATED:
    SHAPES = {
        itemsize: dict.fromkeys(of_size, Shape(2, 2, 4, 2, 384, 128))
        for itemsize, of_size in SHAPES.items()
    }


def part_of(size: int, itemsize: int) -> int:
    """The features of a part of a block that has a shape."""
    return min(size, max(SHAPES[itemsize]))


def weight_grad(x, dy, index, window, dvalues, precision):
    """Returns whether all rows of tiles are outputs, or of no image.

    The others are zeros times pixels of the image, NaN if these are not finite.
    """
    itemsize, batch, dtype = x.itemsize, x.shape[0], x.dtype.name
    size = part_of(dvalues.shape[1], itemsize)
    parts, shape = dvalues.shape[1] // size, SHAPES[itemsize][size]
    of = window.whole("weight_grad")
    how, chunks = cut_for(of, batch, shape, size, itemsize, True)
    if itemsize == 2:
        x, dy, dvalues = (a.view(np.uint16) for a in (x, dy, dvalues))
        product = product_of_16_bit(dtype, size, shape.UNITS, how.group)
    else:
        product = product_of_float32(precision, size, shape.UNITS)
    panels = product.PANELS
    cuts = of, how.box, chunks, panels, parts, shape.MOST_UNITS
    plan = Items(*planned(index, block_items, window.taps, *cuts))
    items = plan.items.shape[0]
    pieces = pieces_of(items, prod(how.tiles), multiprocessors(), dvalues.size)
    sums = sums_into(dvalues, pieces)
    stage = how.rows + shape.ROWS  # lines
    beyond = (panels - 1) * how.rows  # what units with fewer taps may read
    ring = (shape.STAGES * stage + beyond) * itemsize * size
    shared = max(ring, 4 * shape.TEAMS * shape.UNITS * panels * size**2) + 1024
    x_map = pixel_map(x, window.big, how.images, how.box, size, of.view.scale)
    dy_map = pixel_map(dy, window.small, how.images, how.tile, size)
    fresh = max(map(unannounced, (x_map, dy_map)))
    launch(
        item_kernel(dtype, size, parts, shape, product),
        items * pieces, product.THREADS * shape.TEAMS + 32,
        x_map, dy_map, fresh, how, of.view.counts, plan, sums, stage,
        shared_bytes=shared,
        overlap=True,
    )  # fmt: skip
    if pieces > 1:
        n_blocks, B, _ = dvalues.shape
        added = Added(B, B, KINDS.get(dtype), all=True)
        add_pieces(added, (n_blocks, pieces), sums.saved, (), (pieces, n_blocks), sums.result, True)
    return all(n % t == 0 for n, t in zip(of.view.counts, how.tile, strict=True))


@cache
def item_kernel(dtype: str, B: int, PARTS: int, shape: Shape, product: TeamProduct) -> Any:
    TEAMS, UNITS, MOST_UNITS, STAGES, _, BM = shape
    TEAM, STEP, SUMS, ITEM = product.THREADS, product.STEP, product.SUMS, product.item
    STEPS, MOST = BM // STEP, MOST_UNITS * product.PANELS
    PANELS, THREADS, READERS = product.PANELS, TEAMS * TEAM, TEAMS * TEAM // 32
    BARS, FETCHER, SCALE, FINISH = 2 * STAGES, READERS, product.SCALE, product.finish
    START, MULTIPLY = product.start, product.add
    fetch, put = step_fetcher(B, STAGES, product.NBYTES), put_sums(B, product)
    leave = leave_piece(dtype, B, THREADS, PARTS)

    @cuda.jit(**registers(THREADS + 32))
    def kernel(x_map, dy_map, fresh, tiling, counts, plan, sums, stage):
        whole = cuda.shared.array(0, ITEM)
        # Stages, each a box of x and a tile of dy; from where swizzled lines begin.
        ring = whole[first_multiple(whole, uint32(1024)) :]
        gathered = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory, in the end
        bars = cuda.shared.array(BARS, uint64)
        lines = cuda.shared.array(STEPS, uint32)  # where pixels of a tile begin in the box
        kept = cuda.shared.array(MOST, int32)  # blocks of w
        words, own = cuda.local.array(UNITS, uint32), cuda.local.array(SUMS, float32)
        items, tiles = uint32(plan.items.shape[0]), tiling.tiles
        number, piece = uint32(cuda.blockIdx.x) % items, uint32(cuda.blockIdx.x) // items
        # Divisions of 32 bits: one of 64, as loops with such steps have too, takes a call.
        all_tiles, pieces = uint32(tiles[0] * tiles[1] * tiles[2] * tiles[3]), uint32(sums.pieces)
        begin, end = share_of(all_tiles, pieces, piece), share_of(all_tiles, pieces, piece + 1)
        unit = plan.ptr[number]
        count = plan.ptr[number + 1] - unit
        box, p = tiling.box, uint32(cuda.threadIdx.x)
        if p < STEPS:
            n, q = place_of(p * STEP, tiling.tile)
            lines[p] = ((n * box[0] + q[0]) * box[1] + q[1]) * box[2] + q[2]
        start_rings(bars, STAGES, 0, READERS)
        let_next_kernel_start()
        t = uint32(cuda.threadIdx.x)
        warp = shfl_idx(uint32(t // 32), 0)
        team = uint32(warp * 32 // TEAM)
        groups = uint32(uint32(count + UNITS - 1) // uint32(UNITS))
        slices = uint32(uint32(TEAMS) // groups)
        group, part = uint32(team % groups), uint32(team // groups)
        mine = uint32(0)
        if part < slices:
            mine = uint32(min(count - group * UNITS, UNITS))
        acc = START(own)
        if warp == FETCHER:
            mine, part = uint32(0), slices
            c, k = int32(plan.items[number, 0] * B), int32(plan.items[number, 1] * B)
            origin = plan.origins[plan.items[number, 2]]
            if fresh != 0:
                fence_tensor_map(x_map)
                fence_tensor_map(dy_map)
            prefetch_tensor_map(x_map)
            prefetch_tensor_map(dy_map)
            wait_for_earlier_kernels()
            fetch(x_map, dy_map, c, k, begin, end, tiling, origin, ring, stage, bars)
        else:
            if t < count * PANELS:  # while the first tile is under way
                kept[t] = plan.blocks[unit * PANELS + t]
            for u in range(UNITS):
                words[u] = 0
                if u < mine:
                    words[u] = uint32(plan.where[unit + group * UNITS + u] * SCALE)
            tile = tiling.tile
            filled = uint32(tiling.images * tile[0] * tile[1] * tile[2] // STEP)
            at, phase = uint32(0), uint32(0)
            # Which axis steps of 8 pixels go along first: those beyond its end are left out.
            axis, along = (1, tile[1]) if tile[2] == SIDE else (2, tile[2] // SIDE)
            for step in range(begin, end):
                mbarrier_wait(bars, at, phase)
                first, left = uint32(at * stage), along
                if STEP == SIDE:
                    _, top = tile_of(step, tiling)
                    left = counts[axis] - top[axis]
                    left = left if axis == 1 else (left + SIDE - 1) // SIDE
                if mine > 0:
                    p = part
                    while p < filled:
                        if STEP > SIDE or p & (along - 1) < left:
                            x_line = uint32(first + lines[p])
                            dy_line = uint32(first + tiling.rows + p * STEP)
                            acc = MULTIPLY(acc, own, ring, words, x_line, dy_line, mine)
                        p = uint32(p + slices)
                if t % 32 == 0:
                    mbarrier_arrive(bars, STAGES + at)
                at, phase = following(at, phase, STAGES)
        FINISH(acc, own)
        cuda.syncthreads()
        put(own, gathered, uint32((part * count + group * UNITS) * (PANELS * B * B)), mine)
        cuda.syncthreads()
        leave(gathered, slices, kept, count * PANELS, piece, sums)

    return kernel


@cuda.jit(device=True)
def share_of(tiles, pieces, piece):
    """Where the tiles of a piece begin: the first pieces may have one more."""
    each = uint32(tiles // pieces)
    return uint32(each * piece + min(uint32(tiles - each * pieces), uint32(piece)))


@cache
def step_fetcher(B: int, STAGES: int, NBYTES: int) -> Any:
    """Requests the box of x and the tile of dy behind it, of one tile of outputs after another."""

    @cuda.jit(device=True)
    def fetch(x_map, dy_map, c, k, begin, end, tiling, origin, ring, stage, bars):
        tile, box = tiling.tile, tiling.box
        pixels = tiling.images * (box[0] * box[1] * box[2] + tile[0] * tile[1] * tile[2])
        nbytes = uint32(pixels * (NBYTES * B))
        at, phase = uint32(0), uint32(1)
        for step in range(begin, end):
            image, top = tile_of(step, tiling)
            mbarrier_wait(bars, STAGES + at, phase)
            if elect() != 0:
                start = uint32(at * stage * B)
                mbarrier_expect(bars, at, nbytes)
                fetch_box(ring, start, x_map, c, top, tiling, origin, image, bars, at)
                start = uint32(start + tiling.rows * B)
                tma_load_5d(ring, start, dy_map, k, top[2], top[1], top[0], image, bars, at)
            at, phase = following(at, phase, STAGES)

    return fetch


@cache
def put_sums(B: int, product: TeamProduct) -> Any:
    """put(own, sums, at, mine): the `mine` units of a team, from sums[at] on."""
    (UNITS, N, _), UNIT, place = product.SUMS, product.PANELS * B * B, product.place
    in_block = place_in_block(B)

    @cuda.jit(device=True)
    def put(own, sums, at, mine):
        for n in range(N):
            for i in range(4):
                row, column = place(n, i)
                start = uint32(at + row // B * (B * B) + in_block(row % B, column))
                for u in range(UNITS):
                    if u < mine:
                        sums[start + u * UNIT] = own[u, n, i]

    return put
