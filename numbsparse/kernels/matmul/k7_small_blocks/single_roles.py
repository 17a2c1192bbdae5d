"""Who does what in a block of threads for the weight-gradient of float32: supply, and multiply.

Those who supply do nothing else, so that they ask for a stage as soon as the last warp has given it
back; those who multiply never wait for each other, and have the registers that the others lack.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from numbsparse.device import SIMULATED
from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.single_boxes import fetch_boxes
from numbsparse.kernels.matmul.k7_small_blocks.single_slots import Sums, products
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    fence_tensor_map,
    fewer_registers,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    more_registers,
    sync_warp,
)


class Registers(NamedTuple):
    """Of a thread, at first and when they are handed over; and what the compiler is told."""

    fewer: int
    more: int
    options: dict[str, Any]


def registers_of(region: Region) -> Registers:
    warps = region.WARPS + region.FETCHERS
    each, fewer = 65536 // (32 * warps) // 8 * 8, 24
    more = min((each * warps - fewer * region.FETCHERS) // region.WARPS // 8 * 8, 240)
    return Registers(fewer, more, {} if SIMULATED else {"launch_bounds": (32 * warps, 1)})


@cache
def supplier(sums: Sums) -> Any:
    """The warps that ask for boxes, each for its share of every stage."""
    region = sums.region
    STAGES, STAGE_BYTES, DEPTH = region.STAGES, region.STAGE_BYTES, region.DEPTH
    FEWER, SHARE = registers_of(region).fewer, region.SHARE
    look_up, fetch = fetch_boxes(region, sums.x_turned, sums.dy_turned)

    @cuda.jit(device=True)
    def supply(own, maps, boxes, item, row, steps, shared, base, bars):
        fewer_registers(FEWER)
        mine = cuda.local.array(SHARE, int32)
        nbytes = look_up(boxes, item, own, mine)
        for m in maps:
            fence_tensor_map(m)
        stage, phase = uint32(0), uint32(1)
        for _ in range(steps):
            mbarrier_wait(bars, STAGES + stage, phase)
            if cuda.threadIdx.x % 32 == 0:
                mbarrier_expect(bars, stage, nbytes)
            sync_warp()
            fetch(maps, mine, row, shared, uint32(base + stage * STAGE_BYTES), bars, stage)
            row = int32(row + DEPTH)
            stage, phase = following(stage, phase, STAGES)

    return supply


@cache
def multiplier(sums: Sums) -> Any:
    """acc[p, i] of a warp's slots, over all steps."""
    region, COUNT = sums.region, sums.PER_LANE
    SLOTS, STAGES, STAGE_BYTES = region.SLOTS, region.STAGES, region.STAGE_BYTES
    MORE, add_products = registers_of(region).more, products(sums)

    @cuda.jit(device=True)
    def multiply(warp, used, steps, shared, base, bars, codes, acc):
        more_registers(MORE)
        for p in range(SLOTS):
            for i in range(COUNT):
                acc[p, i] = 0
        stage = phase = uint32(0)
        for _ in range(steps):
            mbarrier_wait(bars, stage, phase)
            start = uint32(base + stage * STAGE_BYTES)
            add_products(shared, start, codes, warp * SLOTS, used, acc)
            sync_warp()
            if cuda.threadIdx.x % 32 == 0:
                mbarrier_arrive(bars, STAGES + stage)
            stage, phase = following(stage, phase, STAGES)

    return multiply
