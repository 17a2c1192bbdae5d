"""y = x @ w where so many blocks are kept that w is multiplied as if it were dense.

A block of threads has 128 columns of y and up to 256 rows, and wgmma multiplies 64 features at a
time. Some warps copy the kept blocks of these to where they are in a tile of w in shared memory,
zeros between them; so w is read as it is stored, each block once for a tile of rows. A tile that
keeps no block is left out.

An infinity in x that meets a zero of no block makes NaN: such sums are computed again.
"""

from functools import cache, lru_cache
from itertools import product as every
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import multiprocessors, registers, shared_memory
from numbsparse.kernels.matmul import as_dense_from
from numbsparse.kernels.matmul.k7_small_blocks.strips import readable
from numbsparse.kernels.parts.aligned import aligned_values, of_bits
from numbsparse.kernels.parts.calls import unannounced
from numbsparse.kernels.parts.cluster_sums import add_parts, meet, part_bytes
from numbsparse.kernels.parts.deal import even_rows
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.parts.repair import any_nan, dense_of, repairing_lines
from numbsparse.kernels.parts.ring import begin_ring, following
from numbsparse.kernels.parts.store import KINDS, Sums, order_of, output_of, storer
from numbsparse.kernels.parts.swizzle import PERIOD, PIECE, load_for, map_of
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    Operand,
    bulk_load,
    cluster_sync,
    cp_async_arrive,
    cp_async_zero_fill,
    elect,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_tensor_map,
    first_multiple,
    let_next_kernel_start,
    load_4xu32,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    redux_or,
    shfl_idx,
    sync_warp,
    to_local,
    wait_for_earlier_kernels,
    wgmma,
    zeros,
)
from numbsparse.layout import Index

SQUARE, COLUMNS = 64, 128  # of w, whose rows have 128 bytes; of y
COUNT = COLUMNS // 2  # sums of a thread
FETCHERS, INSIDE_BITS = 4, 5  # warps; of a code
MOST_STAGES = 3 if SIMULATED else 8
ROOM = {1: float("inf"), 2: 1.0, 4: 0.76}  # of the multiprocessors, for clusters of that size
# Microseconds, fitted to an H200: of 64 features, and more for each 64 rows; of a tile beside them,
# and for each 64 rows where its sum is shared. Of 47 products it chose the fastest tile.
OF_STEP, OF_ROWS, OF_TILE, OF_SUMS = 0.24, 0.114, 4.0, 1.23


class Tile(NamedTuple):
    """What a kernel is made for."""

    B: int
    kind: str  # "f16" or "bf16"
    WARPGROUPS: int  # of 64 rows each
    SPLIT: int  # blocks of threads of a cluster that have a part of the sum each
    DEPTH: int  # features of a step, 64 or 128
    transposed: bool  # y = x @ w.T
    x_transposed: bool  # x is feature-major
    order: str  # of y, see `parts.store`

    @property
    def ROWS(self) -> int:
        return SQUARE * self.WARPGROUPS

    @property
    def W_START(self) -> int:
        return 2 * self.DEPTH * self.ROWS

    @property
    def STAGE_BYTES(self) -> int:
        return self.W_START + 2 * self.DEPTH * COLUMNS

    @property
    def RECORD(self) -> int:
        return record_of(self.B, self.DEPTH)

    @property
    def STAGES(self) -> int:
        """Of the ring; with two records for each."""
        limit = (shared_memory() or 228 * 1024) - PERIOD - 1024
        return min(limit // (self.STAGE_BYTES + 8 * self.RECORD), MOST_STAGES)

    @property
    def SHARED_BYTES(self) -> int:
        """The parts of a sum that is split are where the ring was."""
        parts = part_bytes(4 * self.WARPGROUPS, COUNT) if self.SPLIT > 1 else 0
        return max(self.STAGES * (self.STAGE_BYTES + 8 * self.RECORD), parts) + PERIOD

    @property
    def WIDTH(self) -> int:
        """Columns that a block stores of a sum that is split."""
        return COLUMNS // self.SPLIT


def record_of(B: int, depth: int) -> int:
    """Numbers of a step: a code for each block of a tile of w, its first feature, and zeros."""
    return COLUMNS * depth // B**2 + 4


def depth_of(warpgroups: int) -> int:
    """Features of a step: with many rows the ring has no room for more.

    With 64 two of 64 rows took 1.06 times as long in blocks of 8 (8,192 features, 128 rows), one up
    to 1.15 times in blocks of 16 (H200).
    """
    return 2 * SQUARE if warpgroups <= 2 else SQUARE


class Plan(NamedTuple):
    """What each block of threads does: see `plan_tiles`."""

    starts: Any
    records: Any
    rows: int  # of each tile of the batch: see `even_rows`


def is_as_dense(x: Any, values: Any, index: Index, y: Any, transposed: bool) -> bool:
    """Whether so much of the tiles is kept that this is faster than strips."""
    n_blocks, B, _ = values.shape
    least = as_dense_from(B, x.shape[0])
    if x.itemsize != 2 or least > 1 or n_blocks == 0 or y.size == 0:
        return False
    (kept,) = planned(index, kept_of_tiles, transposed, B)
    return kept >= least


def in_dense_tiles(x: Any, values: Any, index: Index, y: Any, transposed: bool) -> None:
    """y[:] = x @ w, or with w transposed, of 16 bits."""
    (batch, features), B = x.shape, values.shape[1]
    values, order = aligned_values(values), order_of(y)
    x, x_transposed = readable(x)
    strips = -(-y.shape[1] // COLUMNS)
    warpgroups, split = shape_of(batch, strips, features / SQUARE, multiprocessors())
    depth = depth_of(warpgroups)
    starts, records = planned(index, plan_tiles, transposed, features, B, depth)
    kind = KINDS[y.dtype.name]
    tile = Tile(B, kind, warpgroups, split, depth, transposed, x_transposed, order)
    row_tiles = -(-batch // tile.ROWS)
    rows = tile.ROWS if x_transposed else even_rows(batch, row_tiles)
    box = (SQUARE, depth) if x_transposed else (rows, SQUARE)
    x_map = map_of(x, *box, x_transposed)
    own = x.T if x_transposed else x
    launch(
        tile_kernel(tile),
        strips * row_tiles * split,
        128 * tile.WARPGROUPS + 32 * FETCHERS,
        *(x_map, unannounced(x_map), of_bits(values.span), Plan(starts, records, rows)),
        *(output_of(y), dense_of(own, of_bits(values), index, transposed)),
        shared_bytes=tile.SHARED_BYTES,
        cluster=(split,) if split > 1 else None,
        overlap=True,
    )


@lru_cache(1024)
def shape_of(batch: int, strips: int, steps: float, units: int) -> tuple[int, int]:
    """(warpgroups of a tile, blocks of threads that share its sum), for the least time."""

    def cost(warpgroups: int, split: int) -> float:
        blocks = strips * -(-batch // (SQUARE * warpgroups)) * split
        if blocks > units * ROOM[split]:
            return float("inf")
        of_tile = steps / split * (OF_STEP + OF_ROWS * warpgroups) + OF_TILE
        return -(-blocks // units) * of_tile + OF_SUMS * warpgroups * (split > 1)

    return min(every((1, 2, 3, 4), ROOM), key=lambda shape: cost(*shape))


def kept_of_tiles(index: Index, transposed: bool, B: int) -> tuple[float]:
    """Which part of the blocks of tiles is kept, of those tiles that keep any."""
    tiles = tiles_of(index, transposed, B, SQUARE)[0]
    there = np.bincount(tiles, minlength=1)
    return (tiles.size * B**2 / (np.count_nonzero(there) * SQUARE * COLUMNS),)


def tiles_of(index: Index, transposed: bool, B: int, depth: int) -> tuple[np.ndarray, int]:
    """In which tile each block is, in the order of the walk over lines of y; tiles of a strip."""
    walk, others = (index.rows, index.columns) if transposed else (index.columns, index.rows)
    line = np.repeat(np.arange(walk.indptr.size - 1), np.diff(walk.indptr))
    of_strip = -(-(others.indptr.size - 1) * B // depth)
    return line // (COLUMNS // B) * of_strip + walk.indices // (depth // B), of_strip


def plan_tiles(
    index: Index, transposed: bool, features: int, B: int, depth: int
) -> tuple[Any, ...]:
    """(starts, records) of the steps of each strip of 128 columns of y.

    starts (strips + 1,) : where those of each begin
    records (steps, numbers) : of squares of 64 rows and columns of w the block in each cell, above
        how many of its features there are, in INSIDE_BITS, or 0; then the first feature. Squares
        below each other follow each other.
    """
    walk, along = index.rows if transposed else index.columns, SQUARE // B
    lines = walk.indptr.size - 1
    line, other = np.repeat(np.arange(lines), np.diff(walk.indptr)), walk.indices
    tiles, of_strip = tiles_of(index, transposed, B, depth)
    steps, step = np.unique(tiles, return_inverse=True)
    records = np.zeros((steps.size, record_of(B, depth)), np.int32)
    (row, down), (column, across) = (other, depth), (line, COLUMNS)
    if transposed:
        (row, down), (column, across) = (line, COLUMNS), (other, depth)
    cell = column % (across // B) // along * (down // B) + row % (down // B)
    cell = cell * along + column % along
    records[step, cell] = walk.blocks << INSIDE_BITS | np.clip(features - other * B, 0, B)
    records[:, -4] = steps % of_strip * depth
    starts = np.searchsorted(steps, np.arange(-(-lines * B // COLUMNS) + 1) * of_strip)
    return starts.astype(np.int32), records.reshape(-1)


@cache
def tile_kernel(tile: Tile) -> Any:
    STAGES, WARPS, SPLIT = tile.STAGES, 4 * tile.WARPGROUPS, tile.SPLIT
    BARRIERS = 2 * STAGES + 1
    produce, consume = producer(tile), consumer(tile)

    @cuda.jit(**registers(32 * (WARPS + FETCHERS), most=255))
    def kernel(x_map, fresh, values, plan, y, dense):
        shared = cuda.shared.array(0, uint8, ALIGNMENT)
        # A stage is full; a stage is empty; the first records are there.
        bars = cuda.shared.array(BARRIERS, uint64)
        base, t = first_multiple(shared, PERIOD), uint32(cuda.threadIdx.x)
        strips, block = plan.starts.size - 1, int32(cuda.blockIdx.x)
        part, strip, top = block % SPLIT, block // SPLIT % strips, block // SPLIT // strips
        begin = plan.starts[strip]
        steps = plan.starts[strip + 1] - begin
        first, last = begin + steps * part // SPLIT, begin + steps * (part + 1) // SPLIT
        if t == 0:
            if fresh == 0:
                prefetch_tensor_map(x_map)
            begin_ring(bars, 0, STAGES, 1 + 32 * FETCHERS, WARPS)
            mbarrier_init(bars, 2 * STAGES, 1)
            fence_mbarrier_init()
        let_next_kernel_start()
        cuda.syncthreads()
        warp, row = shfl_idx(uint32(t // 32), 0), int32(top * plan.rows)
        if warp >= WARPS:
            ring = shared, base, bars
            produce(uint32(warp - WARPS), x_map, fresh, values, plan, first, last, row, ring)
            if SPLIT > 1:
                meet()
        else:
            consume(plan, strip, first, last, row, shared, base, bars, y, dense)
        if SPLIT > 1:
            cluster_sync()  # the others may still read here

    return kernel


@cache
def producer(tile: Tile) -> Any:
    """produce(fetcher, x_map, fresh, values, plan, first, last, row, ring): of these steps.

    The record of a step is on its way since the stage was filled before; it has two places in turn.
    """
    STAGES, STAGE_BYTES, W_START = tile.STAGES, tile.STAGE_BYTES, tile.W_START
    copy, x_transposed, RECORD = copying(tile), tile.x_transposed, tile.RECORD
    ROWS, DEPTH, RECORD_BYTES = tile.ROWS, tile.DEPTH, 4 * tile.RECORD
    BOXES = ROWS // SQUARE if x_transposed else DEPTH // SQUARE
    BOX_BYTES, load = tile.W_START // BOXES, load_for(x_transposed)

    @cuda.jit(device=True)
    def request(x_map, plan, step, last, row, feature, shared, bars, start, stage, place):
        """The rows of x, and the record of the step that comes to this stage next."""
        nbytes = uint32((ROWS if x_transposed else plan.rows) * (2 * DEPTH))
        more = step + STAGES < last
        mbarrier_expect(bars, stage, uint32(nbytes + RECORD_BYTES) if more else nbytes)
        for b in range(BOXES):
            right, below = (0, b * SQUARE) if x_transposed else (b * SQUARE, 0)
            at = start + b * BOX_BYTES
            load(shared, at, x_map, int32(feature + right), int32(row + below), bars, stage)
        if more:
            at = int64(step + STAGES) * RECORD
            bulk_load(shared, place, plan.records, at, uint32(RECORD_BYTES), bars, stage)

    @cuda.jit(device=True)
    def produce(fetcher, x_map, fresh, values, plan, first, last, row, ring):
        shared, base, bars = ring
        words = cuda.shared.array(0, uint32, ALIGNMENT)  # the same memory
        records, many = uint32(base + STAGES * STAGE_BYTES), min(STAGES, last - first)
        if fetcher == 0 and elect() != 0 and many > 0:
            nbytes = uint32(many * RECORD_BYTES)
            mbarrier_expect(bars, 2 * STAGES, nbytes)
            at = int64(first) * RECORD
            bulk_load(shared, records, plan.records, at, nbytes, bars, 2 * STAGES)
        if fresh != 0:
            fence_tensor_map(x_map)
        wait_for_earlier_kernels()
        if many > 0:
            mbarrier_wait(bars, 2 * STAGES, 0)
        stage, phase, other = uint32(0), uint32(1), uint32(STAGES)
        for step in range(first, last):
            mbarrier_wait(bars, STAGES + stage, phase)
            start = uint32(base + stage * STAGE_BYTES)
            own = uint32(records + (STAGES - other + stage) * RECORD_BYTES)
            if fetcher == 0 and elect() != 0:
                feature = int32(words[own // 4 + (RECORD - 4)])
                place = uint32(records + (other + stage) * RECORD_BYTES)
                request(x_map, plan, step, last, row, feature, shared, bars, start, stage, place)
            copy(values, words, own // 4, fetcher, shared, uint32(start + W_START))
            cp_async_arrive(bars, stage)
            stage, phase = following(stage, phase, STAGES)
            if stage == 0:
                other = uint32(STAGES - other)

    return produce


@cache
def copying(tile: Tile) -> Any:
    """copy(values, words, record, fetcher, shared, to): a fetcher's share of a tile of w.

    A lane copies 16 bytes of a row at a time; pieces of lines of 128 bytes are swizzled.
    """
    B, ALONG, PIECES, transposed = tile.B, SQUARE // tile.B, tile.B // PIECE, tile.transposed
    LANES, INSIDE = B * PIECES, (1 << INSIDE_BITS) - 1
    OWN = (tile.RECORD - 4) // FETCHERS
    ROUNDS = OWN * LANES // 32

    @cuda.jit(device=True)
    def copy(values, words, record, fetcher, shared, to):
        lane = uint32(cuda.threadIdx.x) % 32
        row, piece = lane % B, lane // B % PIECES
        first = uint32(fetcher * OWN + lane // LANES * ROUNDS)
        for some in range(0, ROUNDS, 4):
            codes = load_4xu32(words, uint32(record + first + some))
            for r in range(4):
                cell, code = uint32(first + some + r), codes[r]
                inside, block = int32(code & uint32(INSIDE)), int64(code >> uint32(INSIDE_BITS))
                line, at = uint32(cell // ALONG * B + row), uint32(cell % ALONG * PIECES + piece)
                nbytes = 16 if row < inside else 0
                if transposed:
                    nbytes = 2 * min(max(inside - PIECE * int32(piece), 0), PIECE)
                there = uint32(to + line * (2 * SQUARE) + (at ^ line % 8) * 16)
                source = block * (B * B) + int64(row * B + piece * PIECE)
                cp_async_zero_fill(shared, there, values, source, int32(nbytes))

    return copy


@cache
def consumer(tile: Tile) -> Any:
    """consume(plan, strip, first, last, row, shared, base, bars, y, dense)."""
    STAGES, STAGE_BYTES, W_START, B = tile.STAGES, tile.STAGE_BYTES, tile.W_START, tile.B
    SPLIT, WIDTH, OWN = tile.SPLIT, tile.WIDTH, COUNT // tile.SPLIT
    LINE, DEPTH, x_transposed = 2 * SQUARE, tile.DEPTH, tile.x_transposed
    x = Operand(LINE, LINE * (DEPTH if x_transposed else tile.ROWS), x_transposed)
    w = Operand(LINE, LINE * (COLUMNS if tile.transposed else DEPTH), not tile.transposed)
    add, no_sums = wgmma(tile.kind, 1, COLUMNS, DEPTH // 16, x, w), zeros(COUNT)
    OWN_ROWS = LINE * (DEPTH if x_transposed else SQUARE)  # bytes
    add_sums = add_parts(SPLIT, SPLIT, 1, SPLIT, COUNT // 4 // SPLIT)
    store = storer(Sums(tile.kind, WIDTH, 1, 1, APART=64), tile.order)
    nan_in, repair = any_nan(OWN), repairing_lines(False, tile.kind)

    @cuda.jit(device=True)
    def finish(sums, place, row, y, dense):
        columns = cuda.local.array(1, int32)
        columns[0] = place
        store(sums, columns, row, y)
        if redux_or(uint32(nan_in(sums))) != 0:
            sync_warp()
            for item in range(cuda.threadIdx.x % 32, 16 * WIDTH, 32):
                n, feature = int64(row) + item // WIDTH, int64(place) * WIDTH + item % WIDTH
                if n < y[3] and feature < y[4]:
                    repair(y, n, feature, B, dense)

    @cuda.jit(device=True)
    def consume(plan, strip, first, last, row, shared, base, bars, y, dense):
        t = uint32(cuda.threadIdx.x)
        warp = shfl_idx(uint32(t // 32), 0)
        x_at = uint32(base + warp // 4 * OWN_ROWS)
        stage, phase = uint32(0), uint32(0)
        wait_for_earlier_kernels()
        acc = no_sums()
        for _ in range(first, last):
            mbarrier_wait(bars, stage, phase)
            fence_proxy_async()  # here: lanes that copy would wait for all that they have requested
            start = uint32(stage * STAGE_BYTES)
            acc = add(acc, shared, x_at + start, shared, base + start + W_START)
            if t % 32 == 0:
                mbarrier_arrive(bars, STAGES + stage)
            stage, phase = following(stage, phase, STAGES)
        sums = cuda.local.array(COUNT, float32)
        to_local(acc, sums)
        top = int32(row + 16 * warp)
        own_y = y[0], y[1], y[2], min(y[3], row + plan.rows), y[4]
        if SPLIT > 1:  # each block of the cluster stores a part of the columns
            own, part = cuda.local.array(OWN, float32), int32(cuda.blockIdx.x) % SPLIT
            add_sums(sums, own, warp, base)
            finish(own, strip * SPLIT + part, top, own_y, dense)
        else:
            finish(sums, strip, top, own_y, dense)

    return consume
