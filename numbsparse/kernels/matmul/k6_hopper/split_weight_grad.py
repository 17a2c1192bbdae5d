"""The weight-gradient of float32 by `wgmma` of tf32.

wgmma takes its second factor from shared memory with the terms of the sum side by side, and dy has
them below each other. So some warps do nothing but split the tiles of dy into hi and lo and turn
them over, a step ahead of the warpgroups that multiply; one of them also asks the copy engine for
tiles. Nobody meets everybody: a stage of tiles has two barriers, the room for the images of a step
two more. Those who multiply take the registers that the others do not need.

Reads per output, for a sum of K products: K / N of x, where N is 32 or 64 columns, and K / 384 or
K / 256 of dy, which six or four products of 64 rows share. Columns that keep the same rows are
taken by pairs, so that N is 64 at B = 32 too. What limits it is shared memory, from which wgmma
reads 64 bytes of an image each cycle, beside what comes in and what is split; at N = 32 also the L2
cache: on an H200 the copies alone would take two thirds of the time, at N = 64 half of it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import SIMULATED, DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import BYTES, aligned_either_way
from numbsparse.kernels.matmul.k5_tensor_core.weight_grad import cut
from numbsparse.kernels.matmul.k6_hopper.split_items import (
    ALIGNED,
    HALVES,
    NT,
    POOL,
    TILE,
    Work,
    way_of,
)
from numbsparse.kernels.matmul.k6_hopper.split_roles import multiplier, supplier
from numbsparse.kernels.matmul.k6_hopper.split_sums import add_kernel, finisher
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    fence_mbarrier_init,
    fewer_registers,
    first_multiple,
    mbarrier_init,
    more_registers,
    shfl_idx,
)
from numbsparse.kernels.views import span


def weight_grad(
    x: DeviceArray, dy: DeviceArray, index: Any, dvalues: DeviceArray, precision: str
) -> None:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    (n_blocks, B, _), (batch, in_features), out_features = dvalues.shape, x.shape, dy.shape[1]
    if n_blocks == 0:
        return
    if batch == 0:
        fill(dvalues, 0)
        return
    swapped, work, *plan = planned(index, way_of, B)
    if swapped:
        x, dy, in_features, out_features = dy, x, out_features, in_features
    (x, x_turned), (dy, dy_turned) = aligned_either_way(x), aligned_either_way(dy)
    maps = tensor_maps(*((a, (NT, TILE), 4 * TILE) for a in (x, dy)))
    count = plan[0].shape[0]
    whole, pieces = cut(count, -(-batch // NT), 1)
    rest = count - whole
    parts = empty((rest * pieces * work.SUMS if rest else 1,), dvalues.dtype)
    exact, wide = precision == "highest", dvalues.address % BYTES == 0
    how = B, work, exact, wide, swapped, x_turned, dy_turned
    strides = (a.strides[0] // a.itemsize for a in (x, dy))
    sizes = (*strides, in_features, out_features, batch)
    operands = span(x), span(dy), sizes, *plan, span(dvalues), parts, whole, pieces
    grid, shared = whole + rest * pieces, POOL + ALIGNED
    launch(item_kernel(*how), grid, work.THREADS, maps, *operands, shared_bytes=shared)
    if rest:
        launch(add_kernel(*how), rest * HALVES, 128 * work.GROUPS, *operands)


@cache
def item_kernel(
    B: int, work: Work, exact: bool, wide: bool, swapped: bool, x_turned: bool, dy_turned: bool
) -> Any:
    STAGES, ROOMS, WARPS, TURNERS = work.STAGES, work.ROOMS, 4 * work.GROUPS, work.TURNERS
    BARRIERS = 2 * (STAGES + ROOMS)
    COUNT, LANES, STRIPS = work.PER_LANE, 128 * work.GROUPS, work.N // 8
    ACC = HALVES, STRIPS, 4
    MORE, FEWER = work.REGISTERS
    supply = supplier(work, exact, x_turned, dy_turned)
    multiply = multiplier(work, exact, x_turned)
    finish = finisher(B, work, exact, wide, swapped, x_turned, dy_turned)
    options = {} if SIMULATED else {"launch_bounds": (work.THREADS, 1)}

    @cuda.jit(**options)
    def kernel(
        maps, x, dy, sizes, tiles, images, columns, extents, targets, dvalues, parts, whole, pieces
    ):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        bars = cuda.shared.array(BARRIERS, uint64)  # stages full and empty, rooms full and empty
        base = first_multiple(shared, ALIGNED)
        t = uint32(cuda.threadIdx.x)
        if t == 0:
            for i in range(STAGES):
                mbarrier_init(bars, i, 1)
                mbarrier_init(bars, STAGES + i, WARPS + TURNERS)
            for i in range(ROOMS):
                mbarrier_init(bars, 2 * STAGES + i, TURNERS)
                mbarrier_init(bars, 2 * STAGES + ROOMS + i, WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()
        item, piece, of = int64(cuda.blockIdx.x), int64(0), int64(1)
        if item >= whole:
            cut_items = tiles.shape[0] - whole
            piece, of = (item - whole) // cut_items, pieces
            item = whole + (item - whole) % cut_items
        all_steps = (sizes[4] + NT - 1) // NT
        first = all_steps * piece // of
        steps = int32(all_steps * (piece + 1) // of - first)
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            fewer_registers(FEWER)
            row = int32(first * NT)
            plan = tiles, columns, extents
            supply(uint32(warp - WARPS), maps, plan, item, row, steps, shared, base, bars)
        else:
            more_registers(MORE)
            acc = cuda.local.array(ACC, float32)
            for m in range(HALVES):
                for i in range(STRIPS):
                    for k in range(4):
                        acc[m, i, k] = 0
            multiply(warp, images, extents, item, steps, base, bars, acc)
            if of > 1:
                for m in range(HALVES):
                    at = (((item - whole) * pieces + piece) * HALVES + m) * (COUNT * LANES) + t
                    for i in range(STRIPS):
                        for k in range(4):
                            parts[at + (4 * i + k) * LANES] = acc[m, i, k]
            else:
                where = tiles, images, columns, targets
                for m in range(HALVES):
                    finish(acc[m], m, t, (x, dy, sizes), where, item, dvalues)

    return kernel
