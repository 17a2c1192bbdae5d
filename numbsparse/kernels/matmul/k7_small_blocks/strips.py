"""y = x @ w: every strip of columns reads each feature of x that it needs once.

A block of threads holds ROWS x (32 WARPS) values of y in registers. The features of x pass through
a ring in shared memory, beside the blocks of w that meet them, and each warp multiplies those that
its own 32 columns keep.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint16, uint32

from numbsparse.device import DeviceArray
from numbsparse.device.launch import launch
from numbsparse.kernels.matmul.aligned import aligned_rows
from numbsparse.kernels.matmul.k7_small_blocks.card import MMA, PAIR, registers, shared_memory
from numbsparse.kernels.matmul.k7_small_blocks.pack import packed
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    ALIGNED,
    COUNT_BITS,
    GROUP,
    PIECE,
    WARP_COLUMNS,
    Strip,
    kept_in_strips,
    most_steps,
    plan_strips,
)
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    cp_async_zero_fill,
    ldmatrix_x4,
    load_4xu32,
    store_4xu32,
)


def along_strips(x: Any, values: Any, index: Any, y: Any, turned: bool) -> None:
    """y[:] = x @ w, or with w turned."""
    name, B = y.dtype.name, values.shape[1]
    (batch, features), columns = x.shape, y.shape[1]
    (kept,) = planned(index, kept_in_strips, B, turned, min(512, -(-columns // B) * B))
    strip = strip_of(columns, kept)
    plan = planned(index, plan_strips, B, turned, features, strip)
    *walk, steps, halves = plan
    lines = index.block_columns if turned else index.block_rows
    w = packed(values.view("uint16"), halves, lines, features, turned)
    y = y.view("uint16")
    launch(
        strip_kernel(B, name, strip, store_of(y)),
        walk[0].size * -(-batch // strip.ROWS),
        32 * strip.WARPS,
        *aligned_rows(x.view("uint16")),
        features,
        *walk,
        steps,
        w,
        y,
        shared_bytes=shared_bytes(B, strip),
    )


def strip_of(columns: int, kept: float) -> Strip:
    """As wide as y is, up to 512 columns if shared memory holds them: x is read once per strip.

    Where few blocks are kept a stage has more features of x, where many are more room for w.
    """
    limit = shared_memory() or 0
    most = 8 if 0 < limit < 160 * 1024 else 16
    warps = 1
    while warps < most and warps * WARP_COLUMNS < columns:
        warps *= 2
    if limit < 200 * 1024:
        return Strip(64, warps, 256, 1, 2)
    if kept > 0.25:
        return Strip(64, warps, 256, 2, 2)
    return Strip(64, warps, 512, 1, 2) if kept < 0.05 and warps > 1 else Strip(64, warps, 256, 1, 3)


def shared_bytes(B: int, strip: Strip) -> int:
    return 2 * strip.STAGES * stage_sizes(B, strip)[1]


def stage_sizes(B: int, strip: Strip) -> tuple[int, int]:
    """16-bit items of w in a stage of the ring, and of all of it.

    The steps of w come first, where each stands and then their values, and then the rows of x: a
    warp reads one step ahead, and beyond the last it finds what stays as long as the stage does.
    """
    w = most_steps(B, strip) * (16 * B + 2)
    return w, w + strip.ROWS * (strip.FEATURES + PIECE)


def store_of(y: DeviceArray) -> str:
    """How rows of y are written: 16 bytes at once, or one value, along rows or down columns."""
    if y.is_contiguous and y.shape[1] % PIECE == 0 and y.address % 16 == 0:
        return "wide"
    return "rows" if y.strides[1] == y.itemsize else "columns"


@cache
def strip_kernel(B: int, name: str, strip: Strip, store: str) -> Any:
    ROWS, WARPS, FEATURES, _, STAGES = strip
    THREADS, WIDTH = 32 * WARPS, WARP_COLUMNS * WARPS
    AHEAD, PENDING = STAGES - 1, STAGES - 2
    COLUMNS, SQUARES = WARP_COLUMNS // B, B // 8  # of a warp, of a block
    TM, GROUPS, LANES = ROWS // 16, FEATURES // GROUP, FEATURES // PIECE
    PITCH = FEATURES + PIECE  # of a row of x; its last piece is zeros
    (W_STAGE, STAGE), STEPS, STEP = stage_sizes(B, strip), most_steps(B, strip), 16 * B
    Y_PITCH = WIDTH + PIECE
    ACC = (TM, WARP_COLUMNS // 8, 4)
    pair, add_columns = PAIR[name], products(B, name, strip)
    fetch_x, fetch_w, write = fetch_rows(B, strip), fetch_steps(B, strip), write_rows(strip, store)

    @cuda.jit(**registers(WARPS))
    def kernel(x, stride, features, lefts, places, firsts, groups, begins, counts, steps, w, y):
        ring = cuda.shared.array(0, uint16, ALIGNMENT)
        pairs = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        acc = cuda.local.array(ACC, float32)
        for m in range(TM):
            for n in range(WARP_COLUMNS // 8):
                for i in range(4):
                    acc[m, n, i] = 0
        t = uint32(cuda.threadIdx.x)
        warp, lane = t // 32, t % 32
        strip = cuda.blockIdx.x % lefts.size
        top = int64(cuda.blockIdx.x // lefts.size) * ROWS
        first = firsts[strip]
        stages = int32(firsts[strip + 1] - first)
        for line in range(t, STAGES * ROWS, THREADS):
            end = line // ROWS * STAGE + W_STAGE + line % ROWS * PITCH + FEATURES
            for i in range(PIECE):
                ring[end + i] = 0

        # What the next stages are is read a stage ahead, at places that stay within 32 bits.
        group_at, begin_at = uint32(first * GROUPS + t % LANES // 4), uint32(first)
        count_at = uint32(first * WARPS + warp)
        group, begin, end = groups[group_at], begins[begin_at], begins[uint32(begin_at + 1)]
        count = counts[count_at]
        rows = int32(min(y.shape[0] - top, ROWS))
        row = (top + t // LANES) * stride + t % 4 * PIECE
        # Where this lane reads a row of its 8 x 8 matrix: 16 rows, then the second piece of each.
        reads, second = lane % 16 * PITCH, lane // 16 * 16
        stage, fetched = int32(0), int32(0)
        for s in range(int32(-AHEAD), stages):
            cp_async_wait(PENDING)
            cuda.syncthreads()
            if s + AHEAD < stages:
                fetch_x(x, row, stride, rows, group, int32(features), ring, fetched)
                fetch_w(steps, w, begin, int32(end - begin), ring, fetched)
                fetched = int32(fetched + 1) if fetched < STAGES - 1 else int32(0)
                group_at, begin_at = uint32(group_at + GROUPS), uint32(begin_at + 1)
                group, begin, end = groups[group_at], end, begins[uint32(begin_at + 1)]
            cp_async_commit()
            if s < 0:
                continue
            now, count_at = count, uint32(count_at + WARPS)
            count = counts[count_at]
            start = uint32(stage * STAGE + W_STAGE + reads)
            word = uint32(stage * (STAGE // 2) + (now >> uint32(4 * COUNT_BITS)))
            at = uint32(word + STEPS + (now >> uint32(4 * COUNT_BITS)) * (STEP // 2 - 1))
            stage = int32(stage + 1) if stage < STAGES - 1 else int32(0)
            add_columns(ring, pairs, start, second, word, at, now, acc)

        cp_async_wait(0)
        cuda.syncthreads()
        for n in range(WARP_COLUMNS // 8):
            column = places[(strip * WARPS + warp) * COLUMNS + n // SQUARES] * B
            column += n % SQUARES * 8 + lane % 4 * 2
            for m in range(TM):
                c = acc[m, n]
                at = ((16 * m + lane // 4) * Y_PITCH + column) // 2
                pairs[at] = pair(c[0], c[1])
                pairs[at + 4 * Y_PITCH] = pair(c[2], c[3])
        cuda.syncthreads()
        write(ring, y, top, int64(lefts[strip]) * B)

    return kernel


@cache
def fetch_rows(B: int, strip: Strip) -> Any:
    """ring[stage, line, i] = the gathered features of the next rows of x; 0 beyond the edges."""
    ROWS, FEATURES, (W_STAGE, STAGE) = strip.ROWS, strip.FEATURES, stage_sizes(B, strip)
    PITCH, LANES = FEATURES + PIECE, FEATURES // PIECE
    LINES = 32 * strip.WARPS // LANES  # fetched at once
    COUNT = ROWS // LINES

    @cuda.jit(device=True)
    def fetch(x, row, stride, rows, group, features, ring, stage):
        if group >= 0:
            t = uint32(cuda.threadIdx.x)
            line = t // LANES
            inside = int32(features - group * GROUP - t % 4 * PIECE)
            n = uint32(2 * min(max(inside, int32(0)), int32(PIECE)))
            to = stage * STAGE + W_STAGE + line * PITCH + t % LANES * PIECE
            source = row + group * GROUP
            if rows == ROWS:
                for i in range(COUNT):
                    cp_async_zero_fill(ring, to + i * LINES * PITCH, x, source, n)
                    source += LINES * stride
            else:
                for i in range(COUNT):
                    at, m = (source, n) if line + i * LINES < rows else (0, uint32(0))
                    cp_async_zero_fill(ring, to + i * LINES * PITCH, x, at, m)
                    source += LINES * stride

    return fetch


@cache
def fetch_steps(B: int, strip: Strip) -> Any:
    """First in a stage of the ring: where the steps of a stage stand, then their values."""
    THREADS, STEPS, STEP = 32 * strip.WARPS, most_steps(B, strip), 16 * B
    (_, STAGE), TIMES = stage_sizes(B, strip), STEPS * STEP // PIECE // THREADS

    @cuda.jit(device=True)
    def fetch(steps, w, begin, many, ring, stage):
        t = int32(cuda.threadIdx.x)
        at = int32(stage * STAGE + t * PIECE)
        left = int32(many * (STEP // PIECE) - t)
        source = int64(begin) * (STEP // 2) + t * 4
        if int32(t * ALIGNED) < many:
            cp_async(ring, at, steps, begin + t * ALIGNED)
        for i in range(TIMES):
            if left > int32(i * THREADS):
                to = at + STEPS * 2 + i * (THREADS * PIECE)
                cp_async(ring, to, w, source + i * (THREADS * 4))

    return fetch


@cache
def products(B: int, name: str, strip: Strip) -> Any:
    """acc += the rows of x at `start` times the steps of a warp, which begin at `word` and `at`."""
    COLUMNS, STEP = WARP_COLUMNS // B, 16 * B
    COUNT = (1 << COUNT_BITS) - 1

    @cuda.jit(device=True)
    def load(pairs, at):
        """The registers of a step of w."""
        lane = uint32(cuda.threadIdx.x) % 32
        if B == 16:
            return load_4xu32(pairs, at + lane * 4)
        return pairs[at + lane], pairs[at + 32 + lane], uint32(0), uint32(0)

    def columns_from(j: int) -> Any:
        """Column j, then those after it: each with its own registers, named when compiled."""
        add_step = step_products(B, name, strip, j)
        others = columns_from(j + 1) if j + 1 < COLUMNS else None

        @cuda.jit(device=True)
        def add_columns(ring, pairs, start, second, word, at, place, b, counts, acc):
            for _ in range(int32(counts >> uint32(COUNT_BITS * j) & uint32(COUNT))):
                x_at, now = start + (place >> second & uint32(0xFFFF)), b
                word, at = uint32(word + 1), uint32(at + STEP // 2)
                place, b = pairs[word], load(pairs, at)
                add_step(ring, x_at, now, acc)
            if others is not None:
                others(ring, pairs, start, second, word, at, place, b, counts, acc)

        return add_columns

    columns = columns_from(0)

    @cuda.jit(device=True)
    def add_all(ring, pairs, start, second, word, at, counts, acc):
        # A step is read ahead of the one that is multiplied.
        place, b = pairs[word], load(pairs, at)
        columns(ring, pairs, start, second, word, at, place, b, counts, acc)

    return add_all


@cache
def step_products(B: int, name: str, strip: Strip, j: int) -> Any:
    """acc of column j += 16 features of x, from two pieces, times a step of w."""
    PITCH, SQUARES = strip.FEATURES + PIECE, B // 8
    TM = strip.ROWS // 16
    mma = MMA[name]

    @cuda.jit(device=True)
    def add_step(ring, at, b, acc):
        for m in range(TM):
            a0, a1, a2, a3 = ldmatrix_x4(ring, at + m * 16 * PITCH)
            for n in range(SQUARES):
                c = acc[m, j * SQUARES + n]
                c[0], c[1], c[2], c[3] = mma(
                    a0, a1, a2, a3, b[2 * n], b[2 * n + 1], c[0], c[1], c[2], c[3]
                )

    return add_step


@cache
def write_rows(strip: Strip, store: str) -> Any:
    """y[top + row, left + column] = ring[row, column]."""
    ROWS, WARPS = strip.ROWS, strip.WARPS
    THREADS, WIDTH = 32 * WARPS, WARP_COLUMNS * WARPS
    PITCH = WIDTH + PIECE

    @cuda.jit(device=True)
    def write(ring, y, top, left):
        batch, columns = y.shape
        if store == "wide":
            for item in range(cuda.threadIdx.x, ROWS * WIDTH // PIECE, THREADS):
                row, column = item // (WIDTH // PIECE), item % (WIDTH // PIECE) * PIECE
                if top + row < batch and left + column < columns:
                    v0, v1, v2, v3 = load_4xu32(ring, row * PITCH + column)
                    at = (top + row) * columns + left + column
                    store_4xu32(y, at, v0, v1, v2, v3)
        else:
            for item in range(cuda.threadIdx.x, ROWS * WIDTH, THREADS):
                if store == "rows":
                    row, column = item // WIDTH, item % WIDTH
                else:
                    row, column = item % ROWS, item // ROWS
                if top + row < batch and left + column < columns:
                    y[top + row, left + column] = ring[row * PITCH + column]

    return write
