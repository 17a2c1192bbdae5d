"""Regions without the blocks whose gate is zero, as only the GPU knows them.

A lane has a slot of its warp. The blocks that are left go to the first slots of the warp, and where
a slot has two, those of each column are put together anew, while the first stages are on their way.
What is copied stays: it is what takes the time then.
"""

from functools import cache
from typing import Any

from numba import cuda, int32, int64, uint32

from numbsparse.kernels.coordinates import bits_below
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import NEW_COLUMN, PLACE_BITS, Region
from numbsparse.kernels.parts.walk_on_gpu import highest, lanes_where
from numbsparse.kernels.ptx import shfl_idx, sync_warp

NONE = 0xFFFFFFFF


@cache
def thinning(A_SLOT: int, region: Region) -> Any:
    """thin(plan, warp, own_warp, left): a lane's code of a slot, and how many are used.

    plan : `codes`, `used` and `blocks` as in `plan_regions`, and `gates`
    warp, own_warp : among those of the region, and of all regions
    left : as `blocks`, of what is left
    """
    SLOTS, PLACE, DY = region.SLOTS, (1 << PLACE_BITS) - 1, 2 * PLACE_BITS
    X = (1 << DY) - 1 if A_SLOT == 1 else PLACE  # of two pieces, or one
    MOVED = region.WARPS * SLOTS * A_SLOT

    @cuda.jit(device=True)
    def place_of(masks, lane, half):
        """How many places of all lanes are before one of a lane's."""
        before = int32(0)
        for h in range(A_SLOT):
            before += bits_below(masks[h], lane + (1 if h < half else 0))
        return before

    @cuda.jit(device=True)
    def thin(plan, warp, own_warp, left):
        # Of each place for a block: its code, without where the other one's x is, and the block.
        moved, kept = cuda.shared.array(MOVED, uint32), cuda.shared.array(MOVED, int32)
        lane, first = int32(cuda.threadIdx.x % 32), int64(own_warp) * SLOTS
        own, at = first + min(lane, SLOTS - 1), warp * (SLOTS * A_SLOT)
        there, code = lane < plan.used[own_warp], uint32(plan.codes[own])
        blocks, masks = cuda.local.array(A_SLOT, int32), cuda.local.array(A_SLOT, uint32)
        begins = cuda.local.array(A_SLOT, uint32)
        for h in range(A_SLOT):
            blocks[h] = plan.blocks[2 * own + h] if there else int32(-1)
            if blocks[h] >= 0 and plan.gates[blocks[h]] == 0:
                blocks[h] = int32(-1)
            masks[h] = lanes_where(blocks[h] >= 0)
            if lane < SLOTS:
                moved[at + lane * A_SLOT + h] = uint32(NONE)
                kept[at + lane * A_SLOT + h] = int32(-1)
        news = lanes_where(there and code & uint32(NEW_COLUMN) != 0)
        column = highest(uint32(news & uint32((int64(2) << lane) - 1)))
        of_column = place_of(masks, column, 0)
        for h in range(A_SLOT):
            nth = place_of(masks, lane, h) - of_column
            begins[h] = lanes_where(blocks[h] >= 0 and nth % A_SLOT == 0)
        sync_warp()
        for h in range(A_SLOT):
            if blocks[h] >= 0:
                half = (place_of(masks, lane, h) - of_column) % A_SLOT
                slot = place_of(begins, lane, h) - (1 if half else 0)
                x = uint32(code >> uint32(h * PLACE_BITS) & uint32(X))
                dy = uint32(code >> uint32(DY) & uint32(PLACE))
                moved[at + slot * A_SLOT + half] = uint32(x | dy << uint32(DY))
                kept[at + slot * A_SLOT + half] = blocks[h]
        sync_warp()
        used = place_of(begins, 32, 0)
        at += min(lane, SLOTS - 1) * A_SLOT
        code = moved[at]
        dy, second = uint32(code >> uint32(DY)), code
        left[2 * own] = kept[at]  # once: another block of the cluster may read it meanwhile
        left[2 * own + 1] = kept[at + 1] if A_SLOT == 2 else int32(-1)
        if A_SLOT == 2:
            second = moved[at + 1]
            second = code if second == uint32(NONE) else second
            code = uint32(code | (second & uint32(PLACE)) << uint32(PLACE_BITS))
        before = shfl_idx(dy, uint32(max(lane - 1, 0)))
        if lane == 0 or before != dy:
            code = uint32(code | uint32(NEW_COLUMN))
        return code if lane < used else uint32(0), used

    return thin
