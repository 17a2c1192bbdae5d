"""y = x @ w of float32: strips as for the half types, with three products of tf32.

Rows of a group are twice as long, and so are the steps of w; a warp holds hi and lo of a step for
all of its rows. Outputs that a split made NaN are computed anew by the lane that wrote them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint8, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, shared_memory
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul.aligned import aligned_either_way
from numbsparse.kernels.matmul.k7_small_blocks.card import map_of, registers
from numbsparse.kernels.matmul.k7_small_blocks.single_rows import rows_of
from numbsparse.kernels.matmul.k7_small_blocks.single_steps import packed, products
from numbsparse.kernels.matmul.k7_small_blocks.strip_bulk import barriers, consumer, producer
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import (
    ALIGNED,
    SWIZZLED,
    WARP_COLUMNS,
    Strip,
    plan_strips,
    steps_in_strips,
)
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.store import FEATURES as ALONG_FEATURES
from numbsparse.kernels.parts.store import ROWS as ALONG_ROWS
from numbsparse.kernels.parts.store import order_of as how_it_lies
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    as_uint32,
    first_multiple,
    shfl_idx,
    store_2xu32,
    store_4xf32,
)
from numbsparse.kernels.views import span

GROUP = 32  # features that are fetched together: 128 bytes of a row of x
MOST_WARPS = 11  # that multiply: with the one that fetches, 168 registers for a lane


def along_strips(x: Any, values: Any, index: Any, y: Any, turned: bool, precision: str) -> None:
    """y[:] = x @ w, or with w turned."""
    B, (batch, features), columns = values.shape[1], x.shape, y.shape[1]
    if batch == 0 or columns == 0:
        return
    if values.shape[0] == 0:
        fill(y, 0)
        return
    warps = min(MOST_WARPS, -(-columns // WARP_COLUMNS))
    _, *steps = planned(index, steps_in_strips, B, turned, warps * WARP_COLUMNS, GROUP, 1)
    strip = strip_of(B, warps, *steps)
    plan = planned(index, plan_strips, turned, features, strip)
    lengths, lines, groups, begins, words, halves = plan
    row_tiles = -(-batch // strip.ROWS)
    tiles, tile_starts = planned(index, schedule, lengths, row_tiles, multiprocessors())
    block_lines = index.block_columns if turned else index.block_rows
    w = packed(values, halves, block_lines, features, turned)
    x, x_turned = aligned_either_way(x)
    walk = index.rows if turned else index.columns
    x_strides = (1, x.strides[0] // 4) if x_turned else (x.strides[0] // 4, 1)
    launch(
        strip_kernel(strip, precision == "highest", turned, x_turned, how_it_lies(y)),
        tile_starts.size - 1,
        32 * (strip.WARPS + strip.FETCHERS),
        map_of(x, strip.rows_of_box(x_turned), strip.WIDTH, x_turned),
        *(w, words, begins, groups, lines, tiles, tile_starts, span(y)),
        (*(stride // 4 for stride in y.strides), batch, columns),
        *(span(x), (*x_strides, features), values),
        *(walk.indptr, walk.indices, walk.blocks),
        shared_bytes=strip.SHARED_BYTES,
    )


def strip_of(B: int, warps: int, mean: float, most: int) -> Strip:
    """As many groups to a stage, with room for their steps, as leave three stages."""
    limit = (shared_memory() or 65 * 1024) - 1024  # beside the ring there are barriers
    for groups in (4, 2, 1):
        steps = max(most, min(round(1.15 * groups * mean), 256))
        steps = -(-steps // ALIGNED) * ALIGNED
        strip = Strip(B, 64, warps, GROUP, groups, steps, 3, FETCHERS=1, ITEM=4)
        if limit >= strip.SHARED_BYTES or groups == 1:
            break
    stages = (limit - SWIZZLED) // strip.STAGE_BYTES
    return strip._replace(STAGES=2 if SIMULATED else stages)


@cache
def strip_kernel(strip: Strip, exact: bool, turned: bool, x_turned: bool, y_lies: str) -> Any:
    WARPS, FETCHERS, BARRIERS = strip.WARPS, strip.FETCHERS, 2 * strip.STAGES
    begin, produce = barriers(strip), producer(strip, x_turned)
    add_stage = products(strip, exact, x_turned)
    consume = consumer(strip, add_stage, storer(strip, exact, turned, x_turned, y_lies))

    @cuda.jit(**registers(WARPS + FETCHERS))
    def kernel(
        x_map,
        w,
        words_of,
        begins,
        groups,
        lines,
        tiles,
        tile_starts,
        y,
        sizes,
        x,
        x_sizes,
        values,
        indptr,
        indices,
        blocks,
    ):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        bars = cuda.shared.array(BARRIERS, uint64)  # a stage is full; a stage is empty
        base = first_multiple(shared, SWIZZLED)
        t = uint32(cuda.threadIdx.x)
        begin(bars)
        first, last = tile_starts[cuda.blockIdx.x], tile_starts[cuda.blockIdx.x + 1]
        warp = shfl_idx(uint32(t // 32), 0)
        if warp >= WARPS:
            walk = w, words_of, begins, groups, tiles
            produce(uint32(warp - WARPS), x_map, walk, first, last, shared, base, bars)
        else:
            into = lines, y, sizes, (x, x_sizes, values, indptr, indices, blocks)
            consume(tiles, first, last, shared, words, base, bars, into)

    return kernel


@cache
def storer(strip: Strip, exact: bool, turned: bool, x_turned: bool, y_lies: str) -> Any:
    """The sums of a warp to y, straight from its registers."""
    B, SUMS, COLUMNS, TM, SQUARES = (
        strip.B,
        strip.ROWS,
        strip.COLUMNS,
        strip.ROWS // 16,
        strip.B // 8,
    )
    PAIRS, FOURS = y_lies == ALONG_ROWS, y_lies == ALONG_FEATURES and x_turned
    row_of, mend = rows_of(x_turned).row_of, mend_sum(B, turned)
    NEXT = 4 * SQUARES  # sums to those of the next 16 rows

    @cuda.jit(device=True)
    def store(acc, group, warp, top, into):
        lines, y, sizes, source = into
        row_stride, column_stride, batch, features = sizes
        lane = uint32(cuda.threadIdx.x) % 32
        found = 0
        for j in range(COLUMNS):
            line = int64(lines[group, warp * COLUMNS + j])
            for m in range(TM):
                for n in range(SQUARES):
                    for e in range(4):
                        i = ((j * TM + m) * SQUARES + n) * 4 + e
                        row = top + row_of(m, e // 2)
                        column = line * B + n * 8 + lane % 4 * 2 + e % 2
                        at = row * row_stride + column * column_stride
                        if row < batch and line >= 0 and column < features:
                            if FOURS:
                                if m % 2 == 0 and e < 2:
                                    c, d = acc[i + NEXT], acc[i + NEXT + 2]
                                    store_4xf32(y, at, acc[i], acc[i + 2], c, d)
                            elif not PAIRS:
                                y[at] = acc[i]
                            elif e % 2 == 0:
                                store_2xu32(y, at, as_uint32(acc[i]), as_uint32(acc[i + 1]))
                            if acc[i] != acc[i]:
                                found = 1
        if exact and found:
            for i in range(SUMS):
                line = lines[group, warp * COLUMNS + i // (4 * SQUARES * TM)]
                row = top + row_of(i // (4 * SQUARES) % TM, i % 4 // 2)
                within = i // 4 % SQUARES * 8 + lane % 4 * 2 + i % 2
                if row < batch and line >= 0 and line * int64(B) + within < features:
                    at = row * row_stride + (line * int64(B) + within) * column_stride
                    if y[at] != y[at]:
                        y[at] = mend(source, row, line, within)

    return store


@cache
def mend_sum(B: int, turned: bool) -> Any:
    """A plain sum, where a split made NaN of an infinity: rare, so simple."""

    @cuda.jit(device=True)
    def mend(source, row, line, within):
        x, x_sizes, values, indptr, indices, blocks = source
        row_stride, column_stride, features = x_sizes
        total = float32(0)
        for entry in range(indptr[line], indptr[line + 1]):
            c, block = indices[entry] * int64(B), blocks[entry]
            for k in range(min(B, features - c)):
                w = values[block, within, k] if turned else values[block, k, within]
                total += x[row * row_stride + (c + k) * column_stride] * w
        return total

    return mend
