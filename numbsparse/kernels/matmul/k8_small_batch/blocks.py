"""weight_grad: a warp computes units of dw, squares of 32 or several small blocks side by side.

The batch is the sum: up to 32 rows each unit is one tile of x by one of dy, and of more rows it is
a step for each 32 of them. The units of a line of x follow each other: where a unit is one step x
is loaded into registers once for a line, dy each time. What bounds it is writing dw (`writing`).

Where there are fewer units than warps, neighbouring warps share the steps of one, and the first of
them adds what the others leave in shared memory, in their order. Where units are few several blocks
of threads do, and the last to finish adds what these have, as in `lines`.

Of blocks with gates a share lists the units that these leave first, as in `lines`.
"""

from functools import cache
from math import isqrt
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from numbsparse.device import DeviceArray
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.card import registers
from numbsparse.kernels.matmul.k8_small_batch import launch
from numbsparse.kernels.matmul.k8_small_batch.block_sums import consuming, holding, sums_of, writing
from numbsparse.kernels.matmul.k8_small_batch.plan import READ_AHEAD, lines_of, name_blocks
from numbsparse.kernels.parts import pieces, skewed
from numbsparse.kernels.parts.aligned import BYTES, is_aligned, of_any_rows
from numbsparse.kernels.parts.gates import dealing, listed, listed_bytes, shift_of
from numbsparse.kernels.parts.lanes import copying_side
from numbsparse.kernels.parts.plans import again, planned, room_of_pieces
from numbsparse.kernels.parts.requests import ALIGNED, reading, squares_of
from numbsparse.kernels.parts.ring import Source, closing, following, opening, waiting
from numbsparse.kernels.parts.tiles import WIDTH, Form, Operand
from numbsparse.kernels.ptx import (
    bulk_load,
    bulk_wait_read,
    elect,
    first_multiple,
    let_next_kernel_start,
    mbarrier_expect,
    store_4xu32,
    sync_warp,
    tma_load_2d,
    wait_for_earlier_kernels,
)
from numbsparse.kernels.views import view_of
from numbsparse.layout import Index

HELD_ROWS = 2 * WIDTH  # of x that a warp keeps in registers
GATED_FROM = 2, 12  # units of a warp, and their steps: gates of fewer are not read


class Blocks(NamedTuple):
    """What a kernel is made for."""

    form: Form
    depth: int  # features of a line of x: 32, or those of a smaller block
    x: Operand  # across where its features are contiguous: rows of tiles are terms, the batch
    dy: Operand
    source: Source
    warps: int
    shares: int
    long: bool  # whether the batch takes several steps
    # Warps that share the steps of a unit: then none has a second unit. Not an argument: with one,
    # products of 512 and 1,024 features took 8 to 34 % longer in 16 bits, 1 to 4 in float32 (H200).
    split: int = 1
    cuts: int = 1  # blocks of threads that share those of a unit
    tiles: int = 1  # of 32 rows of the batch in a step
    made: bool = False  # whether the layout is of the GPU, which alone knows how many units it has
    gated: bool = False

    @property
    def piece(self) -> int:
        """float32 of a warp's sums."""
        return pieces.floats_of(-(-self.x.groups // 2), 4)

    @property
    def tile_words(self) -> int:
        if self.x.skewed or self.dy.skewed:
            return skewed.places_of(self.form.run, WIDTH, skewed.PIECES).words
        return WIDTH * self.form.row

    @property
    def stage_words(self) -> int:
        return 2 * self.tiles * self.tile_words

    @property
    def warp_words(self) -> int:
        """A ring, and a square of dw that waits to be written."""
        return self.source.stages * self.stage_words + WIDTH * self.form.row

    @property
    def shared_bytes(self) -> int:
        return 4 * self.warps * self.warp_words + ALIGNED


class Room(NamedTuple):
    """What blocks of threads leave for each other, and how many have."""

    partials: Any
    tickets: Any


@of_any_rows
def multiply_blocks(x, dy, index, dvalues, how: tuple[Form, Any]) -> None:
    """dvalues = x.T @ dy at the kept blocks; `how` has the gates, if any."""
    form, gates = how
    n_blocks, size, _ = dvalues.shape
    operands = (launch.by_feature(a, n_blocks, size, False) for a in (x, dy))
    x, dy = launch.in_reach(size, n_blocks, *operands)
    more = () if gates is None else (gates,)
    again(index, along_blocks, (x, dy, dvalues), form, more=more)


def along_blocks(index: Index, x, dy, dvalues, form: Form, gates: Any = (), *, first: bool) -> None:
    """dvalues = x.T @ dy at the kept blocks; gates as in `launch.along_lines`."""
    size, x_across, dy_across = dvalues.shape[1], is_aligned(x), is_aligned(dy)
    depth, shares = min(size, WIDTH), launch.n_shares()
    slabs = [launch.slab_of(a, size, along=True) for a in (x, dy)]
    whole = all(a.shape[1] % WIDTH == 0 for a, slab in zip((x, dy), slabs, strict=True) if slab)
    skews = [launch.pieces_of(a, size) for a in (x, dy)]
    begins = [
        BYTES if skew else launch.begins_of(a, size) for a, skew in zip((x, dy), skews, strict=True)
    ]
    engine = size >= WIDTH and whole and min(begins) == BYTES and launch.has_engine()
    engine = engine and not any(skews)
    together = launch.together_of(form, True)
    even = [launch.is_even(a, slab) for a, slab in zip((x, dy), slabs, strict=True)]
    x_how, dy_how = zip(slabs, even, begins, skews, strict=True)
    x_side = Operand(x_across, depth // 8, 1, 0, *x_how)
    dy_side = Operand(dy_across, 4, together, 0, *dy_how)
    units, count = planned(index, plan_blocks, size)
    made = index.made is not None
    most = dvalues.size // WIDTH**2 if made else count
    in_step = tiles_of(x.shape[0], engine, form, most / (launch.WARPS * shares), any(slabs))
    steps = -(-x.shape[0] // (in_step * WIDTH))
    split, cuts = split_of(steps, most, launch.WARPS * shares)
    many = dvalues.size >= launch.FEW * launch.WARPS * shares * WIDTH**2
    if not engine:
        many = split == 1 and launch.has_many(most * -(-x.shape[0] // WIDTH))
    warps = launch.warps_of(form, many)
    source = launch.source_of(engine, size, x, dy)
    each = most / (warps * shares)
    more = listed_bytes(WIDTH // depth, warps, -(-most // (warps * shares)))
    reads = each >= GATED_FROM[0] and each * steps >= GATED_FROM[1] and more <= launch.MOST_LISTED
    gates = gates if split == 1 and reads else ()
    gated = isinstance(gates, DeviceArray)
    more *= gated
    how = steps > 1, split, cuts, in_step, made, gated
    blocks = Blocks(form, depth, x_side, dy_side, source, warps, shares - shares % cuts, *how)
    # Of few steps a short ring leaves room for the next kernel's blocks.
    few = split * cuts == 1 or steps < 2 * split * cuts
    short = engine or (form.is_16_bit and not many and few)
    blocks = launch.with_stages(blocks, 2 if short else launch.MOST, more)
    w_view = (size, shift_of(size)) if gated else (size,)
    maps = units
    if engine:
        box, squares = (WIDTH, WIDTH), squares_of(dvalues)
        maps = tensor_maps(
            squares if slabs[0] else (x if x_across else x.T, box),
            squares if slabs[1] else (dy if dy_across else dy.T, box),
            squares,
        )
    before = x.span, view_of(x), dy.span, view_of(dy), w_view
    room = Room(*planned(index, room_of_pieces, cuts * most, blocks.piece)) if cuts > 1 else ()
    after = units, count, dvalues.reshape(1, -1).span, gates, room
    launch.start(block_kernel(blocks), blocks, blocks.shares, before, maps, after, first, more)


def tiles_of(batch: int, engine: bool, form: Form, units: float, slab: bool = False) -> int:
    """Of a step: two where one step more would have x loaded again for each unit of a line, and
    registers hold as much of it. A slab has all rows.

    units : of a warp. In 16 bits two took 21 to 34 % less. Float32 in two parts took 7 % less from
    14 units on, and 3 to 18 % more of up to 6; else 2 to 37 % less, but of half a unit to two 3 to
    14 % more (1,024 to 12,288 features, H200).
    """
    if not engine or not WIDTH < batch <= HELD_ROWS:
        return 1
    if form.is_16_bit or slab:
        return 2
    if form.split:
        return 2 if units >= launch.FEW else 1
    return 1 if 0.5 < units < 2 else 2


def split_of(steps: int, units: int, warps: int) -> tuple[int, int]:
    """Neighbouring warps for each unit, two steps for each of them, all units at once; and of how
    many blocks of threads: of as many steps as there are blocks, whose pieces one warp adds.

    One warp for each took 1.3 to 2.1 times as long (512 to 2,048 features, 128 to 512 rows, H200).
    Of small blocks and 16 bits 22 products of 199 to 14,122 rows take 0.82 of their time in blocks
    of more warps, a power of two of them, and with short rings.
    """
    split = 1
    while split < launch.WARPS and 2 * split * units <= warps and 4 * split <= steps + 1:
        split *= 2
    blocks = warps // (launch.WARPS * max(units, 1))
    return split, max(min(blocks, isqrt((steps + 1) // launch.WARPS)), 1)


def plan_blocks(index: Index, size: int) -> tuple[np.ndarray, int]:
    """((place, line of dy) for each block of a unit, its line of x, 0; how many units).

    For weight_grad: the lines of x are the block rows in parts of up to 32 features, those of dy
    the block columns. A unit is a square of 32 of a block, or several blocks side by side; -1 where
    it has fewer. Units of one line of x follow each other.
    """
    indptr, ys, places = lines_of(index, True, size)
    together = max(WIDTH // size, 1)
    counts = -(-np.diff(indptr) // together)
    line = np.repeat(np.arange(counts.size), counts)
    units = np.zeros((line.size + READ_AHEAD, 2 * together + 2), np.int32)
    at = np.arange(line.size)
    step = at - (np.cumsum(counts) - counts)[line]
    name_blocks(units, np.stack([line, step, at, line, 0 * at], 1), indptr, ys, places)
    return units.reshape(-1), line.size


@cache
def block_kernel(blocks: Blocks) -> Any:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]; views of operands as in `lines`.

    `maps` are those of x, dy and dvalues; `w_view` is that of dw, as in `requests.engine_asks`.
    """
    form, depth, x_side, dy_side, source, WARPS, shares, LONG, SPLIT, CUTS, *how = blocks
    TILES, MADE, GATED = how
    SLAB = x_side.slab + dy_side.slab > 0
    STAGES, STAGE, MINE = source.stages, blocks.stage_words, blocks.warp_words
    ALL, BARRIERS = WARPS * shares // (SPLIT * CUTS), WARPS * source.stages
    ENGINE, OVERLAP = source.engine, source.overlap
    X_SKEWED, DY_SKEWED = x_side.skewed != "", dy_side.skewed != ""
    X_START, ROWS, RECORD = TILES * blocks.tile_words, TILES * WIDTH, 2 * (WIDTH // depth) + 2
    LINE, RECORDS = RECORD - 2, (source.stages, RECORD)
    RUN, PIECES, SUMS = form.run, WIDTH**2 // form.run, sums_of(form, x_side)
    HELD = TILES * form.steps, x_side.groups + x_side.groups % 2, 2
    ENTRY, LEFT = listed(WIDTH // depth) if GATED else RECORD, WARPS * MINE
    read, prepare, close = reading(WIDTH // depth, ENTRY), opening(source, 3), closing(source)
    deal = dealing(WIDTH // depth, False, prepare, OVERLAP)
    request, wait = requesting(blocks), waiting(source)
    hold, multiply = holding(form, x_side, TILES), consuming(form, x_side, dy_side, TILES, LONG)
    write = writing(form, depth, x_side.groups, source.engine)

    @cuda.jit(**registers(32 * WARPS, most=255))
    def kernel(x, x_view, dy, dy_view, w_view, maps, fresh, plan, count, dvalues, gates, room):
        operands = x, x_view, dy, dy_view, maps
        shared, floats = cuda.shared.array(0, uint32), cuda.shared.array(0, float32)
        bars = cuda.shared.array(BARRIERS, uint64)
        acc = cuda.local.array(SUMS, float32)
        x_hi, x_lo = cuda.local.array(HELD, uint32), cuda.local.array(HELD, uint32)
        records = cuda.local.array(RECORDS, int32)
        warp = uint32(cuda.threadIdx.x) // 32
        pitch = uint32(x_view[0]) if SLAB else uint32(0)
        x_how = dy_how = pitch
        base = uint32(first_multiple(shared, ALIGNED) + warp * MINE)
        leaving, bar = uint32(base + STAGES * STAGE), uint32(warp * STAGES)
        number = int64(cuda.blockIdx.x) // CUTS * (WARPS // SPLIT) + warp // SPLIT
        units = count[0] if MADE else count
        unit, last = units * number // ALL, units * (number + 1) // ALL
        steps = (x_view[0] + ROWS - 1) // ROWS if LONG else int64(1)  # of a unit
        part, cut = int64(warp % SPLIT), int64(cuda.blockIdx.x) % CUTS
        own, piece = cut * SPLIT + part, unit * CUTS + cut
        first, end = steps * own // (SPLIT * CUTS), steps * (own + 1) // (SPLIT * CUTS)
        if OVERLAP:
            let_next_kernel_start()
        if GATED:
            ends = cuda.shared.array(WARPS, int32)
            left = cuda.shared.array(0, int32)[first_multiple(shared, ALIGNED) + LEFT :]
            run, ring = (int32(unit), int32(last), False), (bars, bar, fresh, maps)
            run = deal(plan, run, last - unit, ring, gates, w_view[1], left, ends)
            unit, last, plan = int64(run[0]), int64(run[1]), left
        whole, mine = read(plan, unit), SPLIT > 1 and part == 0 and unit < last
        ahead, step_ahead = unit, first
        for s in range(0 if GATED else STAGES):
            record = read(plan, ahead)
            for e in range(RECORD):
                records[s, e] = record[e]
            ahead, step_ahead = after(ahead, step_ahead, first, end, LONG)
        record, now = read(plan, ahead), whole
        if not GATED:
            prepare(bars, bar, fresh, maps)
            if OVERLAP:
                wait_for_earlier_kernels()
        requested = held = now[LINE] - 1
        ahead, step_ahead, step = unit, first, first
        for s in range(STAGES):
            if ahead < last:
                start, own = uint32(base + s * STAGE), uint32(bar + s)
                new = record if GATED else records[s]
                other = LONG or new[LINE] != requested
                top = step_ahead * ROWS
                request(new, other, operands, top, shared, start, bars, own)
                requested = new[LINE]
            ahead, step_ahead = after(ahead, step_ahead, first, end, LONG)
            record = read(plan, ahead) if GATED else record
            close()
        stage = phase = uint32(0)
        while unit < last:
            coming = read(plan, unit + 1)
            start, own = uint32(base + stage * STAGE), uint32(bar + stage)
            wait(bars, own, phase)
            if X_SKEWED or DY_SKEWED:  # as `skewed.taking_along` has it
                left = uint32(x_view[0] - step * ROWS) * uint32(8)
                x_how = left | uint32(x_view[3]) % uint32(8) if X_SKEWED else pitch
                dy_how = left | uint32(dy_view[3]) % uint32(8) if DY_SKEWED else pitch
            if LONG or now[LINE] != held:
                hold(shared, uint32(start + X_START), x_how, x_hi, x_lo)
                held = now[LINE]
            if step == first:
                pieces.clear(acc)
            multiply(shared, start, dy_how, x_hi, x_lo, acc)
            sync_warp()
            if ahead < last:
                other, top = LONG or record[LINE] != requested, step_ahead * ROWS
                request(record, other, operands, top, shared, start, bars, own)
                requested = record[LINE]
                ahead, step_ahead = after(ahead, step_ahead, first, end, LONG)
                record = read(plan, ahead)
            close()
            unit, step = after(unit, step, first, end, LONG)
            if step == first:
                if SPLIT > 1:
                    pieces.save(floats[base:], 0, acc)
                else:
                    write(operands, w_view, now, dvalues, shared, leaving, acc)
                now = coming
            stage, phase = following(stage, phase, STAGES)
        if SPLIT > 1:
            cuda.syncthreads()
            if mine:
                pieces.clear(acc)
                for k in range(SPLIT):
                    pieces.add_saved(floats[base + k * MINE :], 0, acc)
                complete = True
                if CUTS > 1:
                    to, at = room.partials, piece - piece % CUTS
                    complete = pieces.join(to, room.tickets, piece, at, CUTS, 1, acc)
                if complete:
                    write(operands, w_view, whole, dvalues, shared, leaving, acc)
        if MADE:  # places that no block has
            zero, begin = uint32(0), units * PIECES + cuda.grid(1)
            for piece in range(begin, dvalues.size // RUN, cuda.gridsize(1)):
                store_4xu32(dvalues, int64(piece) * RUN, zero, zero, zero, zero)
        if ENGINE and elect() != 0:
            bulk_wait_read()

    return kernel


@cuda.jit(device=True)
def after(unit, step, first, end, long):
    """(unit, step) after one, of the steps from first to end of each."""
    more = long and step + 1 < end
    return (unit, step + 1) if more else (unit + 1, first)


@cache
def requesting(blocks: Blocks) -> Any:
    """Fill a stage with a tile of dy and, where it is another one than before, one of x.

    Their rows of the batch are those from `top` on.
    """
    form, depth, x_side, dy_side, source, *_ = blocks
    TILES, TILE, LINE = blocks.tiles, blocks.tile_words, 2 * (WIDTH // depth)
    X_START = TILES * TILE
    if not source.engine:
        copy_x = copying_side(form, depth, WIDTH, depth, x_side, x_side.across, source.reach)
        copy_dy = copying_side(form, WIDTH, WIDTH, depth, dy_side, dy_side.across, source.reach)
    X_ACROSS, DY_ACROSS, X_SLAB, DY_SLAB = x_side.across, dy_side.across, x_side.slab, dy_side.slab
    A_ROW = 4 * form.row  # bytes

    @cuda.jit(device=True)
    def by_the_engine(record, other, operands, top, shared, start, bars, bar):
        x, x_view, dy, _, maps = operands
        if elect() != 0:
            slab, tiles = uint32(A_ROW * x_view[0]), uint32(4 * X_START)  # bytes
            x_bytes, dy_bytes = slab if X_SLAB else tiles, slab if DY_SLAB else tiles
            mbarrier_expect(bars, bar, x_bytes + dy_bytes if other else dy_bytes)
            if DY_SLAB:
                at = int64(record[1]) * (WIDTH * x_view[0])
                bulk_load(shared, start, dy, at, slab, bars, bar)
            if X_SLAB and other:
                at = int64(record[LINE]) * (WIDTH * x_view[0])
                bulk_load(shared, uint32(start + X_START), x, at, slab, bars, bar)
            for u in range(TILES):
                first, rows = int32(record[1] * WIDTH), int32(top + u * WIDTH)  # beyond all, 0
                place = uint32(start + u * TILE)
                column, row = (first, rows) if DY_ACROSS else (rows, first)
                if not DY_SLAB:
                    tma_load_2d(shared, place, maps[1], column, row, bars, bar)
                if other and not X_SLAB:
                    first = int32(record[LINE] * WIDTH)
                    column, row = (first, rows) if X_ACROSS else (rows, first)
                    tma_load_2d(shared, uint32(place + X_START), maps[0], column, row, bars, bar)

    @cuda.jit(device=True)
    def by_the_lanes(record, other, operands, top, shared, start, bars, bar):
        x, x_view, dy, dy_view, _ = operands
        copy_dy(dy, record, dy_view, top, shared, start)
        if other:
            to = uint32(start + X_START)
            copy_x(x, (int32(0), record[LINE]), x_view, top, shared, to)

    return by_the_engine if source.engine else by_the_lanes
