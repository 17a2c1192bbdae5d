"""float32 by `wgmma` of tf32: x is split into hi and lo in registers, w before the kernel.

A block of w is small against the rows that it meets, so `split_kernel` splits every block once and
lays it out as wgmma reads it, terms of the sum side by side: turned for forward, as it is stored
for the input-gradient. What hi and lo are, and why each step starts from zero, says
`parts.fragments_tf32`.

Reads per output, for a sum of K products: K / B of x, or K / 64 where two columns of blocks of 32
keep the same inputs, and K / 128 of w. What limits it is shared memory. wgmma takes 64 bytes a
cycle of w from there, at the tensor cores' own pace, and what else passes comes on top: x in and
out and w in make 336 cycles of 192 for 64 rows and a block of 32, and 272 where a tile of x serves
two blocks, or one of 64. An H200 at 1.72 GHz took about 340 and 265.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.card import multiprocessors
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned, aligned_either_way
from numbsparse.kernels.matmul.k5_tensor_core.store import stored
from numbsparse.kernels.matmul.k6_hopper.split_lines import line_kernel
from numbsparse.kernels.matmul.k6_hopper.split_plan import (
    ALIGNED,
    BOX,
    DEPTH,
    Tile,
    steps_of,
    tile_of,
)
from numbsparse.kernels.matmul.k6_hopper.steps import schedule
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.parts import fragments_tf32 as singles
from numbsparse.kernels.ptx import as_float32, store_4xf32
from numbsparse.kernels.views import span
from numbsparse.layout import Index

TOGETHER = 2  # tiles of rows that meet a block of w one after another: it stays in the L2 cache


def along_lines(
    product: str, x: DeviceArray, values: DeviceArray, index: Index, y: DeviceArray, precision: str
) -> None:
    (batch, features), in_features, size = y.shape, x.shape[1], values.shape[1]
    if batch == 0 or features == 0:
        return
    if len(values) == 0:
        fill(y, 0)
        return
    turned, units = product == "input_grad", multiprocessors()
    tile = tile_of(size, batch, features, units)
    lines, x_turned = aligned_either_way(x)
    box = (DEPTH, BOX) if x_turned else (tile.ROWS, DEPTH)
    x_map = tensor_map(lines, box, 4 * DEPTH)
    x = lines.T if x_turned else lines
    values = aligned(values.reshape(-1, size))
    flat = span(values)
    images = empty((2 * flat.size,), values.dtype)
    rows = index.block_columns if turned else index.block_rows
    split = split_kernel(tile, x_turned)
    w_strides = (1, size) if turned else (size, 1)  # along the sum, and across
    grid = -(-flat.size // (4 * 256))
    launch(split, grid, 256, flat, w_strides, rows, in_features, images)

    records, strips, lengths = planned(index, steps_of, turned, tile)
    tiles, tile_starts = planned(index, schedule, lengths, -(-batch // tile.ROWS), units, TOGETHER)
    y, y_turned, wide = stored(y)
    walk = index.rows if turned else index.columns
    strides = tuple(stride // x.itemsize for stride in x.strides)
    launch(
        line_kernel(tile, precision, x_turned, y_turned, wide),
        len(tile_starts) - 1, tile.THREADS,
        x_map, images, records, strips, tiles, tile_starts, y, batch, features,
        span(x), strides, in_features, flat, w_strides, walk.indptr, walk.indices, walk.blocks,
        shared_bytes=4 * (tile.STAGES * tile.STAGE + ALIGNED),
    )  # fmt: skip


@cache
def split_kernel(tile: Tile, x_turned: bool) -> Any:
    """images[block, part across, part along the sum, 8 columns, hi or lo, 4 terms, column, term].

    Zero beyond the last feature of x.
    """
    B, N, PARTS, ACROSS = tile.B, tile.N, tile.PARTS, tile.ACROSS
    HALF = 8 * DEPTH  # of 8 columns, hi or lo
    column_of = singles.coordinates(N // 8)

    @cuda.jit
    def kernel(values, strides, block_rows, in_features, images):
        at = 4 * int64(cuda.grid(1))  # of four terms of a column
        if at >= values.size:
            return
        g, terms, unit = at // 4 % 8, at // 32 % (DEPTH // 4), at // HALF % (N // 8)
        part, across = at // (N * DEPTH) % PARTS, at // (N * B) % ACROSS
        block, n = at // (B * B), across * N + column_of(unit, g)
        his, los = cuda.local.array(4, float32), cuda.local.array(4, float32)
        for q in range(4):
            # Lane q of a fragment holds four neighbouring terms of 16, or two of each 8.
            k = part * DEPTH + terms // 4 * 16
            k += 2 * q + terms % 2 + terms % 4 // 2 * 8 if x_turned else 4 * q + terms % 4
            value = float32(0)
            if block_rows[block] * B + k < in_features:
                value = values[block * (B * B) + k * strides[0] + n * strides[1]]
            hi, lo = singles.split_exact(value)
            his[q], los[q] = as_float32(hi), as_float32(lo)
        to = at // HALF * (2 * HALF) + at % HALF
        store_4xf32(images, to, his[0], his[1], his[2], his[3])
        store_4xf32(images, to + HALF, los[0], los[1], los[2], los[3])

    return kernel
