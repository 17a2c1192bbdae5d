"""Regions by `cp.async`: all warps fetch, and wait for each other after every stage."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint8, uint32

from numbsparse.kernels.matmul.k7_small_blocks.card import registers
from numbsparse.kernels.matmul.k7_small_blocks.region import GROUP, Region, Turned
from numbsparse.kernels.matmul.k7_small_blocks.region_products import (
    LINE,
    places_of_lane,
    products,
)
from numbsparse.kernels.matmul.k7_small_blocks.region_store import storer
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE, SWIZZLED
from numbsparse.kernels.parts.copies import bytes_of
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
    first_multiple,
)


@cache
def async_kernel(B: int, name: str, region: Region, turned: Turned) -> Any:
    WARPS, SLOTS, GROUPS, DEPTH, STAGES = region[:5]
    AHEAD, PENDING, LINES = STAGES - 1, STAGES - 2, lines_of(region)
    STAGE_BYTES, SUMS = region.STAGE_BYTES, SLOTS * B // 2
    place, store = places_of_lane(B, region, turned), storer(B, name, region)
    fetch_x, fetch_dy = fetch_group(region, turned.x), fetch_group(region, turned.dy)
    add_stage = products(B, name, region, turned)

    @cuda.jit(**registers(WARPS))
    def kernel(
        x, x_stride, dy, dy_stride, batch, segments, groups, codes, useds, blocks, rows, columns,
        sides, partials, dvalues,
    ):  # fmt: skip
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        base = first_multiple(shared, SWIZZLED)
        acc = cuda.local.array(SUMS, float32)
        code = cuda.local.array(SLOTS, uint32)
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        item, piece = segments[4 * cuda.blockIdx.x], segments[4 * cuda.blockIdx.x + 1]
        pieces, partial = segments[4 * cuda.blockIdx.x + 2], segments[4 * cuda.blockIdx.x + 3]
        for p in range(SLOTS):
            code[p] = place(codes[(item * WARPS + warp) * SLOTS + p], lane)
        for i in range(SUMS):
            acc[i] = 0
        chunks = (batch + DEPTH - 1) // DEPTH
        first = chunks * piece // pieces
        steps = chunks * (piece + 1) // pieces - first

        group = groups[item * GROUPS + t // LINE % GROUPS]
        mine, feature = group >= 0 and t // LINE // GROUPS < LINES, int64(group // 2) * GROUP
        for step in range(-AHEAD, steps):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps and mine:
                start = base + uint32(coming) % STAGES * STAGE_BYTES
                row = (first + coming) * DEPTH
                if group % 2 == 1:
                    fetch_dy(dy, dy_stride, row, batch, feature, sides[1], shared, start)
                else:
                    fetch_x(x, x_stride, row, batch, feature, sides[0], shared, start)
            cp_async_commit()
            if step >= 0:
                add_stage(shared, code, uint32(base + step % STAGES * STAGE_BYTES), acc)
        cp_async_wait(0)
        cuda.syncthreads()  # the ring is free
        places = blocks, rows, columns, sides
        store(acc, words, item, partial, useds, places, partials, dvalues)

    return kernel


def lines_of(region: Region) -> int:
    """Lines of 128 bytes that the threads fetch at once of each group: a power of two."""
    lines = 1
    while 2 * lines * region.GROUPS * LINE <= 32 * region.WARPS:
        lines *= 2
    return lines


@cache
def fetch_group(region: Region, turned: bool) -> Any:
    """What this thread fetches of a stage: pieces of 16 bytes of one group, from row `row` of the
    batch and feature `feature` on; 0 beyond the batch and the `side`."""
    GROUPS, GROUP_BYTES, LINES = region.GROUPS, region.GROUP_BYTES, lines_of(region)
    COUNT, IN_LINE = region.DEPTH // LINES, region.DEPTH // PIECE  # pieces of a feature
    TOGETHER, n_bytes = LINE // IN_LINE, bytes_of(PIECE)  # features of 128 bytes

    @cuda.jit(device=True)
    def fetch_rows(x, stride, row, batch, feature, side, shared, start):
        t = uint32(cuda.threadIdx.x)
        first, group = t // LINE // GROUPS, t // LINE % GROUPS
        c = feature + int64(t % LINE * PIECE)
        source, n = (row + int64(first)) * stride + c, n_bytes(side - c)
        for i in range(COUNT):
            line = first + i * LINES
            at, m = (source, n) if row + line < batch else (0, uint32(0))
            swizzled = line * LINE + (t ^ line) % LINE
            cp_async_zero_fill(shared, start + group * GROUP_BYTES + swizzled * 16, x, at, m)
            source += LINES * stride

    @cuda.jit(device=True)
    def fetch_columns(x, stride, row, batch, feature, side, shared, start):
        t = uint32(cuda.threadIdx.x)
        first, group, piece = t // LINE // GROUPS, t // LINE % GROUPS, t % IN_LINE
        begin, within = row + int64(piece * PIECE), t % LINE // IN_LINE
        n = n_bytes(batch - begin)
        for i in range(COUNT):
            line = first + i * LINES
            own = feature + int64(line * TOGETHER + within)
            at, m = (own * stride + begin, n) if own < side else (0, uint32(0))
            swizzled = line * LINE + within * IN_LINE + (piece ^ line % IN_LINE)
            cp_async_zero_fill(shared, start + group * GROUP_BYTES + swizzled * 16, x, at, m)

    return fetch_columns if turned else fetch_rows
