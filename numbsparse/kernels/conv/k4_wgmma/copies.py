"""What the copy engine brings, and the barriers of the ring that it fills."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.conv.k2_tensor_core.boxes import tile_of
from numbsparse.kernels.conv.k2_tensor_core.tiles import Cut
from numbsparse.kernels.conv.window import Three
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    tma_load_5d,
)


def pixel_map(x: DeviceArray, sizes: Three, images: int, box: Three, B: int) -> DeviceArray:
    """The map of images (batch, pixels, features) for boxes of B features of some images."""
    whole = x.reshape(x.shape[0], *sizes, x.shape[2])
    return tensor_map(whole, (images, *box, B), x.itemsize * B)


def block_map(values: DeviceArray, B: int) -> DeviceArray:
    """The map of blocks (n_blocks, size, size), B x B of one at a time."""
    return tensor_map(values.reshape(-1, values.shape[2]), (B, B), 2 * B)


def box_rows(cut: Cut, B: int) -> int:
    """Rows of a stage that holds a box, up to where swizzled lines repeat."""
    together = max(512 // B, 8)
    return -(-cut.rows // together) * together


@cuda.jit(device=True)
def start_ring(bars, stages, consumers):
    """Barrier s: stage s is full; stages + s: it is empty, as each consumer says."""
    if cuda.threadIdx.x == 0:
        for s in range(stages):
            mbarrier_init(bars, s, uint32(1))
            mbarrier_init(bars, stages + s, uint32(consumers))
        fence_mbarrier_init()
    cuda.syncthreads()


@cache
def step_fetcher(B: int, STAGES: int) -> Any:
    """Asks for the box of x and the tile of dy behind it, of one tile of outputs after another."""

    @cuda.jit(device=True)
    def fetch(maps, features, begin, end, cut, origin, ring, stage, bars):
        (x_map, dy_map), (c, k) = maps, features
        images, tile, box, rows, tiles = cut
        fence_tensor_map(x_map)
        fence_tensor_map(dy_map)
        pixels = images * (box[0] * box[1] * box[2] + tile[0] * tile[1] * tile[2])
        nbytes = uint32(pixels * (2 * B))
        at, phase = uint32(0), uint32(1)
        for step in range(begin, end):
            image, top = tile_of(step, images, tile, tiles)
            z, y = int32(top[0] + origin[0]), int32(top[1] + origin[1])
            x = int32(top[2] + origin[2])
            mbarrier_wait(bars, STAGES + at, phase)
            if elect() != 0:
                start = uint32(at * stage)
                mbarrier_expect(bars, at, nbytes)
                tma_load_5d(ring, start, x_map, c, x, y, z, image, bars, at)
                start = uint32(start + rows * B)
                tma_load_5d(ring, start, dy_map, k, top[2], top[1], top[0], image, bars, at)
            at, phase = following(at, phase, STAGES)

    return fetch
