"""Who does what in a block of threads for the weight-gradient of float32: supply, and multiply."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint32

from numbsparse.kernels.matmul.k6_hopper.split_factors import reader, turner
from numbsparse.kernels.matmul.k6_hopper.split_items import HALVES, NT, TILE, TILE_BYTES, Work
from numbsparse.kernels.parts import fragments_tf32 as singles
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    fence_proxy_async,
    fence_tensor_map,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    sync_warp,
    tma_load_2d,
    wgmma_split,
)


@cache
def rings(work: Work) -> Any:
    """places(extents, item, base): where the stages begin, what a stage and a room take; in values.

    The rooms come first. What an item needs of each depends on its strips.
    """
    ROOMS, IMAGE, TILES = work.ROOMS, work.IMAGE, work.TILES
    ACROSS, SIZE = work.N // TILE, TILE_BYTES // 4

    @cuda.jit(device=True)
    def places(extents, item, base):
        strips = uint32(extents[item, 0])
        room_size = uint32(strips * IMAGE)
        start = uint32(base // 4 + ROOMS * room_size)
        return start, uint32((TILES + strips * ACROSS) * SIZE), room_size

    return places


@cache
def supplier(work: Work, exact: bool, x_turned: bool, dy_turned: bool) -> Any:
    """The warps that turn dy over; the last of them asks for the tiles, a lane for each."""
    STAGES, ROOMS, TURNERS = work.STAGES, work.ROOMS, work.TURNERS
    TILES, ACROSS, SIZE = work.TILES, work.N // TILE, TILE_BYTES // 4
    FULL, EMPTY, SHOWN, FREE = 0, STAGES, 2 * STAGES, 2 * STAGES + ROOMS
    places, turn = rings(work), turner(work, exact, dy_turned)

    @cuda.jit(device=True)
    def load(maps, mine, row, shared, at, bars, stage):
        lane = uint32(cuda.threadIdx.x) % 32
        to = uint32(4 * at + lane * TILE_BYTES)
        if mine >= 0 and lane < TILES:
            column, line = (row, mine) if x_turned else (mine, row)
            tma_load_2d(shared, to, maps[0], column, line, bars, stage)
        elif mine >= 0:
            column, line = (row, mine) if dy_turned else (mine, row)
            tma_load_2d(shared, to, maps[1], column, line, bars, stage)

    @cuda.jit(device=True)
    def look_up(tiles, columns, item, strips):
        """The first feature of a lane's tile, or -1."""
        lane = int32(cuda.threadIdx.x % 32)
        if lane < TILES:
            return tiles[item, lane // 4, lane % 4]
        if lane < TILES + strips * ACROSS:
            k = lane - TILES
            return int32(columns[item, k // ACROSS] + k % ACROSS * TILE)
        return int32(-1)

    @cuda.jit(device=True)
    def supply(own, maps, plan, item, row, steps, shared, base, bars):
        ring = cuda.shared.array(0, float32, ALIGNMENT)  # the same memory
        tiles, columns, extents = plan
        lane = uint32(cuda.threadIdx.x) % 32
        strips, stages = extents[item, 0], uint32(extents[item, 2])
        nbytes = uint32(extents[item, 1] * TILE_BYTES)
        begin, stage_size, room_size = places(extents, item, base)
        mine, fetches = look_up(tiles, columns, item, strips), own == TURNERS - 1
        if fetches:
            fence_tensor_map(maps[0])
            fence_tensor_map(maps[1])
        ahead = int32(stages - 1)
        stage = room = then = phase = room_phase = uint32(0)
        then_phase = uint32(1)
        for step in range(-ahead, steps):
            if fetches and step + ahead < steps:
                mbarrier_wait(bars, EMPTY + then, then_phase)
                if lane == 0:
                    mbarrier_expect(bars, FULL + then, nbytes)
                load(maps, mine, row, shared, begin + then * stage_size, bars, FULL + then)
                row = int32(row + NT)
                then, then_phase = following(then, then_phase, stages)
            if step >= 0:
                mbarrier_wait(bars, FULL + stage, phase)
                mbarrier_wait(bars, FREE + room, room_phase ^ 1)
                start = uint32(begin + stage * stage_size + TILES * SIZE)
                turn(ring, start, own, strips, uint32(base // 4 + room * room_size))
                fence_proxy_async()
                sync_warp()
                if lane == 0:
                    mbarrier_arrive(bars, EMPTY + stage)
                    mbarrier_arrive(bars, SHOWN + room)
                stage, phase = following(stage, phase, stages)
                room, room_phase = following(room, room_phase, ROOMS)

    return supply


@cache
def multiplier(work: Work, exact: bool, x_turned: bool) -> Any:
    """The warpgroups that multiply: acc += their products."""
    STAGES, ROOMS, IMAGE = work.STAGES, work.ROOMS, work.IMAGE
    FULL, EMPTY, SHOWN, FREE = 0, STAGES, 2 * STAGES, 2 * STAGES + ROOMS
    VALUES = HALVES, NT // 2
    split = singles.split_exact if exact else singles.round_to_tf32
    places, read = rings(work), reader(x_turned)
    multiply_both = wgmma_split(work.N, NT // 8, exact, HALVES)

    @cuda.jit(device=True)
    def multiply(warp, images, extents, item, steps, base, bars, acc):
        ring = cuda.shared.array(0, float32, ALIGNMENT)
        lane, group = uint32(cuda.threadIdx.x) % 32, warp // 4
        begin, stage_size, room_size = places(extents, item, base)
        stages = uint32(extents[item, 2])
        upper = uint32(base // 4 + images[item, group, 0] * IMAGE)
        lower = uint32(base // 4 + images[item, group, 1] * IMAGE)
        raw = cuda.local.array(VALUES, float32)
        hi, lo = cuda.local.array(VALUES, uint32), cuda.local.array(VALUES, uint32)
        stage = room = phase = room_phase = uint32(0)
        for _ in range(steps):
            mbarrier_wait(bars, FULL + stage, phase)
            read(ring, uint32(begin + stage * stage_size), images, item, group, warp % 4, raw)
            for m in range(HALVES):
                for i in range(NT // 2):
                    hi[m, i], lo[m, i] = split(raw[m, i])
            fence_proxy_async()  # or the copy engine may write what is still being read
            sync_warp()
            if lane == 0:
                mbarrier_arrive(bars, EMPTY + stage)
            mbarrier_wait(bars, SHOWN + room, room_phase)
            at = uint32(room * room_size)
            multiply_both(acc, hi, lo, ring, upper + at, lower + at)
            if lane == 0:
                mbarrier_arrive(bars, FREE + room)
            stage, phase = following(stage, phase, stages)
            room, room_phase = following(room, room_phase, ROOMS)

    return multiply
