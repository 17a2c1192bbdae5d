"""float32 by `wgmma` of tf32: x is split into hi and lo in registers, w before the kernel.

A block of w is small against the rows that it meets, so `split_kernel` splits every block once and
lays it out as wgmma reads it, terms of the sum side by side: turned for forward, as it is stored
for the input-gradient. What hi and lo are, and why each step starts from zero, says
`k5_tensor_core.singles`, whose fragments of x these are too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import aligned_rows
from numbsparse.kernels.matmul.k5_tensor_core import singles
from numbsparse.kernels.matmul.k5_tensor_core.fetches import Slots, Tile, slots_of
from numbsparse.kernels.matmul.k5_tensor_core.lines import multiply_lines
from numbsparse.kernels.matmul.k5_tensor_core.recipes import Recipe, Shape, sides_of
from numbsparse.kernels.ptx import (
    as_float32,
    cp_async,
    fence_proxy_async,
    store_4xf32,
    wgmma_split,
)
from numbsparse.layout import Index

SIDE_BY_SIDE = 4  # tiles of rows: what they read of x and of w together stays in the L2 cache


def along_lines(
    product: str, x: DeviceArray, values: DeviceArray, index: Index, y: DeviceArray, precision: str
) -> None:
    size, in_features = values.shape[1], x.shape[1]
    values, _ = aligned_rows(values.reshape(-1, size))
    blocks = values.reshape(-1, size, size)

    def split(shape: Shape) -> DeviceArray:
        images = empty((2 * values.size,), values.dtype)
        rows = index.block_columns if shape.turned else index.block_rows
        grid = -(-values.size // (4 * 256))
        launch(split_kernel(shape), grid, 256, values, rows, in_features, images)
        return images

    tile = Tile(128, min(size, 64), 32, 2)
    multiply_lines(product, x, split, blocks, index, y, precision, tile, recipe_of)


@cache
def split_kernel(shape: Shape) -> Any:
    """images[block, part across, part along the sum, hi or lo, 4 terms, 8 columns, column, term].

    Zero beyond the last feature of x.
    """
    B, turned, slots = shape.B, shape.turned, slots_of(shape.B, shape.tile, shape.turned)
    N, DEPTH, PARTS = min(B, shape.tile.BN), slots.DEPTH, slots.PARTS
    HALF, ACROSS = N * DEPTH, B // N
    column_of = singles.coordinates(N // 8)
    RUN = min(DEPTH, 16) // 4

    @cuda.jit
    def kernel(values, block_rows, in_features, images):
        at = 4 * int64(cuda.grid(1))  # of four terms of a column
        if at >= values.size:
            return
        g, unit = at // 4 % 8, at // 32 % (N // 8)
        terms, part = at // (4 * N) % (DEPTH // 4), at // HALF % PARTS
        block, across = at // (B * B), at // (HALF * PARTS) % ACROSS
        n = across * N + column_of(unit, g)
        his, los = cuda.local.array(4, float32), cuda.local.array(4, float32)
        for q in range(4):
            # Lane q of a fragment holds the terms RUN q to RUN q + RUN - 1 of each 4 RUN.
            k = terms // RUN * (4 * RUN)
            k += part * DEPTH + (4 * q + terms % 4 if RUN == 4 else q + 4 * (terms % 2))
            value = float32(0)
            if block_rows[block] * B + k < in_features:
                value = values[block * (B * B) + (n * B + k if turned else k * B + n)]
            hi, lo = singles.split_exact(value)
            his[q], los[q] = as_float32(hi), as_float32(lo)
        to = at // HALF * (2 * HALF) + at % HALF
        store_4xf32(images, to, his[0], his[1], his[2], his[3])
        store_4xf32(images, to + HALF, los[0], los[1], los[2], los[3])

    return kernel


@cache
def recipe_of(shape: Shape) -> Recipe:
    tile, slots = shape.tile, slots_of(shape.B, shape.tile, shape.turned)
    TA, N = tile.BM // tile.warps // 16, tile.BN // slots.COLUMNS
    x_side, _ = sides_of(shape, singles.PIECE)
    begin_x, add_products = products(shape.arithmetic, TA, N, slots.DEPTH, *x_side)

    @cuda.jit(device=True)
    def begin_w():
        return 0

    return Recipe(
        TA,
        N // 8,
        False,
        float32,
        singles.PIECE,
        2 * slots.size,
        singles.places(*x_side, 2 * TA, slots.DEPTH),
        begin_x,
        begin_w,
        add_products,
        fetch_images(tile, slots, shape.B),
        fence_proxy_async,
        SIDE_BY_SIDE,
        singles.store(TA, N // 8, shape.y_turned, shape.wide),
    )


@cache
def products(
    precision: str, TA: int, N: int, DEPTH: int, PIECES: int, along: bool
) -> tuple[Any, Any]:
    """(begin, add_products): acc[m] += rows of x times N columns of an image."""
    CHUNK = min(DEPTH, 16)
    RUN, CHUNKS = CHUNK // 4, DEPTH // CHUNK
    VALUES, SPLIT = (RUN, 2 * TA), (TA, DEPTH // 2)
    exact = precision == "highest"
    split = singles.split_exact if exact else singles.round_to_tf32
    begin, load = singles.fragment(PIECES, along, 2 * TA, DEPTH)
    multiply = wgmma_split(N, DEPTH // 8, exact)

    @cuda.jit(device=True)
    def add_products(ring, x_at, w_at, acc):
        hi, lo = cuda.local.array(SPLIT, uint32), cuda.local.array(SPLIT, uint32)
        values = cuda.local.array(VALUES, float32)
        for k in range(CHUNKS):
            load(ring, x_at, k, values)
            for m in range(TA):
                for s in range(RUN // 2):
                    for i in range(4):
                        at = (k * (RUN // 2) + s) * 4 + i
                        hi[m, at], lo[m, at] = split(values[2 * s + i // 2, 2 * m + i % 2])
        for m in range(TA):
            multiply(acc[m], hi[m], lo[m], ring, w_at)

    return begin, add_products


@cache
def fetch_images(tile: Tile, slots: Slots, B: int) -> tuple[Any, Any, int]:
    """(find, fetch, 1): the image of a step's part of a block, as it lies; see `fetch_blocks`."""
    N, PARTS, SIZE, THREADS = min(B, tile.BN), slots.PARTS, 2 * slots.size, tile.threads
    COUNT, ACROSS = SIZE // (4 * THREADS), B // N

    @cuda.jit(device=True)
    def find(blocks, indices, first, last, step, in_features, found, insides):
        entry = first + uint32(step) // PARTS
        if entry < last:
            found[0] = blocks[entry]

    @cuda.jit(device=True)
    def fetch(images, found, insides, first, step, ring, start):
        own = 4 * uint32(cuda.threadIdx.x)
        part = first // N * PARTS + uint32(step) % PARTS
        source = (int64(found[0]) * (ACROSS * PARTS) + part) * SIZE + own
        for i in range(COUNT):
            cp_async(ring, start + own + i * (4 * THREADS), images, source + i * (4 * THREADS))

    return find, fetch, 1
