"""forward and input-gradient: a tile of outputs times the blocks of w, line after line."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.conv.k2_tensor_core import products, singles
from numbsparse.kernels.conv.k2_tensor_core.boxes import (
    fetch_blocks,
    fetch_rows,
    in_box,
    see,
    spread,
    stand,
    tile_of,
)
from numbsparse.kernels.conv.k2_tensor_core.tiles import cut, line_units
from numbsparse.kernels.conv.walks import planned
from numbsparse.kernels.matmul.aligned import aligned_rows
from numbsparse.kernels.parts import fragments as halves
from numbsparse.kernels.parts.fragments_tf32 import places as single_places
from numbsparse.kernels.ptx import ALIGNMENT, cp_async_commit, cp_async_wait
from numbsparse.kernels.views import span

WARPS = {16: 1, 32: 1, 64: 1} if SIMULATED else {16: 4, 32: 8, 64: 4}
MOST_TAPS = {16: 9, 32: 9, 64: 3}  # of a chunk
MOST_ROWS = {16: 1024, 32: 768, 64: 384}  # of a box: 32 to 48 KB
HEIGHTS = {16: 4, 32: 2, 64: 2}  # of a warp's tile, in 16 rows
SINGLE_TAPS = {16: 9, 32: 3, 64: 1}
SINGLE_ROWS = {16: 768, 32: 384, 64: 192}
SINGLE_HEIGHTS = {16: 2, 32: 2, 64: 1}
STAGES = 2
ENOUGH = 512  # blocks of threads: fewer take smaller tiles


class Limits(NamedTuple):
    """Of a chunk's taps, a box's rows, and a warp's tile in 16 rows."""

    taps: int
    rows: int
    height: int


def limits_of(arithmetic: str, B: int) -> Limits:
    if arithmetic in halves.MMA:
        return Limits(MOST_TAPS[B], MOST_ROWS[B], HEIGHTS[B])
    return Limits(SINGLE_TAPS[B], SINGLE_ROWS[B], SINGLE_HEIGHTS[B])


def multiply_lines(product, x, values, index, window, y, arithmetic):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    size, limits = values.shape[1], limits_of(arithmetic, values.shape[1])
    sizes, out_sizes = window.big, window.small
    if product == "input_grad":
        sizes, out_sizes = out_sizes, sizes
    (batch, _, in_features), out_features = x.shape, y.shape[2]
    if not batch:
        return
    if x.itemsize == 2:
        x, values, y = (a.view(np.uint16) for a in (x, values, y))
    x, stride = aligned_rows(x.reshape(-1, in_features))
    values, _ = aligned_rows(values.reshape(-1, size))
    y, stored = products.stored_as(y, out_features, size)
    turned, edge, warps = product == "input_grad", in_features % size > 0, WARPS[size]
    lines = -(-out_features // size)
    for of in window.passes(product):
        height, outputs = limits.height, batch * int(np.prod(of.counts))
        while height > 1 and -(-outputs // (16 * height * warps)) * lines < ENOUGH:
            height //= 2
        how = cut(of, batch, 16 * height * warps, limits.taps, limits.rows)
        plan = planned(index, window, line_units, product, of, how.box, how.chunks)
        tiles = int(np.prod(how.tiles))
        together = min(max(1, lines * tiles // ENOUGH), lines)  # lines of a block of threads
        stage = how.rows * size + limits.taps * size * size
        launch(
            line_kernel(arithmetic, size, height, warps, STAGES, turned, edge, stored),
            tiles * -(-lines // together), 32 * warps,
            x, stride, in_features, span(values), batch,
            how.images, how.tile, how.box, how.rows, how.tiles,
            of.counts, of.step, of.first, of.scale, sizes, out_sizes, *plan, together,
            y, out_features, stage,
            shared_bytes=STAGES * stage * values.itemsize,
        )  # fmt: skip


@cache
def line_kernel(
    arithmetic: str,
    B: int,
    TA: int,
    WARPS: int,
    STAGES: int,
    turned: bool,
    edge: bool,
    stored: str,
) -> Any:
    THREADS, BM, WM, TB = 32 * WARPS, 16 * TA * WARPS, 16 * TA, B // 8
    SLOT, ROWS = B * B, limits_of(arithmetic, B).rows
    AHEAD, PENDING, ACC = STAGES - 1, STAGES - 2, (TA, TB, 4)
    HALVES = arithmetic in halves.MMA
    UNITS, ITEM, PIECE = (TA, uint16, halves.PIECE) if HALVES else (2 * TA, float32, singles.PIECE)
    PIECES = B // PIECE
    if HALVES:
        add_products, begin_w = products.add_tap(arithmetic, B, TA, turned)
        store = products.store_tile(arithmetic, TA, TB, stored)
        x_place = w_place = halves.places(PIECES)[0]
    else:
        add_products, begin_w = singles.add_tap(arithmetic, B, TA, turned)
        store = singles.store_tile(TA, TB, stored == "whole" and TB % 4 == 0)
        x_place = singles.places_in_rows(PIECES)
        w_place = single_places(PIECES, turned, TB)[0]
    fetch_x = fetch_rows(B, THREADS, PIECE, x_place)
    fetch_w = fetch_blocks(B, THREADS, turned, edge, PIECE, w_place)

    @cuda.jit(device=True)
    def line_of(u, lane):
        """The row of a tile that a lane reads."""
        if HALVES:
            return 16 * u + 8 * (lane // 8 % 2) + lane % 8
        return 8 * u + lane // 4

    @cuda.jit
    def kernel(
        x, stride, in_features, values, batch, images, tile, box, box_rows, tiles, counts, step,
        first, scale, sizes, out_sizes, unit_ptr, unit_line, unit_other, unit_chunk, entry_ptr,
        entry_block, entry_shift, origins, together, y, out_features, stage,
    ):  # fmt: skip
        ring = cuda.shared.array(0, ITEM, ALIGNMENT)  # stages, each a box of x and blocks of w
        rows = cuda.shared.array(ROWS, int32)
        places = cuda.shared.array(ROWS, int64)  # of the tile's outputs, then of the box's pixels
        out_rows = cuda.shared.array(BM, int32)
        acc = cuda.local.array(ACC, float32)
        base = cuda.local.array(UNITS, int32)
        lines = unit_ptr.size - 1
        groups = (lines + together - 1) // together
        line = cuda.blockIdx.x % groups * together
        begin, end = unit_ptr[line], unit_ptr[min(line + together, lines)]
        image, top = tile_of(cuda.blockIdx.x // groups, images, tile, tiles)
        spread(places, BM, images, tile)
        cuda.syncthreads()
        stand(out_rows, places, BM, image, batch, top, counts, step, first, out_sizes, 1)

        lane = uint32(cuda.threadIdx.x) % 32
        own = uint32(cuda.threadIdx.x) // 32 * WM
        across = lane // 16 if HALVES else lane % 4
        for u in range(UNITS):
            base[u] = in_box(places[own + line_of(u, lane)], box)
        for m in range(TA):
            for n in range(TB):
                for i in range(4):
                    acc[m, n, i] = 0
        cuda.syncthreads()
        spread(places, box_rows, images, box)
        w_lane = box_rows * B + begin_w(0, 0)
        seen = -1  # the chunk whose box `rows` names
        now = then = int64(0)  # where the stages start that are multiplied and fetched
        for unit in range(begin - AHEAD, end):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = unit + AHEAD
            if coming < end:
                entry = entry_ptr[coming]
                count = entry_ptr[coming + 1] - entry
                if count > 0:
                    chunk = unit_chunk[coming]
                    if chunk != seen:
                        see(
                            rows, places, box_rows, image, batch, top, scale, origins[chunk], sizes,
                            stride // PIECE,
                        )  # fmt: skip
                        seen = chunk
                        cuda.syncthreads()
                    c = unit_other[coming] * B
                    fetch_x(x, in_features, c, rows, box_rows, ring, then)
                    inside = in_features - c if edge else B
                    at = then + box_rows * B
                    fetch_w(values, entry_block, entry, count, inside, ring, at)
                then = then + stage if then + stage < STAGES * stage else 0
            cp_async_commit()
            if unit >= begin:
                entry, last = uint32(entry_ptr[unit]), uint32(entry_ptr[unit + 1])
                x_start, w_at = uint32(now), uint32(now + w_lane)
                coming_shift = entry_shift[entry] if entry < last else int32(0)
                while entry < last:
                    shift, entry = coming_shift, uint32(entry + 1)
                    if entry < last:  # under way while this tap is multiplied
                        coming_shift = entry_shift[entry]
                    add_products(ring, x_start, w_at, base, shift, across, acc)
                    w_at = uint32(w_at + SLOT)
                now = now + stage if now + stage < STAGES * stage else 0
                line = unit_line[unit]
                if unit + 1 == end or unit_line[unit + 1] != line:
                    store(acc, y, out_rows, own, line * B, out_features)
                    for m in range(TA):
                        for n in range(TB):
                            for i in range(4):
                                acc[m, n, i] = 0

    return kernel
