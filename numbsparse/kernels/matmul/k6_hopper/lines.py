"""forward and input_grad: y = x @ w down the block columns of w, or of w.T along its block rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint8, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import BYTES, aligned, aligned_either_way
from numbsparse.kernels.matmul.k6_hopper.consume import consumer
from numbsparse.kernels.matmul.k6_hopper.produce import producer, w_box, x_box
from numbsparse.kernels.matmul.k6_hopper.steps import schedule, steps_of
from numbsparse.kernels.matmul.k6_hopper.store import ANY, FEATURES, ROWS, y_box
from numbsparse.kernels.matmul.k6_hopper.tile import ALIGNED, Tile, line_tiles
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import (
    cluster_sync,
    fence_mbarrier_init,
    first_multiple,
    mbarrier_init,
    shfl_idx,
)
from numbsparse.kernels.views import span


def along_lines(x: Any, values: Any, index: Any, y: Any, turned: bool, number: int) -> None:
    """y = x @ w; turned, y = x @ w.T; with the tile of this number."""
    (batch, features), (n_blocks, size, _) = y.shape, values.shape
    if batch == 0 or features == 0:
        return
    if n_blocks == 0:
        fill(y, 0)
        return
    tile, edge = line_tiles(size, batch)[number], x.shape[1] % size
    values = aligned(values.reshape(n_blocks, -1)).reshape(values.shape)
    (x, x_turned), y_lies = aligned_either_way(x), how_it_lies(y)
    maps = maps_of(x, x_turned, values, edge, turned, tile)
    y_map = maps[0] if y_lies == ANY else map_of_y(y, y_lies, tile)

    units = multiprocessors() // tile.CLUSTER  # clusters that run at once
    row_tiles = -(-batch // (tile.ROWS * tile.CLUSTER))
    records, lines, lengths = planned(index, steps_of, turned, tile, edge > 0)
    tiles, tile_starts = planned(index, schedule, lengths, row_tiles, units)
    kind = "f16" if str(x.dtype) == "float16" else "bf16"
    kernel = line_kernel(tile, kind, turned, x_turned, edge > 0, y_lies)
    strides = (stride // y.itemsize for stride in y.strides)
    launch(
        kernel,
        (len(tile_starts) - 1) * tile.CLUSTER,
        tile.THREADS,
        *maps,
        y_map,
        records,
        lines,
        tiles,
        tile_starts,
        span(y).view(np.uint16),
        *strides,
        batch,
        features,
        shared_bytes=tile.SHARED_BYTES,
        cluster=(tile.CLUSTER,) if tile.CLUSTER > 1 else None,
    )


def maps_of(
    x: DeviceArray, x_turned: bool, values: DeviceArray, edge: int, turned: bool, tile: Tile
) -> tuple[DeviceArray, DeviceArray, DeviceArray]:
    """The maps of x, of w, and of w with nothing beyond the edge along the sum."""
    box = w_box(tile, turned)
    x_map = tensor_map(x, x_box(tile, x_turned), 128 if x_turned else 2 * tile.DEPTH)
    w_map = tensor_map(values, box, 2 * box[-1])
    if edge == 0:
        return x_map, w_map, w_map
    inside = values[:, :, :edge] if turned else values[:, :edge]
    return x_map, w_map, tensor_map(inside, box, 2 * box[-1])


def map_of_y(y: DeviceArray, y_lies: str, tile: Tile) -> DeviceArray:
    box = y_box(tile, y_lies)
    return tensor_map(y.T if y_lies == FEATURES else y, box, 2 * box[1])


def how_it_lies(y: DeviceArray) -> str:
    """In which direction y takes whole pieces of 16 bytes."""
    for lies, view in ((ROWS, y), (FEATURES, y.T)):
        if view.is_contiguous and view.shape[1] * y.itemsize % BYTES == 0 == y.address % BYTES:
            return lies
    return ANY


@cache
def line_kernel(
    tile: Tile, kind: str, turned: bool, x_turned: bool, ragged: bool, y_lies: str
) -> Any:
    STAGES, BARRIERS, WARPS, CLUSTER = tile.STAGES, 2 * tile.STAGES, tile.WARPS, tile.CLUSTER
    MASKS, WORDS = tile.MASKS, tile.MASKS + STAGES
    produce = producer(tile, turned, x_turned, ragged)
    consume = consumer(tile, kind, turned, x_turned, y_lies)

    @cuda.jit(**tile.options)
    def kernel(
        x_map,
        w_map,
        edge_map,
        y_map,
        records,
        lines,
        tiles,
        tile_starts,
        values,
        row_stride,
        column_stride,
        batch,
        features,
    ):
        shared = cuda.shared.array(0, uint8)
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        info = cuda.shared.array(WORDS, uint32)  # masks, for each share those of all stages; zeros
        base = first_multiple(shared, ALIGNED)
        t = uint32(cuda.threadIdx.x)
        if t == 0:
            for i in range(STAGES):
                mbarrier_init(bars, i, 1)
                mbarrier_init(bars, STAGES + i, WARPS * CLUSTER)
                info[MASKS + i] = uint32(0)
            fence_mbarrier_init()
        cuda.syncthreads()
        if CLUSTER > 1:
            cluster_sync()
        unit = cuda.blockIdx.x // CLUSTER
        first, last = tile_starts[unit], tile_starts[unit + 1]
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            fetcher, maps = uint32(warp - WARPS), (x_map, w_map, edge_map)
            produce(fetcher, maps, records, tiles, first, last, shared, base, bars, info)
        else:
            y = (y_map, values, row_stride, column_stride, batch, features)
            consume(lines, tiles, first, last, shared, base, bars, info, y)
        if CLUSTER > 1:
            cluster_sync()  # the others may still arrive at barriers here

    return kernel
