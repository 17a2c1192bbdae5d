"""y = x @ w where so many blocks are kept that w is multiplied as if it were dense.

A block of threads has 64 or 128 columns of y and up to 256 rows, and wgmma multiplies 64 or 128
features at a time. Some warps copy the kept blocks of these to where they are in a tile of w in
shared memory, zeros between them; so w is read as it is stored, each block once for a tile of rows.
A tile that keeps no block is left out.

An infinity in x that meets a zero of no block makes NaN: such sums are computed again.

Feature-major results whose lines begin anywhere are stored one by one. By 32 neighbours at once, as
k6 does, eight drawn products took 0.97 of the time, 0.95 at best (H200).
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.card import multiprocessors, registers
from numbsparse.kernels.matmul.k9_dense_tiles.plan import (
    SQUARE,
    Tile,
    depth_of,
    plan_tiles,
    shape_of,
)
from numbsparse.kernels.parts.aligned import (
    aligned_either_way,
    aligned_values,
    of_any_blocks,
    of_bits,
)
from numbsparse.kernels.parts.deal import even_rows
from numbsparse.kernels.parts.pieces import add_parts, meeting, slice_of
from numbsparse.kernels.parts.plans import planned, unannounced
from numbsparse.kernels.parts.repair import dense_of, nan_in_rows, repairing_lines
from numbsparse.kernels.parts.ring import begin_ring, following, show_barriers
from numbsparse.kernels.parts.store import FEATURES, KINDS, Sums, order_of, output_of, storer
from numbsparse.kernels.parts.stored_blocks import INSIDE_BITS
from numbsparse.kernels.parts.swizzle import PERIOD, PIECE, load_for
from numbsparse.kernels.ptx import (
    ALIGNMENT,
    Operand,
    bulk_load,
    cp_async_arrive,
    cp_async_zero_fill,
    elect,
    fence_proxy_async,
    fence_tensor_map,
    first_multiple,
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


@of_any_blocks
def in_dense_tiles(x: Any, values: Any, index: Index, y: Any, transposed: bool) -> None:
    """y[:] = x @ w, or with w transposed, of 16 bits."""
    (batch, features), B = x.shape, values.shape[1]
    values, order = aligned_values(values), order_of(y)
    (x,), (x_transposed,) = aligned_either_way(of_bits(x))
    shape = shape_of(batch, y.shape[1], features / SQUARE, multiprocessors())
    warpgroups, split, columns = shape
    depth, strips = depth_of(warpgroups), -(-y.shape[1] // columns)
    starts, records, most = planned(index, plan_tiles, transposed, features, B, depth, columns)
    kind = KINDS[y.dtype.name]
    tile = Tile(B, kind, warpgroups, split, depth, columns, transposed, x_transposed, order)
    free = tile._replace(FREE=split > 1)
    if -(-most // split) * tile.STAGE_BYTES <= free.PARTS_AT:
        tile = free
    row_tiles = -(-batch // tile.ROWS)
    rows = tile.ROWS if x_transposed else even_rows(batch, row_tiles)
    if order == FEATURES:  # a lane stores `PIECE` rows at once
        rows = -(-rows // PIECE) * PIECE
    x_map = tensor_map(x, (depth, SQUARE) if x_transposed else (rows, SQUARE))
    own = x.T if x_transposed else x
    launch(
        tile_kernel(tile),
        strips * row_tiles * split,
        128 * tile.WARPGROUPS + 32 * tile.FETCHERS,
        *(x_map, unannounced(x_map), of_bits(values.span), Plan(starts, records, rows)),
        *(output_of(y), dense_of(own, of_bits(values), index, transposed)),
        shared_bytes=tile.SHARED_BYTES,
        cluster=(split,) if split > 1 else None,
        overlap=True,
    )


class Plan(NamedTuple):
    """What each block of threads does: see `plan_tiles`."""

    starts: Any
    records: Any
    rows: int  # of each tile of the batch: see `even_rows`


@cache
def tile_kernel(tile: Tile) -> Any:
    STAGES, WARPS, SPLIT = tile.STAGES, 4 * tile.WARPGROUPS, tile.SPLIT
    BARRIERS, FETCHERS = 2 * STAGES + 1, tile.FETCHERS
    produce, consume = producer(tile), consumer(tile)
    meet, MEET = meeting(tile.FREE), SPLIT if tile.FREE else 1

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
        show_barriers(t, MEET)
        warp, row = shfl_idx(uint32(t // 32), 0), int32(top * plan.rows)
        if warp >= WARPS:
            ring = shared, base, bars
            produce(uint32(warp - WARPS), x_map, fresh, values, plan, first, last, row, ring)
            if SPLIT > 1:
                meet()
        else:
            consume(plan, strip, first, last, row, shared, base, bars, y, dense)

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
    OWN = (tile.RECORD - 4) // tile.FETCHERS
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
    SPLIT, COLUMNS, COUNT = tile.SPLIT, tile.COLUMNS, tile.COUNT
    WIDTH, OWN = COLUMNS // SPLIT, COUNT // SPLIT
    LINE, DEPTH, x_transposed = 2 * SQUARE, tile.DEPTH, tile.x_transposed
    x = Operand(LINE, LINE * (DEPTH if x_transposed else tile.ROWS), x_transposed)
    w = Operand(LINE, LINE * (COLUMNS if tile.transposed else DEPTH), not tile.transposed)
    add, no_sums = wgmma(tile.kind, 1, COLUMNS, DEPTH // 16, x, w), zeros(COUNT)
    OWN_ROWS = LINE * (DEPTH if x_transposed else SQUARE)  # bytes
    add_sums = add_parts(SPLIT, SPLIT, 1, SPLIT, COUNT // 4 // SPLIT, tile.FREE)
    PARTS_AT = tile.PARTS_AT
    of = slice_of(Sums(tile.kind, COLUMNS, 1, 1, APART=64), SPLIT)
    store, repair = storer(of, tile.order), repairing_lines(False, tile.kind)

    @cuda.jit(device=True)
    def finish(sums, place, row, y, dense):
        columns = cuda.local.array(1, int32)
        columns[0] = place
        store(sums, columns, row, y)
        if redux_or(uint32(nan_in_rows(sums, row, y[3]))) != 0:  # others were not copied
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
            add_sums(sums, own, warp, base + PARTS_AT)
            finish(own, strip * SPLIT + part, top, own_y, dense)
        else:
            finish(sums, strip, top, own_y, dense)

    return consume
