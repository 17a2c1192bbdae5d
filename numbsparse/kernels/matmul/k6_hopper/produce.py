"""The warps that keep the ring full: they ask the copy engine for the tiles of each step, in turns.

A lane holds the record of one of 32 steps while those of the next 32 are under way, across tiles
too, so no step waits for its record; each in turn is told to the whole warp. One lane asks, chosen
by `elect`: of any other choice the compiler makes a loop over the lanes. To ask takes time, about
as long as a step of small blocks is multiplied, and so there are several such warps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.tile import Tile
from numbsparse.kernels.parts.records import walking
from numbsparse.kernels.ptx import (
    fence_tensor_map,
    mbarrier_expect,
    tma_load_2d,
    tma_load_3d,
    tma_load_3d_multicast,
)


@cache
def producer(tile: Tile, turned: bool, x_turned: bool, ragged: bool) -> Any:
    STAGES, SHARES = tile.STAGES, tile.SHARES
    issue = fetch_step(tile, turned, x_turned, ragged)

    @cuda.jit(device=True)
    def ask(step, row, stage, bars, maps, shared, base, info):
        for s in range(SHARES):
            info[s * STAGES + stage] = step[s]
        issue(maps, step, row, shared, base, bars, stage)

    walk = walking(tile.RECORD, STAGES, tile.ROWS, ask, tile.FETCHERS, tile.CLUSTER)

    @cuda.jit(device=True)
    def produce(fetcher, maps, records, tiles, first, last, shared, base, bars, info):
        for m in maps:
            fence_tensor_map(m)
        walk(fetcher, records, tiles, first, last, bars, maps, shared, base, info)

    return produce


@cache
def fetch_step(tile: Tile, turned: bool, x_turned: bool, ragged: bool) -> Any:
    INPUTS, BLOCKS, STAGE_BYTES, W_START = tile.INPUTS, tile.BLOCKS, tile.STAGE_BYTES, tile.W_START
    X_BYTES, W_BYTES, CLUSTER = tile.X_BYTES, tile.W_BYTES, tile.CLUSTER
    COUNTS, FIRST_INPUT, FIRST_BLOCK = tile.SHARES, tile.SHARES + 1, tile.SHARES + 1 + INPUTS
    fetch_x, fetch_w = fetch_rows(tile, x_turned), fetch_block(tile, turned)

    @cuda.jit(device=True)
    def issue(maps, step, row, shared, base, bars, stage):
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        x_map, w_map, edge_map = maps
        inputs, blocks = uint32(step[COUNTS] & 255), uint32(step[COUNTS] >> 8)
        mbarrier_expect(bars, stage, inputs * X_BYTES + blocks * W_BYTES)
        start = uint32(base + stage * STAGE_BYTES)
        for e in range(INPUTS):
            if e < inputs:
                fetch_x(x_map, step[FIRST_INPUT + e], row, shared, start + e * X_BYTES, bars, stage)
        for b in range(BLOCKS):
            # The blocks of a cluster take turns; each one's copies are for all of them.
            if b < blocks and (CLUSTER == 1 or (stage + b) % CLUSTER == rank):
                kept, place = step[FIRST_BLOCK + b], start + W_START + b * W_BYTES
                if ragged and kept >> 31:
                    fetch_w(edge_map, kept & 0x7FFFFFFF, shared, place, bars, stage)
                else:
                    fetch_w(w_map, kept, shared, place, bars, stage)

    return issue


def x_box(tile: Tile, x_turned: bool) -> tuple[int, int]:
    """The box of x that one copy brings; of x.T where x lies feature by feature."""
    return (tile.DEPTH, 64) if x_turned else (min(tile.ROWS, 256), tile.DEPTH)


@cache
def fetch_rows(tile: Tile, x_turned: bool) -> Any:
    """DEPTH features of ROWS rows of x."""
    DEPTH, BOX = tile.DEPTH, 64 if x_turned else x_box(tile, False)[0]
    COUNT, BYTES = tile.ROWS // BOX, 2 * BOX * DEPTH

    @cuda.jit(device=True)
    def fetch(x_map, x_tile, row, shared, place, bars, stage):
        feature = int32(x_tile * DEPTH)
        for i in range(COUNT):
            if x_turned:
                tma_load_2d(shared, place + i * BYTES, x_map, row + i * BOX, feature, bars, stage)
            else:
                tma_load_2d(shared, place + i * BYTES, x_map, feature, row + i * BOX, bars, stage)

    return fetch


def w_box(tile: Tile, turned: bool) -> tuple[int, int, int]:
    """The box of w that one copy brings."""
    return (1, tile.B, tile.DEPTH) if turned else (1, tile.DEPTH, tile.WIDTH)


@cache
def fetch_block(tile: Tile, turned: bool) -> Any:
    """DEPTH rows of a block of w, turned its columns, in panels of at most 64 columns."""
    DEPTH, PARTS = tile.DEPTH, tile.PARTS
    _, LINES, WIDTH = w_box(tile, turned)
    PANELS, BYTES = 1 if turned else tile.B // WIDTH, 2 * LINES * WIDTH
    load = fetch_for(tile.CLUSTER)

    @cuda.jit(device=True)
    def fetch(w_map, kept, shared, place, bars, stage):
        block, part = int32(kept // PARTS), int32(kept % PARTS * DEPTH)
        for i in range(PANELS):
            at = place + i * BYTES
            if turned:
                load(shared, at, w_map, part, 0, block, bars, stage)
            else:
                load(shared, at, w_map, i * WIDTH, part, block, bars, stage)

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
