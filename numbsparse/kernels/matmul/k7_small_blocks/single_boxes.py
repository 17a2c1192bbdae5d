"""What the copy engine is asked for of a region: groups of features, neighbours together."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, int32, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.matmul.k7_small_blocks.region import Region
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import plan_regions
from numbsparse.kernels.matmul.k7_small_blocks.strips import load_for, map_of
from numbsparse.kernels.ptx import tma_load_3d
from numbsparse.layout import Index

WIDE = 4  # groups of a wide box
IS_DY, IS_WIDE = 1, 2  # bits of a box
PLACE_AT, GROUP_AT = 2, 10  # the bits from which on it holds its place and its first group


def plan_boxes(
    index: Index, B: int, widths: tuple[int, int], region: Region, places: int
) -> tuple[Any, ...]:
    """As `plan_regions`, with boxes (regions, GROUPS) instead of groups: -1 after the last.

    A box goes to a place in the stage, counted in groups.
    """
    sides = -(-widths[0] // B), -(-widths[1] // B)
    segments, groups, *rest = plan_regions(index, B, sides, region, places)
    groups = groups.reshape(-1, region.GROUPS).astype(np.int64)
    # A wide box sees whole groups alone, so that what lies beyond the edge is 0.
    whole = np.array([width // region.FEATURES for width in widths])
    group, side = groups >> 1, groups & 1
    wideable = (groups >= 0) & (group < whole[side])
    follows = np.zeros(groups.shape, bool)
    follows[:, 1:] = wideable[:, 1:] & wideable[:, :-1] & (np.diff(groups, axis=1) == 2)
    at = np.arange(region.GROUPS)
    begins = np.maximum.accumulate(np.where(follows, 0, at), axis=1)
    breaks = np.where(follows, region.GROUPS, at)
    ends = np.full_like(breaks, region.GROUPS)  # of runs of neighbours
    ends[:, :-1] = np.minimum.accumulate(breaks[:, :0:-1], axis=1)[:, ::-1]
    within = at - begins
    wide = wideable & (at - within % WIDE + WIDE <= ends)
    bits = group << GROUP_AT | at << PLACE_AT | wide * IS_WIDE | side * IS_DY
    boxes = np.where(groups < 0, -1, bits)
    boxes[wide & (within % WIDE > 0)] = -1  # comes with the ones before
    order = np.argsort(boxes < 0, axis=1, kind="stable")
    return segments, np.take_along_axis(boxes, order, 1).astype(np.int32), *rest


def box_map(x: DeviceArray, turned: bool, groups: int, region: Region) -> DeviceArray:
    """The map of x for boxes of DEPTH rows of one group, or of several that are whole.

    Where x is turned, (features, batch), groups are lines below each other.
    """
    if turned:
        return map_of(x, region.DEPTH, groups * region.FEATURES, turned)
    rows, width = x.shape
    if groups == 1 or width < region.FEATURES:
        return map_of(x, region.DEPTH, region.FEATURES, turned)
    line = x.itemsize * region.FEATURES
    shape = width // region.FEATURES, rows, region.FEATURES
    strides = line, x.strides[0], x.itemsize
    by_group = DeviceArray(x.address, shape, x.dtype, strides, x.owner)
    return tensor_map(by_group, (groups, region.DEPTH, region.FEATURES), line)


@cache
def box_loads(region: Region, turned: bool) -> tuple[Any, Any]:
    """(load, load_wide) of a box that begins at a group and a row of the batch."""
    FEATURES, load_box = region.FEATURES, load_for(turned)

    @cuda.jit(device=True)
    def load(shared, to, own_map, group, row, bars, stage):
        load_box(shared, to, own_map, int32(group * FEATURES), row, bars, stage)

    @cuda.jit(device=True)
    def load_wide(shared, to, own_map, group, row, bars, stage):
        tma_load_3d(shared, to, own_map, 0, row, group, bars, stage)

    return load, load if turned else load_wide


@cache
def fetch_boxes(region: Region, x_turned: bool, dy_turned: bool) -> tuple[Any, Any]:
    """(look_up, fetch): each lane of the warps that fetch asks for some boxes of a stage.

    To ask takes some 100 cycles a time, too long for one warp that asks for all.
    """
    GROUPS, FETCHERS, SHARE = region.GROUPS, region.FETCHERS, region.SHARE
    GROUP_BYTES, PLACES = region.GROUP_BYTES, (1 << GROUP_AT - PLACE_AT) - 1
    load_x, load_wide_x = box_loads(region, x_turned)
    load_dy, load_wide_dy = box_loads(region, dy_turned)

    @cuda.jit(device=True)
    def look_up(boxes, item, own, mine):
        """The boxes of a lane, or -1; and the bytes of all of its warp."""
        for k in range(SHARE):
            at = own + FETCHERS * (32 * k + cuda.threadIdx.x % 32)
            mine[k] = boxes[item, at] if at < GROUPS else -1
        count = 0
        for at in range(own, GROUPS, FETCHERS):
            box = boxes[item, at]
            if box >= 0:
                count += WIDE if box & IS_WIDE else 1
        return uint32(count * GROUP_BYTES)

    @cuda.jit(device=True)
    def fetch(maps, mine, row, shared, start, bars, stage):
        x_map, x_wide, dy_map, dy_wide = maps
        for k in range(SHARE):
            box, group = mine[k], int32(mine[k] >> GROUP_AT)
            to = uint32(start + (box >> PLACE_AT & PLACES) * GROUP_BYTES)
            if box < 0:
                continue
            if box & IS_WIDE:
                if box & IS_DY:
                    load_wide_dy(shared, to, dy_wide, group, row, bars, stage)
                else:
                    load_wide_x(shared, to, x_wide, group, row, bars, stage)
            elif box & IS_DY:
                load_dy(shared, to, dy_map, group, row, bars, stage)
            else:
                load_x(shared, to, x_map, group, row, bars, stage)

    return look_up, fetch
