"""Regions by `cp.async`: all warps fetch, and wait for each other after every stage."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint8, uint32

from numbsparse.kernels.matmul.k7_small_blocks.card import registers
from numbsparse.kernels.matmul.k7_small_blocks.region import GROUP, Region
from numbsparse.kernels.matmul.k7_small_blocks.region_products import (
    LINE,
    places_of_lane,
    products,
)
from numbsparse.kernels.matmul.k7_small_blocks.region_store import storer
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import PIECE, SWIZZLED
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
    first_multiple,
)


@cache
def async_kernel(B: int, name: str, region: Region) -> Any:
    WARPS, SLOTS, GROUPS, DEPTH, STAGES = region[:5]
    AHEAD, PENDING, LINES = STAGES - 1, STAGES - 2, lines_of(region)
    STAGE_BYTES, SUMS = region.STAGE_BYTES, SLOTS * B // 2
    place, store = places_of_lane(B, region), storer(B, name, region)
    fetch, add_stage = fetch_rows(region), products(B, name, region)

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

        # The part of a row that this thread fetches: 8 of the features of one group.
        group, line = groups[item * GROUPS + t // LINE % GROUPS], t // LINE // GROUPS
        of_dy = group % 2 == 1
        c = int64(group // 2) * GROUP + t % LINE * PIECE
        n = uint32(2 * min(max((sides[1] if of_dy else sides[0]) - c, 0), PIECE))
        stride = dy_stride if of_dy else x_stride
        source = (first * DEPTH + line) * stride + c
        mine = group >= 0 and line < LINES
        for step in range(-AHEAD, steps):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps and mine:
                start = base + uint32(coming) % STAGES * STAGE_BYTES
                left = batch - (first + coming) * DEPTH
                if of_dy:
                    fetch(dy, source, stride, n, left, shared, start)
                else:
                    fetch(x, source, stride, n, left, shared, start)
                source += DEPTH * stride
            cp_async_commit()
            if step >= 0:
                add_stage(shared, code, uint32(base + step % STAGES * STAGE_BYTES), acc)
        cp_async_wait(0)
        cuda.syncthreads()  # the ring is free
        places = blocks, rows, columns, sides
        store(acc, words, item, partial, useds, places, partials, dvalues)

    return kernel


def lines_of(region: Region) -> int:
    """Rows of x and dy that the threads fetch at once: a power of two."""
    lines = 1
    while 2 * lines * region.GROUPS * LINE <= 32 * region.WARPS:
        lines *= 2
    return lines


@cache
def fetch_rows(region: Region) -> Any:
    """A piece of every row of a stage that this thread fetches; 0 beyond the last of `left`."""
    GROUPS, GROUP_BYTES = region.GROUPS, region.GROUP_BYTES
    LINES = lines_of(region)
    COUNT = region.DEPTH // LINES

    @cuda.jit(device=True)
    def fetch(x, source, stride, n, left, shared, start):
        t = uint32(cuda.threadIdx.x)
        first, group = t // LINE // GROUPS, t // LINE % GROUPS
        for i in range(COUNT):
            line = first + i * LINES
            at, m = (source, n) if line < left else (0, uint32(0))
            swizzled = line * LINE + (t ^ line) % LINE
            cp_async_zero_fill(shared, start + group * GROUP_BYTES + swizzled * 16, x, at, m)
            source += LINES * stride

    return fetch
