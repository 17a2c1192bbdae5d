"""forward and input-gradient: a tile of outputs times the blocks of w, line after line."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.conv.k2_tensor_core.boxes import in_box, spread, stand, tile_of
from numbsparse.kernels.conv.k2_tensor_core.lines import (
    ENOUGH,
    MOST_ROWS,
    MOST_TAPS,
)
from numbsparse.kernels.conv.k2_tensor_core.products import add_tap, store_tile, stored_as
from numbsparse.kernels.conv.k2_tensor_core.tiles import cut, line_units
from numbsparse.kernels.conv.k3_hopper.copies import block_map, box_rows, pixel_map, start_ring
from numbsparse.kernels.conv.walks import planned
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    elect,
    fence_tensor_map,
    first_multiple,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    sync_warp,
    tma_load_2d,
    tma_load_5d,
)

WARPS = {16: 1, 32: 1, 64: 1} if SIMULATED else {16: 8, 32: 8, 64: 8}
HEIGHTS = {16: 2, 32: 2, 64: 1}  # of a warp's tile, in 16 rows
STAGES = 2


def multiply_lines(product, x, values, index, window, y):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    size, dtype = values.shape[1], x.dtype.name
    sizes, out_sizes = window.big, window.small
    if product == "input_grad":
        sizes, out_sizes = out_sizes, sizes
    (batch, _, _), out_features = x.shape, y.shape[2]
    x, values, y = (a.view(np.uint16) for a in (x, values, y))
    y, stored = stored_as(y, out_features, size)
    lines = -(-out_features // size)
    for of in window.passes(product):
        height, warps = HEIGHTS[size], WARPS[size]
        outputs = batch * int(np.prod(of.counts))
        while height > 1 and -(-outputs // (16 * height * warps)) * lines < ENOUGH:
            height //= 2
        how = cut(of, batch, 16 * height * warps, MOST_TAPS[size], MOST_ROWS[size])
        plan = planned(index, window, line_units, product, of, how.box, how.chunks)
        tiles = int(np.prod(how.tiles))
        together = min(max(1, lines * tiles // ENOUGH), lines)  # lines of a block of threads
        rows = box_rows(how, size)
        stage = rows * size + MOST_TAPS[size] * size * size
        launch(
            line_kernel(dtype, size, height, warps, STAGES, product == "input_grad", stored),
            tiles * -(-lines // together), 32 * (warps + 1),
            pixel_map(x, sizes, how.images, how.box, size), block_map(values, size), batch,
            how.images, how.tile, how.box, rows, how.tiles, of.counts, of.step, of.first,
            out_sizes, *plan, together, y, out_features, stage,
            shared_bytes=STAGES * stage * 2 + 1024,
        )  # fmt: skip


@cache
def line_kernel(
    dtype: str, B: int, TA: int, WARPS: int, STAGES: int, turned: bool, stored: str
) -> Any:
    BM, WM, TB, SLOT = 16 * TA * WARPS, 16 * TA, B // 8, B * B
    ACC, BARS = (TA, TB, 4), 2 * STAGES
    add_products, begin_w = add_tap(dtype, B, TA, turned)
    store = store_tile(dtype, TA, TB, stored)
    limit = {} if SIMULATED else {"max_registers": 65536 // (2 * 32 * (WARPS + 1)) // 8 * 8}

    @cuda.jit(device=True)
    def produce(
        x_map, w_map, begin, end, image, top, images, box, rows, unit_other, unit_chunk, entry_ptr,
        entry_block, origins, ring, stage, bars,
    ):  # fmt: skip
        fence_tensor_map(x_map)
        fence_tensor_map(w_map)
        box_bytes = uint32(images * box[0] * box[1] * box[2] * (2 * B))
        at, phase = uint32(0), uint32(1)
        for unit in range(begin, end):
            entry, last = uint32(entry_ptr[unit]), uint32(entry_ptr[unit + 1])
            chunk = unit_chunk[unit]
            z, y = int32(top[0] + origins[chunk, 0]), int32(top[1] + origins[chunk, 1])
            x, c = int32(top[2] + origins[chunk, 2]), int32(unit_other[unit] * B)
            mbarrier_wait(bars, STAGES + at, phase)
            if elect() != 0:
                start = uint32(at * stage)
                count = uint32(last - entry)
                nbytes = uint32(count * uint32(2 * SLOT))
                mbarrier_expect(bars, at, nbytes + box_bytes if count > 0 else uint32(0))
                if count > 0:
                    tma_load_5d(ring, start, x_map, c, x, y, z, image, bars, at)
                    start = uint32(start + rows * B)
                    while entry < last:
                        tma_load_2d(ring, start, w_map, 0, int32(entry_block[entry] * B), bars, at)
                        start, entry = uint32(start + SLOT), uint32(entry + 1)
            at, phase = following(at, phase, STAGES)

    @cuda.jit(**limit)
    def kernel(
        x_map, w_map, batch, images, tile, box, rows, tiles, counts, step, first, out_sizes,
        unit_ptr, unit_line, unit_other, unit_chunk, entry_ptr, entry_block, entry_shift, origins,
        together, y, out_features, stage,
    ):  # fmt: skip
        whole = cuda.shared.array(0, uint16)
        # Stages, each a box of x and blocks of w; from where swizzled lines begin, because places
        # in them are worked out from there.
        ring = whole[first_multiple(whole, uint32(1024)) :]
        bars = cuda.shared.array(BARS, uint64)
        places = cuda.shared.array(BM, int64)
        out_rows = cuda.shared.array(BM, int32)
        lines = unit_ptr.size - 1
        groups = uint32((lines + together - 1) // together)
        line = uint32(cuda.blockIdx.x) % groups * together
        begin, end = unit_ptr[line], unit_ptr[min(line + together, lines)]
        image, top = tile_of(uint32(cuda.blockIdx.x) // groups, images, tile, tiles)
        spread(places, BM, images, tile)
        start_ring(bars, STAGES, WARPS)
        stand(out_rows, places, BM, image, batch, top, counts, step, first, out_sizes, 1)
        cuda.syncthreads()
        warp, lane = uint32(cuda.threadIdx.x) // 32, uint32(cuda.threadIdx.x) % 32
        if warp == WARPS:
            produce(
                x_map, w_map, begin, end, image, top, images, box, rows, unit_other, unit_chunk,
                entry_ptr, entry_block, origins, ring, stage, bars,
            )  # fmt: skip
            return
        acc = cuda.local.array(ACC, float32)
        row_of = cuda.local.array(TA, int32)
        own = warp * WM
        down, across = lane // 8 % 2, lane // 16
        for m in range(TA):
            row_of[m] = in_box(places[own + 16 * m + 8 * down + lane % 8], box)
            for n in range(TB):
                for i in range(4):
                    acc[m, n, i] = 0
        w_lane = uint32(rows * B + begin_w(0, 0))
        at, phase = uint32(0), uint32(0)
        for unit in range(begin, end):
            entry, last = uint32(entry_ptr[unit]), uint32(entry_ptr[unit + 1])
            coming = entry_shift[entry] if entry < last else int32(0)
            w_at, x_start = uint32(w_lane + at * stage), uint32(at * stage)
            mbarrier_wait(bars, at, phase)
            while entry < last:
                shift, entry = coming, uint32(entry + 1)
                if entry < last:  # under way while this tap is multiplied
                    coming = entry_shift[entry]
                add_products(ring, x_start, w_at, row_of, shift, across, acc)
                w_at = uint32(w_at + SLOT)
            sync_warp()
            if lane == 0:
                mbarrier_arrive(bars, STAGES + at)
            at, phase = following(at, phase, STAGES)
            line = unit_line[unit]
            if unit + 1 == end or unit_line[unit + 1] != line:
                store(acc, y, out_rows, own, line * B, out_features)
                for m in range(TA):
                    for n in range(TB):
                        for i in range(4):
                            acc[m, n, i] = 0

    return kernel
