"""The warps that keep the ring full: they ask the copy engine for the tiles of each step, in turns.

How they read the plan ahead says `parts.records`. One lane asks, chosen by `elect`: of any other
choice the compiler makes a loop over the lanes. To ask takes time, about as long as a step of small
blocks is multiplied, and so there may be several such warps.

Of w the copy engine brings 16-bit blocks as they are, and float32's as images that `image_kernel`
made of them before: a block of w is small against the rows that it meets, so it is split but once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numbsparse.kernels.matmul.k5_tensor_core.singles import split_exact
from numbsparse.kernels.matmul.k6_hopper.tile import Tile
from numbsparse.kernels.parts.records import walking
from numbsparse.kernels.ptx import (
    as_float32,
    bulk_load,
    fence_tensor_map,
    mbarrier_expect,
    store_4xf32,
    tma_load_2d,
    tma_load_3d,
    tma_load_3d_multicast,
)

X, W, W_EDGE, Y = range(4)  # tensor maps; W_EDGE ends where x does


@cache
def producer(tile: Tile, transposed: bool, x_transposed: bool, ragged: bool) -> Any:
    """produce(fetcher, maps, images, plan, shared, base, bars, info)."""
    STAGES, SHARES = tile.STAGES, tile.SHARES
    N_MAPS = X + 1 if tile.ITEM == 4 else W_EDGE + 1
    issue = fetch_step(tile, transposed, x_transposed, ragged)

    @cuda.jit(device=True)
    def ask(step, row, stage, bars, source, shared, base, info):
        for s in range(SHARES):
            info[s * STAGES + stage] = step[s]
        issue(source, step, row, shared, base, bars, stage)

    walk = walking(tile.RECORD, STAGES, tile.ROWS, ask, tile.FETCHERS, tile.CLUSTER)

    @cuda.jit(device=True)
    def produce(fetcher, source, records, tiles, first, last, shared, base, bars, info):
        for m in range(N_MAPS):
            fence_tensor_map(source[0][m])
        walk(fetcher, records, tiles, first, last, bars, source, shared, base, info)

    return produce


@cache
def fetch_step(tile: Tile, transposed: bool, x_transposed: bool, ragged: bool) -> Any:
    INPUTS, BLOCKS, STAGE_BYTES, W_START = tile.INPUTS, tile.BLOCKS, tile.STAGE_BYTES, tile.W_START
    X_BYTES, W_BYTES, CLUSTER = tile.X_BYTES, tile.W_BYTES, tile.CLUSTER
    COUNTS, FIRST_INPUT, FIRST_BLOCK = tile.SHARES, tile.SHARES + 1, tile.SHARES + 1 + INPUTS
    fetch_x = fetch_rows(tile, x_transposed)
    fetch_w = fetch_image(tile) if tile.ITEM == 4 else fetch_block(tile, transposed, ragged)

    @cuda.jit(device=True)
    def issue(source, step, row, shared, base, bars, stage):
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        inputs, blocks = uint32(step[COUNTS] & 255), uint32(step[COUNTS] >> 8)
        mbarrier_expect(bars, stage, inputs * X_BYTES + blocks * W_BYTES)
        start = uint32(base + stage * STAGE_BYTES)
        for e in range(INPUTS):
            if e < inputs:
                at = start + e * X_BYTES
                fetch_x(source, step[FIRST_INPUT + e], row, shared, at, bars, stage)
        for b in range(BLOCKS):
            # The blocks of a cluster take turns; each one's copies are for all of them.
            if b < blocks and (CLUSTER == 1 or (stage + b) % CLUSTER == rank):
                at = start + W_START + b * W_BYTES
                fetch_w(source, step[FIRST_BLOCK + b], shared, at, bars, stage)

    return issue


def x_box(tile: Tile, x_transposed: bool) -> tuple[int, int]:
    """The box of x that one copy brings; of x.T where x is feature-major."""
    return (tile.DEPTH, tile.X_BOX) if x_transposed else (min(tile.ROWS, 256), tile.DEPTH)


@cache
def fetch_rows(tile: Tile, x_transposed: bool) -> Any:
    """DEPTH features of ROWS rows of x."""
    DEPTH, BOX = tile.DEPTH, x_box(tile, x_transposed)[1 if x_transposed else 0]
    COUNT, BYTES = tile.ROWS // BOX, tile.ITEM * BOX * DEPTH

    @cuda.jit(device=True)
    def fetch(source, x_tile, row, shared, place, bars, stage):
        x_map, feature = source[0][X], int32(x_tile * DEPTH)
        for i in range(COUNT):
            if x_transposed:
                tma_load_2d(shared, place + i * BYTES, x_map, row + i * BOX, feature, bars, stage)
            else:
                tma_load_2d(shared, place + i * BYTES, x_map, feature, row + i * BOX, bars, stage)

    return fetch


def w_box(tile: Tile, transposed: bool) -> tuple[int, int, int]:
    """The box of w that one copy brings."""
    return (1, tile.B, tile.DEPTH) if transposed else (1, tile.DEPTH, tile.WIDTH)


@cache
def fetch_block(tile: Tile, transposed: bool, ragged: bool) -> Any:
    """DEPTH rows of a block of w, or columns for w.T, in panels of at most 64 columns."""
    DEPTH, PARTS = tile.DEPTH, tile.PARTS
    _, LINES, WIDTH = w_box(tile, transposed)
    PANELS, BYTES = 1 if transposed else tile.B // WIDTH, 2 * LINES * WIDTH
    load = fetch_for(tile.CLUSTER)

    @cuda.jit(device=True)
    def fetch_from(w_map, kept, shared, place, bars, stage):
        block, part = int32(kept // PARTS), int32(kept % PARTS * DEPTH)
        for i in range(PANELS):
            at = place + i * BYTES
            if transposed:
                load(shared, at, w_map, part, 0, block, bars, stage)
            else:
                load(shared, at, w_map, i * WIDTH, part, block, bars, stage)

    @cuda.jit(device=True)
    def fetch(source, kept, shared, place, bars, stage):
        if ragged and kept >> 31:
            fetch_from(source[0][W_EDGE], kept & 0x7FFFFFFF, shared, place, bars, stage)
        else:
            fetch_from(source[0][W], kept, shared, place, bars, stage)

    return fetch


def fetch_for(cluster: int) -> Any:
    """tma_load_3d, to all blocks of a cluster."""
    if cluster == 1:
        return tma_load_3d
    RANKS = (1 << cluster) - 1

    @cuda.jit(device=True)
    def load(shared, i, w_map, column, row, layer, bars, stage):
        tma_load_3d_multicast(shared, i, w_map, column, row, layer, bars, stage, RANKS)

    return load


@cache
def fetch_image(tile: Tile) -> Any:
    BYTES = tile.W_BYTES

    @cuda.jit(device=True)
    def fetch(source, image, shared, place, bars, stage):
        at = int64(image) * (BYTES // 4)
        bulk_load(shared, place, source[1], at, uint32(BYTES), bars, stage)

    return fetch


@cache
def image_kernel(tile: Tile, x_transposed: bool) -> Any:
    """images[block, strip, part, 8 columns, hi or lo, 4 terms, column, term]: as wgmma reads them.

    Zero beyond the last feature of x. Terms are in the order in which `consume` reads x. Of the
    columns of a strip, the c-th 8 are c, 4 + c, 8 + c and so on of 32: a lane's sums are then of
    neighbours.
    """
    B, N, PARTS, ACROSS, DEPTH = tile.B, tile.N, tile.PARTS, tile.ACROSS, tile.DEPTH
    HALF = 8 * DEPTH  # of 8 columns, hi or lo

    @cuda.jit
    def kernel(values, strides, block_rows, in_features, images):
        at = 4 * int64(cuda.grid(1))  # of four terms of a column
        if at >= values.size:
            return
        g, terms, eight = at // 4 % 8, at // 32 % (DEPTH // 4), at // HALF % (N // 8)
        part, across = at // (N * DEPTH) % PARTS, at // (N * B) % ACROSS
        block, n = at // (B * B), across * N + eight // 4 * 32 + 4 * g + eight % 4
        his, los = cuda.local.array(4, float32), cuda.local.array(4, float32)
        for q in range(4):
            # Lane q of a fragment holds four neighbouring terms of 16, or two of each 8.
            k = part * DEPTH + terms // 4 * 16
            k += 2 * q + terms % 2 + terms % 4 // 2 * 8 if x_transposed else 4 * q + terms % 4
            value = float32(0)
            if block_rows[block] * B + k < in_features:
                value = values[block * (B * B) + k * strides[0] + n * strides[1]]
            hi, lo = split_exact(value)
            his[q], los[q] = as_float32(hi), as_float32(lo)
        to = at // HALF * (2 * HALF) + at % HALF
        store_4xf32(images, to, his[0], his[1], his[2], his[3])
        store_4xf32(images, to + HALF, los[0], los[1], los[2], los[3])

    return kernel
