"""forward and input_grad of float32: `lines`, with a factor that passes through registers.

Four warpgroups multiply 64 rows each. A fifth fetches, and leaves them the registers that this does
not take.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.kernels.matmul.k6_hopper.split_consume import consumer
from numbsparse.kernels.matmul.k6_hopper.split_plan import ALIGNED, BOX, DEPTH, Tile
from numbsparse.kernels.parts.records import walking
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    bulk_load,
    fence_mbarrier_init,
    fence_tensor_map,
    fewer_registers,
    first_multiple,
    mbarrier_expect,
    mbarrier_init,
    more_registers,
    shfl_idx,
    tma_load_2d,
)


@cache
def line_kernel(tile: Tile, precision: str, x_turned: bool, y_turned: bool, wide: bool) -> Any:
    STAGES, BARRIERS, WARPS = tile.STAGES, 2 * tile.STAGES, tile.WARPS
    MORE, FEWER = tile.REGISTERS
    produce = producer(tile, x_turned)
    consume = consumer(tile, precision, x_turned, y_turned, wide)
    options = {} if SIMULATED else {"launch_bounds": (tile.THREADS, 1)}

    @cuda.jit(**options)
    def kernel(
        x_map, images, records, strips, tiles, tile_starts, y, batch, features,
        x, x_strides, in_features, values, w_strides, indptr, indices, blocks,
    ):  # fmt: skip
        whole = cuda.shared.array(0, float32, ALIGNMENT)
        ring = whole[first_multiple(whole, uint32(4 * ALIGNED)) :]
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        masks = cuda.shared.array(STAGES, uint32)  # which strips have an image there
        t = uint32(cuda.threadIdx.x)
        if t == 0:
            for i in range(STAGES):
                mbarrier_init(bars, i, 1)
                mbarrier_init(bars, STAGES + i, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        first, last = tile_starts[cuda.blockIdx.x], tile_starts[cuda.blockIdx.x + 1]
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            fewer_registers(FEWER)
            if warp == WARPS:
                produce(x_map, images, records, tiles, first, last, ring, bars, masks)
        else:
            more_registers(MORE)
            dense = (x, x_strides, in_features, values, w_strides, indptr, indices, blocks)
            out = (y, batch, features)
            consume(warp, strips, tiles, first, last, ring, bars, masks, out, dense)

    return kernel


@cache
def producer(tile: Tile, x_turned: bool) -> Any:
    """The warp that keeps the ring full; how it reads records ahead says the file `produce`."""
    STAGES, STAGE, X_SIZE, IMAGE = tile.STAGES, tile.STAGE, tile.X_SIZE, tile.IMAGE
    RECORD, ROWS = tile.RECORD, tile.ROWS

    @cuda.jit(device=True)
    def issue(x_map, images, step, row, ring, stage, bars, masks):
        mask, count = uint32(0), uint32(0)
        for c in range(RECORD - 1):
            if int32(step[1 + c]) >= 0:
                mask, count = uint32(mask | 1 << c), uint32(count + 1)
        masks[stage] = mask
        mbarrier_expect(bars, stage, uint32(4 * (X_SIZE + count * IMAGE)))
        at, feature = uint32(stage * STAGE), int32(step[0] * DEPTH)
        if x_turned:
            for i in range(ROWS // BOX):
                to = uint32(at + i * (BOX * DEPTH))
                tma_load_2d(ring, to, x_map, int32(row + i * BOX), feature, bars, stage)
        else:
            tma_load_2d(ring, at, x_map, feature, row, bars, stage)
        at = uint32(at + X_SIZE)
        for c in range(RECORD - 1):
            if int32(step[1 + c]) >= 0:
                source = int64(int32(step[1 + c])) * IMAGE
                bulk_load(ring, at, images, source, uint32(4 * IMAGE), bars, stage)
                at = uint32(at + IMAGE)

    @cuda.jit(device=True)
    def ask(step, row, stage, bars, x_map, images, ring, masks):
        issue(x_map, images, step, row, ring, stage, bars, masks)

    walk = walking(RECORD, STAGES, ROWS, ask)

    @cuda.jit(device=True)
    def produce(x_map, images, records, tiles, first, last, ring, bars, masks):
        fence_tensor_map(x_map)
        walk(uint32(0), records, tiles, first, last, bars, x_map, images, ring, masks)

    return produce
