"""The warpgroups that multiply: 64 M_TILES rows of y each, in their share of a group's columns.

Which columns have a block at an input is known only at run time, and accumulators are registers: so
every product has its own code, and the mask of the step skips those that are not there.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.steps import BEFORE, MOST
from numbsparse.kernels.matmul.k6_hopper.store import ANY, storer
from numbsparse.kernels.matmul.k6_hopper.tile import Tile
from numbsparse.kernels.ptx import (
    Operand,
    bulk_wait_read,
    fence_tensor_map,
    mbarrier_arrive_at,
    mbarrier_wait,
    redux_or,
    shfl_idx,
    to_local,
    wgmma,
    zeros,
)


@cache
def consumer(tile: Tile, kind: str, turned: bool, x_turned: bool, y_lies: str) -> Any:
    STAGES, STAGE_BYTES, ROWS, SUMS = tile.STAGES, tile.STAGE_BYTES, tile.ROWS, tile.SUMS
    W_START, W_BYTES, OWN_ROWS = tile.W_START, tile.W_BYTES, 64 * tile.M_TILES
    SHARE, SHARES, BITS = tile.SHARE, tile.SHARES, (1 << tile.INPUTS * tile.SHARE) - 1
    CLUSTER, MASKS = tile.CLUSTER, tile.MASKS
    LINE_BYTES = 2 * tile.DEPTH  # of x in a stage, on average where it is turned
    multiply, no_sums = products(tile, kind, turned, x_turned), zeros(SUMS)
    store, by_boxes = storer(tile, kind, y_lies), y_lies != ANY
    RING_BYTES, ROOM = tile.RING_BYTES, tile.ROOMS * tile.ROOM_BYTES

    @cuda.jit(device=True)
    def consume(lines, tiles, first, last, shared, base, bars, info, y):
        t = uint32(cuda.threadIdx.x)
        warpgroup, lane = shfl_idx(uint32(t // 128), 0), t % 32
        rank = uint32(cuda.blockIdx.x) % CLUSTER
        sums = cuda.local.array(SUMS, float32)
        columns = cuda.local.array(SHARE, int32)
        share, rows = warpgroup % SHARES, warpgroup // SHARES * OWN_ROWS
        own = uint32(base + rows * LINE_BYTES)
        w_place = uint32(base + W_START)
        room = uint32(base + RING_BYTES + t // 32 * ROOM)
        # The lane that gives stages back here is the one that reads their masks; others read zeros.
        told = uint32(share * STAGES if lane == rank else MASKS)
        stage, phase = uint32(0), uint32(0)
        if by_boxes:
            fence_tensor_map(y[0])
        for i in range(first, last):
            group, row = tiles[i, 0], (tiles[i, 1] * CLUSTER + rank) * ROWS + rows
            for c in range(SHARE):
                columns[c] = lines[group, share * SHARE + c]
            acc = no_sums()
            mask = uint32(0)
            while mask >> 31 == 0:
                mbarrier_wait(bars, stage, phase)
                mask = redux_or(info[told])
                start = uint32(stage * STAGE_BYTES)
                w_start = w_place + start + (mask >> BEFORE & MOST) * W_BYTES
                acc = multiply(acc, shared, own + start, shared, w_start, uint32(mask & BITS))
                if lane < CLUSTER:
                    mbarrier_arrive_at(bars, STAGES + stage, lane)
                stage, told = uint32(stage + 1), uint32(told + 1)
                if stage == STAGES:
                    stage, told, phase = uint32(0), uint32(told - STAGES), uint32(phase ^ 1)
            to_local(acc, sums)
            store(sums, columns, row + t // 32 % 4 * 16, shared, room, y)
        if by_boxes:
            bulk_wait_read()

    return consume


def products(tile: Tile, kind: str, turned: bool, x_turned: bool) -> Any:
    """The products of a step, by its mask."""
    DEPTH, WIDTH = tile.DEPTH, tile.WIDTH
    x = Operand(128, 128 * DEPTH, True) if x_turned else Operand(2 * DEPTH, 0)
    w = Operand(2 * DEPTH, 0) if turned else Operand(2 * WIDTH, 2 * WIDTH * DEPTH, True)
    shape = tile.M_TILES, tile.B, DEPTH // 16
    return wgmma(kind, *shape, x, w, tile.SHARE, tile.INPUTS, tile.X_BYTES)
