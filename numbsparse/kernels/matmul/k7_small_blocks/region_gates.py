"""Regions without the blocks whose gate is zero, as only the GPU knows them.

A block of threads has a region, and a thread a place for a block in a slot. Blocks that are left
are dealt to the warps anew, and where a slot has two, those of each column are put together anew.
What is copied stays: it is not what takes time.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, uint32

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import (
    NEW_COLUMN,
    PLACE_BITS,
    Region,
)
from numbsparse.kernels.parts.ranks import begins_group, group_of, mark, rank
from numbsparse.kernels.ptx import wait_for_earlier_kernels

THREADS = 64 if SIMULATED else 512


def left_by_gates(
    codes: DeviceArray,
    used: DeviceArray,
    blocks: DeviceArray,
    gates: DeviceArray,
    B: int,
    region: Region,
) -> tuple[DeviceArray, ...]:
    """(codes, used, blocks) as in `plan_regions`, of the blocks whose gate is not zero."""
    left = tuple(empty(a.shape, a.dtype) for a in (codes, used, blocks))
    kernel = gate_kernel(16 // B, region.WARPS, region.SLOTS)
    launch(kernel, used.size // region.WARPS, THREADS, codes, used, blocks, gates, *left)
    return left


@cache
def gate_kernel(A_SLOT: int, WARPS: int, SLOTS: int) -> Any:
    """An entry is a place for a block, A_SLOT to a slot; slots and entries are counted in order of
    the region's columns, before (`own_codes`, `own_blocks`) and after (`moved`).

    ranks : how many entries are left before each; how many new slots begin before it
    firsts : the first slot of a column, by the place of its dy
    """
    ALL, PLACE, NONE = WARPS * SLOTS, (1 << PLACE_BITS) - 1, 0xFFFFFFFF
    MOST, PLACES, LAST = -(-ALL * A_SLOT // 32) * 32, 1 << PLACE_BITS, A_SLOT - 1
    MASKS, RANKS, MOVED = (A_SLOT, MOST // 32 + 1), (A_SLOT, MOST + 1), (A_SLOT, ALL)

    @cuda.jit(device=True)
    def dealt(nth, slots):
        """The warp that has the n-th of some slots, and where."""
        warp = ((nth + 1) * WARPS - 1) // slots
        return warp * SLOTS + nth - slots * warp // WARPS

    @cuda.jit(device=True)
    def dy_of(code):
        return int32(code >> uint32(2 * PLACE_BITS) & uint32(PLACE))

    @cuda.jit(device=True)
    def code_of(moved, nth, slot):
        own = moved[0, nth]
        is_new = slot % SLOTS == 0 or dy_of(own) != dy_of(moved[0, nth - 1])
        if A_SLOT == 2:
            second = moved[LAST, nth]
            second = own if second == uint32(NONE) else second
            own = uint32(own | (second & uint32(PLACE)) << uint32(PLACE_BITS))
        return uint32(own | uint32(NEW_COLUMN)) if is_new else own

    @cuda.jit
    def kernel(codes, used, blocks, gates, left_codes, left_used, left_blocks):
        own_codes, own_blocks = cuda.shared.array(ALL, uint32), cuda.shared.array(MOST, int32)
        masks, ranks = cuda.shared.array(MASKS, uint32), cuda.shared.array(RANKS, int32)
        firsts, moved = cuda.shared.array(PLACES, int32), cuda.shared.array(MOVED, uint32)
        t, item, slots = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(0)
        for warp in range(WARPS):
            slots += used[item * WARPS + warp]
        for nth in range(t, slots, THREADS):
            at = item * ALL + dealt(nth, slots)
            own_codes[nth] = codes[at]
            for half in range(A_SLOT):
                own_blocks[nth * A_SLOT + half] = blocks[2 * at + half]
        cuda.syncthreads()
        for nth in range(t, slots, THREADS):
            dy = dy_of(own_codes[nth])
            if nth == 0 or dy != dy_of(own_codes[nth - 1]):
                firsts[dy] = nth
        wait_for_earlier_kernels()
        for entry in range(t, MOST, THREADS):
            block = own_blocks[entry] if entry < slots * A_SLOT else int32(-1)
            mark(masks[0], entry, block >= 0 and gates[block] != 0)
        cuda.syncthreads()
        rank(masks[0], ranks[0], MOST)
        cuda.syncthreads()
        if LAST:
            for entry in range(t, MOST, THREADS):
                dy = dy_of(own_codes[min(entry // A_SLOT, ALL - 1)])
                mark(masks[LAST], entry, begins_group(ranks, firsts, dy, entry, A_SLOT))
            cuda.syncthreads()
            rank(masks[LAST], ranks[LAST], MOST)
        for nth in range(t, ALL, THREADS):
            left_codes[item * ALL + nth] = uint32(0)
            left_blocks[2 * (item * ALL + nth)] = left_blocks[2 * (item * ALL + nth) + 1] = -1
            if LAST:
                moved[LAST, nth] = uint32(NONE)
        cuda.syncthreads()
        left = ranks[LAST, MOST]
        for entry in range(t, MOST, THREADS):
            if ranks[0, entry + 1] > ranks[0, entry]:
                (to, half), code = group_of(ranks, entry, A_SLOT), own_codes[entry // A_SLOT]
                left_blocks[2 * (item * ALL + dealt(to, left)) + half] = own_blocks[entry]
                if A_SLOT == 2:
                    x = code >> uint32(entry % 2 * PLACE_BITS) & uint32(PLACE)
                    code = uint32(x | uint32(dy_of(code)) << uint32(2 * PLACE_BITS))
                moved[half, to] = code & uint32(NEW_COLUMN - 1)
        cuda.syncthreads()
        for nth in range(t, left, THREADS):
            slot = dealt(nth, left)
            left_codes[item * ALL + slot] = code_of(moved, nth, slot)
        for warp in range(t, WARPS, THREADS):
            of_warp = (warp + 1) * left // WARPS - warp * left // WARPS
            left_used[item * WARPS + warp] = of_warp

    return kernel
