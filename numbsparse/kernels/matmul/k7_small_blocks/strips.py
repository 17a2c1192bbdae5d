"""y = x @ w: every strip of columns reads each feature of x that it needs once.

A block of threads holds ROWS x (32 WARPS) values of y in registers. The features of x pass through
a ring in shared memory, beside the blocks of w that meet them, and each warp multiplies those that
its own 32 columns keep. The copy engine fills the ring where there is one, else the threads do.
"""

from __future__ import annotations

from typing import Any

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine, multiprocessors, shared_memory
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned_either_way, aligned_rows
from numbsparse.kernels.matmul.k7_small_blocks.card import map_of
from numbsparse.kernels.matmul.k7_small_blocks.pack import packed
from numbsparse.kernels.matmul.k7_small_blocks.strip_async import async_kernel
from numbsparse.kernels.matmul.k7_small_blocks.strip_bulk import bulk_kernel
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    ALIGNED,
    WARP_COLUMNS,
    Strip,
    plan_strips,
    steps_in_strips,
)
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.store import order_of as how_it_lies
from numbsparse.kernels.views import span


def along_strips(x: Any, values: Any, index: Any, y: Any, turned: bool) -> None:
    """y[:] = x @ w, or with w turned."""
    name, B = y.dtype.name, values.shape[1]
    (batch, features), columns = x.shape, y.shape[1]
    if batch == 0 or columns == 0:
        return
    if values.shape[0] == 0:
        fill(y, 0)
        return
    strip = strip_of(index, B, turned, columns)
    plan = planned(index, plan_strips, turned, features, strip)
    lengths, lines, groups, begins, words, halves = plan
    row_tiles = -(-batch // strip.ROWS)
    tiles_in_all = len(lengths.steps) * row_tiles
    units = multiprocessors() // strip.CLUSTER if copy_engine() else tiles_in_all
    tiles, tile_starts = planned(index, schedule, lengths, row_tiles, units)
    block_lines = index.block_columns if turned else index.block_rows
    w = packed(values.view("uint16"), halves, block_lines, features, turned)
    walk = w, words, begins, groups, lines, tiles
    strides = (stride // y.itemsize for stride in y.strides)
    into = span(y).view("uint16"), (*strides, batch, columns)
    lies, shared = how_it_lies(y), strip.SHARED_BYTES
    x, x_turned = aligned_either_way(x.view("uint16"))
    if copy_engine():
        x_map = map_of(x, strip.rows_of_box(x_turned), strip.WIDTH, x_turned)
        kernel = bulk_kernel(name, strip, x_turned, lies)
        threads = 32 * (strip.WARPS + strip.FETCHERS)
        blocks = (tile_starts.size - 1) * strip.CLUSTER
        cluster = (strip.CLUSTER,) if strip.CLUSTER > 1 else None
        args = x_map, *walk, tile_starts, *into
        launch(kernel, blocks, threads, *args, shared_bytes=shared, cluster=cluster)
    else:
        kernel, threads = async_kernel(name, strip, x_turned, lies), 32 * strip.WARPS
        rows = aligned_rows(x)
        launch(kernel, tiles_in_all, threads, *rows, features, *walk, *into, shared_bytes=shared)


def warps_for(columns: int) -> int:
    """A strip is as wide as y is, up to 512 columns if shared memory holds them."""
    most = 4 if SIMULATED else 8 if (shared_memory() or 0) < 160 * 1024 else 16
    warps = 1
    while warps < most and warps * WARP_COLUMNS < columns:
        warps *= 2
    return warps


def strip_of(index: Any, B: int, turned: bool, columns: int) -> Strip:
    """As many groups to a stage, with room for their steps, as leave three stages; or four where a
    stage has few steps for a warp, and warps get ahead of each other.

    Two strips share their groups in a cluster if they need much the same.
    """
    warps = warps_for(columns)
    width, limit = warps * WARP_COLUMNS, (shared_memory() or 65 * 1024) - 1024  # beside barriers
    kept, mean, most = planned(index, steps_in_strips, B, turned, width, 32, 16 // B)
    stages, cluster = 3, 1
    if kept < {8: 0.06, 16: 0.25}[B] and copy_engine():
        stages = 4 if B == 16 else 3
        in_two, *_ = planned(index, steps_in_strips, B, turned, 2 * width, 32, 16 // B)
        cluster = 2 if columns >= 2 * width and in_two > 0.7 * kept else 1
    for groups in (14, 8, 6, 4, 3, 2, 1) if copy_engine() else (8, 4, 2, 1):
        steps = max(most, min(round(1.15 * groups * mean), 256))
        steps = -(-steps // ALIGNED) * ALIGNED
        strip = Strip(B, 64, warps, 32, groups, steps, stages, cluster)
        if limit >= strip.SHARED_BYTES:
            break
    return strip._replace(STAGES=2 if SIMULATED else limit // strip.STAGE_BYTES)
