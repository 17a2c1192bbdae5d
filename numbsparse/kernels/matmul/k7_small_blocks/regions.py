"""dvalues = x.T @ dy at the kept blocks: each region of w reads the features that it needs once.

Rows of x and dy pass through a ring in shared memory, in groups of 64 features. A slot multiplies
16 features of x, two pieces that may stand anywhere, by B of dy; its sums stay in registers.
"""

from __future__ import annotations

from typing import Any

from numbsparse.device import empty
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine, multiprocessors, shared_memory
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned_either_way, aligned_rows
from numbsparse.kernels.matmul.k7_small_blocks.region import Region, Turned
from numbsparse.kernels.matmul.k7_small_blocks.region_async import async_kernel
from numbsparse.kernels.matmul.k7_small_blocks.region_bulk import bulk_kernel
from numbsparse.kernels.matmul.k7_small_blocks.region_plan import plan_regions
from numbsparse.kernels.matmul.k7_small_blocks.region_store import total_kernel
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import steps_in_strips
from numbsparse.kernels.matmul.k7_small_blocks.strips import map_of
from numbsparse.kernels.matmul.plans import planned


def in_regions(x: Any, dy: Any, index: Any, dvalues: Any) -> None:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    name, B = dvalues.dtype.name, dvalues.shape[1]
    batch, sides = x.shape[0], (x.shape[1], dy.shape[1])
    if dvalues.shape[0] == 0 or batch == 0:
        fill(dvalues, 0)
        return
    block_sides = -(-sides[0] // B), -(-sides[1] // B)
    kept, *_ = planned(index, steps_in_strips, B, False, min(512, block_sides[1] * B), 32, 16 // B)
    x, x_turned = aligned_either_way(x.view("uint16"))
    dy, dy_turned = aligned_either_way(dy.view("uint16"))
    turned = Turned(x_turned, dy_turned)
    region = region_of(B, kept, any(turned))
    plan = planned(index, plan_regions, B, block_sides, region, multiprocessors())
    segments, groups, codes, used, blocks, cut, pieces = plan
    slots = region.WARPS * region.SLOTS * cut.size
    partials = empty((max(slots * pieces * 16 * B, 1),), "float32")
    places = blocks, index.block_rows, index.block_columns, sides
    dvalues = dvalues.view("uint16")
    walk = batch, segments, groups, codes, used, *places, partials, dvalues
    n, shared = segments.size // 4, region.SHARED_BYTES
    if copy_engine():
        box = region.DEPTH, region.FEATURES
        maps = (map_of(a, *box, lies) for a, lies in zip((x, dy), turned, strict=True))
        kernel = bulk_kernel(B, name, region, turned)
        threads = 32 * (region.WARPS + region.FETCHERS)
        launch(kernel, n, threads, *maps, *walk, shared_bytes=shared)
    else:
        rows = *aligned_rows(x), *aligned_rows(dy)
        kernel, threads = async_kernel(B, name, region, turned), 32 * region.WARPS
        launch(kernel, n, threads, *rows, *walk, shared_bytes=shared)
    total = total_kernel(B, name, region)
    launch(total, slots, 32, partials, pieces, cut, *places, dvalues)


# Where many blocks are kept near each other, and where few are, found by trying on an H200.
ENGINE_REGIONS = {
    8: (Region(14, 17, 26, 32, 2, 2), Region(12, 18, 36, 16, 3, 4)),
    16: (Region(13, 10, 27, 16, 4, 3), Region(9, 15, 54, 16, 2, 3)),
}
ASYNC_REGIONS = {
    8: (Region(16, 18, 24, 32, 2), Region(12, 26, 48, 16, 2)),
    16: (Region(16, 10, 24, 32, 2), Region(12, 14, 48, 16, 2)),
}


def region_of(B: int, kept: float, turned: bool) -> Region:
    """As many blocks as the registers of a multiprocessor hold, if shared memory holds their x and
    dy; where few are kept near each other, more features of fewer rows.

    Of feature-major operands always 32 rows, for lines of 64 bytes: shorter ones are slow to fetch.
    """
    limit = shared_memory()
    if limit is None:
        most = Region(2, 128 // B, 8, 16, 2)
        if kept > 0.2 or turned:
            return most._replace(GROUPS=5, DEPTH=32)  # an odd number, as on some cards
        return most
    if copy_engine():
        dense, sparse = ENGINE_REGIONS[B]
    else:
        dense, sparse = ASYNC_REGIONS[B]
    region = dense if kept > 0.05 else sparse
    if turned and region.DEPTH < 32:
        stages = max(region.STAGES * region.DEPTH // 32, 2)
        region = region._replace(DEPTH=32, STAGES=stages)
    most_groups = (limit - 2048) // (region.STAGES * region.GROUP_BYTES)  # beside the barriers
    return region._replace(GROUPS=min(region.GROUPS, most_groups))
