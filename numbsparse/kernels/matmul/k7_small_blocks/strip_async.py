"""Strips by `cp.async`: all warps fetch, and wait for each other after every stage."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import shared_memory
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned_either_way, aligned_rows
from numbsparse.kernels.matmul.k6_hopper.lines import how_it_lies as order_of
from numbsparse.kernels.matmul.k6_hopper.steps import schedule
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    ALIGNED,
    PIECE,
    WARP_COLUMNS,
    Strip,
    plan_strips,
    steps_in_strips,
)
from numbsparse.kernels.matmul.k7_small_blocks.strip_products import clear_zeros, packed, products
from numbsparse.kernels.matmul.k7_small_blocks.strip_store import storer
from numbsparse.kernels.matmul.k7_small_blocks.strips import of_bits, registers, warps_for
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.parts.swizzle import PERIOD
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
    first_multiple,
)
from numbsparse.kernels.views import span


def along_strips(x: Any, values: Any, index: Any, y: Any, transposed: bool) -> None:
    """y[:] = x @ w, or with w transposed."""
    B, (batch, features), columns = values.shape[1], x.shape, y.shape[1]
    if batch == 0 or columns == 0:
        return
    if values.shape[0] == 0:
        fill(y, 0)
        return
    strip = strip_of(index, B, transposed, columns)
    plan = planned(index, plan_strips, transposed, features, strip)
    lengths, lines, groups, begins, words, pieces = plan
    row_tiles = -(-batch // strip.ROWS)
    n_tiles = len(lengths.steps) * row_tiles
    tiles, _ = planned(index, schedule, lengths, row_tiles, n_tiles)
    summed = index.block_columns if transposed else index.block_rows
    w = packed(values, pieces, summed, features, transposed)
    x, x_turned = aligned_either_way(of_bits(x))
    launch(
        async_kernel(y.dtype.name, strip, x_turned, order_of(y)),
        n_tiles,
        32 * strip.WARPS,
        *aligned_rows(x),
        *(features, w, words, begins, groups, lines, tiles, of_bits(span(y))),
        (*(stride // y.itemsize for stride in y.strides), batch, columns),
        shared_bytes=strip.SHARED_BYTES,
    )


def strip_of(index: Any, B: int, transposed: bool, columns: int) -> Strip:
    warps = warps_for(columns, 2)
    limit = (shared_memory() or 65 * 1024) - 1024
    width = warps * WARP_COLUMNS
    _, mean, most = planned(index, steps_in_strips, B, transposed, width, 32, 16 // B)
    for groups in (8, 4, 2, 1):
        steps = max(most, min(round(1.15 * groups * mean), 256))
        steps = -(-steps // ALIGNED) * ALIGNED
        strip = Strip(B, 64, warps, 32, groups, steps, 3)
        if limit >= strip.SHARED_BYTES:
            break
    return strip._replace(STAGES=2 if SIMULATED else limit // strip.STAGE_BYTES)


@cache
def async_kernel(name: str, strip: Strip, x_turned: bool, y_lies: str) -> Any:
    ROWS, WARPS, GROUPS, STAGES = strip.ROWS, strip.WARPS, strip.GROUPS, strip.STAGES
    AHEAD, PENDING, PIECES = STAGES - 1, STAGES - 2, lines_of(strip, x_turned).PIECES
    LANES = PIECES * GROUPS
    STAGE_BYTES, SUMS = strip.STAGE_BYTES, strip.ROWS
    add_stage, store = products(strip, name, x_turned), storer(strip, name, False, x_turned, y_lies)
    fetch_x, fetch_w = fetch_groups(strip, x_turned), fetch_steps(strip)
    clear = clear_zeros(strip, 32 * WARPS)

    @cuda.jit(**registers(WARPS))
    def kernel(x, stride, features, w, words_of, begins, groups, lines, tiles, y, sizes):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        base = first_multiple(shared, PERIOD)
        acc = cuda.local.array(SUMS, float32)
        for k in range(SUMS):
            acc[k] = 0
        clear(words, base)
        t = uint32(cuda.threadIdx.x)
        warp = t // 32
        i = cuda.blockIdx.x
        top, first, stages = int64(tiles[i, 1]) * ROWS, tiles[i, 2], tiles[i, 3] - tiles[i, 2]

        # What the next stages are is read a stage ahead, at places that stay within 32 bits.
        group_at, begin_at = uint32(first * GROUPS + t % LANES // PIECES), uint32(first)
        group, begin, end = groups[group_at], begins[begin_at], begins[uint32(begin_at + 1)]
        rows = int32(min(sizes[2] - top, ROWS))
        line, piece = int64(t // LANES), t % PIECES * PIECE  # of a group, this thread's first
        own = line * stride + top + piece if x_turned else (top + line) * stride + piece
        stage, fetched = int32(0), int32(0)
        for s in range(int32(-AHEAD), stages):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            if s + AHEAD < stages:
                start = uint32(base + fetched * STAGE_BYTES)
                fetch_x(x, own, stride, rows, group, int32(features), shared, start)
                fetch_w(
                    words_of, w, int32(first + s + AHEAD), begin, int32(end - begin), shared, start
                )
                fetched = int32(fetched + 1) if fetched < STAGES - 1 else int32(0)
                group_at, begin_at = uint32(group_at + GROUPS), uint32(begin_at + 1)
                group, begin, end = groups[group_at], end, begins[uint32(begin_at + 1)]
            cp_async_commit()
            if s >= 0:
                add_stage(shared, words, uint32(base + stage * STAGE_BYTES), warp, acc)
                stage = int32(stage + 1) if stage < STAGES - 1 else int32(0)
        store(acc, tiles[i, 0], warp, top, (lines, y, sizes))

    return kernel


class Lines(NamedTuple):
    """How a group lies: so many lines, and pieces of 16 bytes in each."""

    COUNT: int
    PIECES: int


def lines_of(strip: Strip, x_turned: bool) -> Lines:
    """Rows of x; or features where it is feature-major."""
    if x_turned:
        return Lines(strip.WIDTH, strip.ROWS // PIECE)
    return Lines(strip.ROWS, strip.WIDTH // PIECE)


@cache
def fetch_groups(strip: Strip, x_turned: bool) -> Any:
    """The groups of the next stage; 0 beyond the edges of x."""
    WIDTH, GROUPS, X_START, GROUP_BYTES = (
        strip.WIDTH, strip.GROUPS, strip.X_START, strip.GROUP_BYTES
    )  # fmt: skip
    COUNT, PIECES = lines_of(strip, x_turned)
    ALIKE, LANES = 8 // PIECES, PIECES * GROUPS
    AT_ONCE = min(32 * strip.WARPS // LANES, COUNT)  # lines

    @cuda.jit(device=True)
    def fetch(x, own, stride, rows, group, features, shared, start):
        t = uint32(cuda.threadIdx.x)
        if group >= 0 and t < AT_ONCE * LANES:
            first = int32(group * WIDTH)
            left, lines = int32(features - first), rows
            if x_turned:
                left, lines = rows, left
            inside = int32(left - t % PIECES * PIECE)
            n = uint32(2 * min(max(inside, int32(0)), int32(PIECE)))
            to = start + X_START + t % LANES // PIECES * GROUP_BYTES
            source = own + (first * stride if x_turned else first)
            for i in range(COUNT // AT_ONCE):
                line = t // LANES + i * AT_ONCE
                at, m = (source, n) if line < lines else (0, uint32(0))
                swizzled = line * PIECES + (t % PIECES ^ line // ALIKE % PIECES)
                cp_async_zero_fill(shared, to + swizzled * 16, x, at, m)
                source += AT_ONCE * stride

    return fetch


@cache
def fetch_steps(strip: Strip) -> Any:
    """First in a stage of the ring: its words, then the values of its steps."""
    THREADS, W_START, STEP = 32 * strip.WARPS, strip.W_START, strip.STEP_BYTES // 16
    HEAD, TIMES = strip.HEAD, -(-strip.STEPS * STEP // THREADS)

    @cuda.jit(device=True)
    def fetch(words_of, w, number, begin, many, shared, start):
        t = int32(cuda.threadIdx.x)
        left = int32(many * STEP - t)
        source = int64(begin) * (4 * STEP) + t * 4
        first = int64(begin) + number * HEAD
        for i in range(t, (HEAD + many) // ALIGNED, THREADS):
            cp_async(shared, start + i * 16, words_of, first + i * ALIGNED)
        for i in range(TIMES):
            if left > int32(i * THREADS):
                to = start + W_START + (t + i * THREADS) * 16
                cp_async(shared, to, w, source + i * (THREADS * 4))

    return fetch
