"""forward and input_grad: y = x @ w down the block columns of w, or of w.T along its block rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, uint8, uint32, uint64

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned, aligned_either_way
from numbsparse.kernels.matmul.k6_hopper.consume import consumer
from numbsparse.kernels.matmul.k6_hopper.produce import Y, image_kernel, producer, w_box, x_box
from numbsparse.kernels.matmul.k6_hopper.steps import steps_of
from numbsparse.kernels.matmul.k6_hopper.tile import ALIGNED, Tile, line_tiles
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.store import ANY, FEATURES, box_of, order_of
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cluster_sync,
    fence_mbarrier_init,
    fewer_registers,
    first_multiple,
    mbarrier_init,
    more_registers,
    shfl_idx,
)
from numbsparse.kernels.views import span
from numbsparse.layout import Index

KINDS = {"float16": "f16", "bfloat16": "bf16"}
TOGETHER = 2  # tiles of rows of float32 that meet a block of w one after another, in the L2 cache
THREADS_OF_IMAGES = 256


def along_lines(
    x: DeviceArray,
    values: DeviceArray,
    index: Index,
    y: DeviceArray,
    transposed: bool,
    precision: str,
    number: int | None,
) -> None:
    """y = x @ w, or x @ w.T; with the tile of this number."""
    (batch, features), (n_blocks, size, _) = y.shape, values.shape
    if batch == 0 or features == 0:
        return
    if n_blocks == 0:
        fill(y, 0)
        return
    kind = KINDS.get(str(x.dtype))
    tile = line_tiles(size, batch, features, x.itemsize)[number or 0]
    values = aligned(values.reshape(n_blocks, -1)).reshape(values.shape)
    (lines, x_transposed), order = aligned_either_way(x), order_of(y)
    ragged = kind is not None and x.shape[1] % size > 0  # float32's images are zero there

    units = multiprocessors() // tile.CLUSTER  # clusters that run at once
    row_tiles = -(-batch // (tile.ROWS * tile.CLUSTER))
    records, strips, lengths = planned(index, steps_of, transposed, tile, ragged)
    together = 1 if kind else TOGETHER
    tiles, tile_starts = planned(index, schedule, lengths, row_tiles, units, together)
    plan = records, strips, tiles, tile_starts
    sizes = (*(stride // y.itemsize for stride in y.strides), batch, features)
    if kind:
        maps = maps_of(lines, x_transposed, values, x.shape[1] % size, transposed, y, order, tile)
        kernel = kernel_of_16_bit(tile, kind, transposed, x_transposed, ragged, order)
        args: tuple[Any, ...] = maps, *plan, span(y).view(np.uint16), sizes
    else:
        maps = tensor_maps((lines, x_box(tile, x_transposed), 4 * tile.DEPTH))
        images = images_of(tile, values, index, transposed, x.shape[1], x_transposed)
        kernel = kernel_of_float32(tile, precision, transposed, x_transposed, order)
        x = lines.T if x_transposed else lines
        walk, strides = index.rows if transposed else index.columns, x.strides
        dense = span(x), (strides[0] // 4, strides[1] // 4), x.shape[1], span(values)
        args = maps, images, *plan, span(y), sizes, *dense, w_strides(size, transposed), *walk
    launch(
        kernel,
        (len(tile_starts) - 1) * tile.CLUSTER,
        tile.THREADS,
        *args,
        shared_bytes=tile.SHARED_BYTES,
        cluster=(tile.CLUSTER,) if tile.CLUSTER > 1 else None,
    )


def maps_of(
    x: DeviceArray,
    x_transposed: bool,
    values: DeviceArray,
    edge: int,
    transposed: bool,
    y: DeviceArray,
    order: str,
    tile: Tile,
) -> DeviceArray:
    """The maps of x, of w, of w with nothing beyond the edge along the sum, and of y."""
    w, of_y = w_box(tile, transposed), box_of(tile.sums("f16"), order)
    inside = values if edge == 0 else values[:, :, :edge] if transposed else values[:, :edge]
    boxes = [
        (x, x_box(tile, x_transposed), 128 if x_transposed else 2 * tile.DEPTH),
        (values, w, 2 * w[-1]),
        (inside, w, 2 * w[-1]),
        (y.T if order == FEATURES else y, of_y, 2 * of_y[1]),
    ]
    return tensor_maps(*boxes[: Y if order == ANY else Y + 1])


def images_of(
    tile: Tile,
    values: DeviceArray,
    index: Index,
    transposed: bool,
    in_features: int,
    x_transposed: bool,
) -> DeviceArray:
    """The blocks of w as `image_kernel` lays them out."""
    flat, rows = span(values), index.block_columns if transposed else index.block_rows
    images = empty((2 * flat.size,), values.dtype)
    grid = -(-flat.size // (4 * THREADS_OF_IMAGES))
    args = flat, w_strides(tile.B, transposed), rows, in_features, images
    launch(image_kernel(tile, x_transposed), grid, THREADS_OF_IMAGES, *args)
    return images


def w_strides(size: int, transposed: bool) -> tuple[int, int]:
    """Within a block of w or w.T: along the sum, and across."""
    return (1, size) if transposed else (size, 1)


@cache
def kernel_of_16_bit(
    tile: Tile, kind: str, transposed: bool, x_transposed: bool, ragged: bool, order: str
) -> Any:
    run, WITH_MAP = roles(tile, kind, transposed, x_transposed, ragged, order), order != ANY

    @cuda.jit(**tile.options)
    def kernel(maps, records, strips, tiles, tile_starts, values, sizes):
        row_stride, column_stride, batch, features = sizes
        y = values, row_stride, column_stride, batch, features
        plan = records, strips, tiles, tile_starts
        run((maps,), plan, y, maps[Y] if WITH_MAP else maps[0])

    return kernel


@cache
def kernel_of_float32(
    tile: Tile, precision: str, transposed: bool, x_transposed: bool, order: str
) -> Any:
    run = roles(tile, precision, transposed, x_transposed, False, order)

    @cuda.jit(**tile.options)
    def kernel(
        maps, images, records, strips, tiles, tile_starts, values, sizes,
        x, x_strides, in_features, w, w_strides, indptr, indices, blocks,
    ):  # fmt: skip
        row_stride, column_stride, batch, features = sizes
        y = values, row_stride, column_stride, batch, features
        plan = records, strips, tiles, tile_starts
        dense = x, x_strides, in_features, w, w_strides, indptr, indices, blocks
        run((maps, images), plan, y, dense)

    return kernel


@cache
def roles(
    tile: Tile, kind: str, transposed: bool, x_transposed: bool, ragged: bool, order: str
) -> Any:
    """run(source, plan, y, more): a block of threads, some warps of which multiply, some fetch."""
    STAGES, BARRIERS, WARPS, CLUSTER = tile.STAGES, 2 * tile.STAGES, tile.WARPS, tile.CLUSTER
    MASKS, WORDS = tile.MASKS, tile.MASKS + STAGES
    MORE, FEWER = tile.REGISTERS
    produce = producer(tile, transposed, x_transposed, ragged)
    consume = consumer(tile, kind, transposed, x_transposed, order)

    @cuda.jit(device=True)
    def run(source, plan, y, more):
        records, strips, tiles, tile_starts = plan
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
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
            if FEWER:
                fewer_registers(FEWER)
            fetcher = uint32(warp - WARPS)
            if not FEWER or fetcher == 0:
                produce(fetcher, source, records, tiles, first, last, shared, base, bars, info)
        else:
            if MORE:
                more_registers(MORE)
            consume(strips, tiles, first, last, shared, base, bars, info, y, more)
        if CLUSTER > 1:
            cluster_sync()  # the others may still arrive at barriers here

    return run
