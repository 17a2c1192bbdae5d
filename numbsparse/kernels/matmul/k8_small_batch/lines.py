"""forward and input_grad: a warp adds up units of its share, line after line.

While one unit is multiplied, the next ones are on their way to the ring of the warp. Its stage is
requested again after that: eight drawn products, where it was as soon as all that is read of it is
in registers, took 1.01 times as long (H200). The warps of a share take equal runs of its units
wherever lines end: what a warp has of a line that began in an earlier one it leaves in shared
memory, where the warp in which it began adds it up. Where more than one share holds a line each
leaves its part, and the last to finish writes the line.

Of blocks with gates a share first lists what these leave, in shared memory, and its warps take
equal runs of that. Warps of few units, the longest run of which would hardly become shorter, look
at the gates of each.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32, uint64

from numbsparse.kernels.card import registers
from numbsparse.kernels.parts import pieces
from numbsparse.kernels.parts.gates import dealing, filling_blocks, gates_of, listed
from numbsparse.kernels.parts.lanes import lanes_ask
from numbsparse.kernels.parts.requests import ALIGNED, engine_asks, passing_over, reading, x_words
from numbsparse.kernels.parts.ring import Source, closing, following, opening, waiting
from numbsparse.kernels.parts.store_lines import Sums, looking, repairing, storing
from numbsparse.kernels.parts.tiles import WIDTH, operands_of
from numbsparse.kernels.parts.tiles import multiply as tile_products
from numbsparse.kernels.ptx import (
    first_multiple,
    let_next_kernel_start,
    prefetch_parameters,
    sync_warp,
    wait_for_earlier_kernels,
)


class Lines(NamedTuple):
    """What a kernel is made for."""

    sums: Sums
    depth: int  # features of a line: 32, or those of a smaller block
    source: Source
    warps: int
    far: bool  # whether warps leave sums for each other in global memory
    tiled: bool  # whether a batch takes several tiles, with shares of the multiprocessors each
    patient: bool = False  # whether a unit is requested when the one before it is there

    @property
    def rows(self) -> int:
        """Rows of the batch that a tile has."""
        return 8 * self.sums.x.groups

    @property
    def piece(self) -> int:
        """float32 of a warp's sums."""
        return pieces.floats_of(*self.sums.shape)

    @property
    def stage_words(self) -> int:
        form = self.sums.form
        return x_words(form, self.sums.x) + WIDTH * form.row

    @property
    def slot_words(self) -> int:
        """Room for the sums of lines that began with an earlier warp."""
        return 0 if self.far else (self.warps - 1) * self.piece

    @property
    def shared_bytes(self) -> int:
        stages = self.warps * self.source.stages * self.stage_words
        return 4 * (stages + self.slot_words + self.warps * self.room_words) + ALIGNED

    @property
    def room_words(self) -> int:
        """Of a warp, for a line that waits to be written."""
        return self.sums.room_words(self.depth)


@cache
def line_kernel(lines: Lines) -> Any:
    """y = x @ w; x and y are (batch, features, stride over the batch, stride over features).

    `maps` are those of x and w, where the copy engine loads them. Where they are `fresh`, they are
    announced. `w_view` as in `requests.engine_asks`, the plan as in `plan.plan_lines`.
    gates : of each block, where `sums.w` is gated
    dense : `repair.Dense`, where float32 is split
    """
    GATED, TOGETHER = lines.sums.w.gated > 0, WIDTH // lines.depth
    (sums, depth, source, WARPS, FAR, TILED, PATIENT), LISTS = lines, lines.sums.w.listed
    (M, N), STAGES, STAGE, SLOTS = sums.shape, source.stages, lines.stage_words, lines.slot_words
    SUMS, OVERLAP, BARRIERS = (M, N, 4), source.overlap, WARPS * source.stages
    FIRST = 1 if PATIENT else STAGES  # units that a warp requests at once when it starts
    ROWS, ENGINE, RECORD = lines.rows, source.engine, 2 * (WIDTH // depth) + 2
    SLAB, SKEWED = sums.x.slab > 0, sums.x.skewed != ""
    PAIRS = source.engine and sums.form.is_16_bit  # rows of a block of 32: see `squares_of`
    part = at_once(sums)
    (A, B), UNIT = (operands_of(sums.form, o) for o in part.operands), (*part.shape, 4)
    NAME, END, RECORDS = RECORD - 2, RECORD - 1, (FIRST, RECORD)
    ENTRY, PASSES = listed(TOGETHER) if LISTS else RECORD, LISTS and ENGINE
    read, prepare, close = reading(TOGETHER, ENTRY), opening(source, 2), closing(source)
    deal = dealing(TOGETHER, True, prepare, OVERLAP)
    ASKS, (ask_gates, take_gates) = GATED and not LISTS, gates_of(TOGETHER, GATED, LISTS)
    wait, multiply, (form, x, w, _) = waiting(source), consuming(sums), sums
    by_lanes = x, not w.across, depth, source.reach
    fill = engine_asks(form, x) if ENGINE else lanes_ask(form, *by_lanes)
    request = filling_blocks(fill) if PASSES else fill
    put, finish = storing(sums), finishing(lines)
    pass_over = passing_over(request, read, ENGINE, 0 if PATIENT else STAGES)
    ROOM, ROOM_WORDS = SLOTS + WARPS * STAGES * STAGE, lines.room_words
    LEFT = ROOM + WARPS * ROOM_WORDS

    @cuda.jit(**registers(32 * WARPS, most=255))
    def kernel(
        x, x_view, values, w_view, maps, fresh, gates, dense, plan, each, sections, empty_lines,
        partials, tickets, y, y_view,
    ):  # fmt: skip
        operands, parts_of = (x, x_view, values, w_view, maps), (plan, sections, partials, tickets)
        shared = cuda.shared.array(0, uint32)
        slots = cuda.shared.array(0, float32)  # sums of lines that began in an earlier warp
        first_slot = int64(0)
        tile = int64(cuda.blockIdx.y if TILED else 0)
        top = tile * (w_view[2] if ENGINE else ROWS)  # of the batch; else these are equal
        own_view = y_view
        if ENGINE:  # what is behind the rows of this tile is of the next one, or of nobody
            own_view = min(y_view[0], top + w_view[2]), y_view[1], y_view[2], y_view[3]
        x_top = uint32(top if SLAB else 0)
        pitch = uint32(x_view[0] if SLAB else x_view[3] if SKEWED else 0)
        paired = uint32(16 if PAIRS and w_view[0] == WIDTH else 0)
        if FAR:
            block = tile * cuda.gridDim.x + cuda.blockIdx.x
            slots, first_slot = partials, tickets.size + block * int64(WARPS - 1)
        bars = cuda.shared.array(BARRIERS, uint64)
        acc = cuda.local.array(SUMS, float32)
        a, b = cuda.local.array(A, uint32), cuda.local.array(B, uint32)
        of_unit = cuda.local.array(UNIT, float32)
        records = cuda.local.array(RECORDS, int32)
        own_gates = cuda.local.array(TOGETHER, float32)
        next_gates = cuda.local.array(TOGETHER, float32)
        warp = uint32(cuda.threadIdx.x) // 32
        base = uint32(first_multiple(shared, ALIGNED) + SLOTS + warp * (STAGES * STAGE))
        bar = uint32(warp * STAGES)
        room = uint32(first_multiple(shared, ALIGNED) + ROOM + warp * ROOM_WORDS)
        if OVERLAP:
            let_next_kernel_start()
        number = int64(cuda.blockIdx.x) * WARPS + warp
        unit, units = int32(number * each), plan
        # All that is read of the plan is loaded at once, and used after the wait.
        count = plan[sections.counts + number]
        if LISTS:
            ends = cuda.shared.array(WARPS, int32)  # of the piece that a warp goes on with
            units = cuda.shared.array(0, int32)[first_multiple(shared, ALIGNED) + LEFT :]
            ring, run = (bars, bar, fresh, maps), (unit, int32(unit + abs(count)), count < 0)
            run = deal(plan, run, each, ring, gates, w_view[1], units, ends)
            (unit, last, continued), there = run, run[0] < run[1]
        for s in range(FIRST):
            record = read(units, unit + s)
            for e in range(RECORD):
                records[s, e] = record[e]
        record, now = read(units, unit + FIRST), read(units, unit)
        coming = read(units, unit + 1) if ASKS else now
        empty = cuda.blockIdx.x + cuda.gridDim.x * int64(WARPS - 1 - warp)
        empty_line = plan[sections.empty + min(empty, empty_lines)]
        if not LISTS:
            prepare(bars, bar, fresh, maps)
            # Behind the wait they are read in 1.03 to 1.06 times as long (H200).
            prefetch_parameters(w_view[2], y.size, y_view[0], y_view[3])
            if OVERLAP:
                wait_for_earlier_kernels()
            last, there, continued = int32(unit + abs(count)), count != 0, count < 0
        name, end = now[NAME], now[END]
        if ASKS and there:
            ask_gates(now, gates, w_view[1], own_gates)
        for s in range(FIRST):
            if unit + s < last:
                start, own = uint32(base + s * STAGE), uint32(bar + s)
                request(records[s], operands, top, shared, start, bars, own)
            close()
        pieces.clear(acc)
        while empty < empty_lines:  # while the first tiles are on their way
            put(y, top, int64(empty_line) * depth, own_view, acc, room)
            empty += cuda.gridDim.x * WARPS
            empty_line = plan[sections.empty + min(empty, empty_lines)]
        stage = phase = uint32(0)
        while True:
            more = unit + 1 < last
            if not ASKS:
                coming = read(units, unit + 1)
            elif more:
                ask_gates(coming, gates, w_view[1], next_gates)
            after = read(units, unit + 2) if ASKS else coming
            if there:
                start, own = uint32(base + stage * STAGE), uint32(bar + stage)
                wait(bars, own, phase)
                if PATIENT and more:
                    other = uint32(1 - stage)
                    place, own = uint32(base + other * STAGE), uint32(bar + other)
                    request(record, operands, top, shared, place, bars, own)
                    record = read(units, unit + 2)
                if take_gates(units, unit, own_gates):
                    multiply(shared, start, x_top, pitch, paired, own_gates, a, b, of_unit, acc)
                    sync_warp()
                    if not PATIENT and unit + STAGES < last:
                        request(record, operands, top, shared, start, bars, own)
                        record = read(units, unit + STAGES + 1)
                    close()
                elif GATED:
                    ring = shared, start, bars, own
                    record = pass_over(record, units, unit, last, operands, top, ring)
                    close()
            stage, phase = following(stage, phase, STAGES)
            unit = int32(unit + 1)
            if not more or coming[END] != end:
                if continued:
                    pieces.save(slots, first_slot + warp - 1, acc)
                if not more:
                    cuda.syncthreads()
                if there and not continued:
                    slot, start_of = int32(first_slot + warp), unit
                    other = uint32(WARPS if more else warp + 1)
                    # What later warps have of this line.
                    while other < WARPS if LISTS else start_of < end:
                        if not LISTS or ends[other] == end:
                            pieces.add_saved(slots, slot, acc)
                        slot, start_of = int32(slot + 1), int32(start_of + each)
                        other = uint32(other + 1)
                    finish(dense, w_view[0], top, parts_of, name, y, own_view, acc, room)
                if not more:
                    break
                pieces.clear(acc)
                continued = False
            name, end, now, coming = coming[NAME], coming[END], coming, after
            if ASKS:
                for k in range(TOGETHER):
                    own_gates[k] = next_gates[k]

    return kernel


def at_once(sums: Sums) -> Sums:
    """What is multiplied at once: of float32, at most 32 rows of the batch, as registers allow."""
    few = sums._replace(x=sums.x._replace(groups=min(sums.x.groups, 4)))
    return sums if sums.form.is_16_bit else few


@cache
def consuming(sums: Sums) -> Any:
    """multiply(...): acc += the products of the tiles of a stage.

    Of a slab of this pitch, rows from `top` on, of w `paired` as in `tiles.take_16_bit`. The sum of
    a unit of float32 starts from zero, because tensor cores cut off what they add.
    """
    form, x, *_ = sums
    TILE, W_START, X_FIRST = WIDTH * form.row, x_words(form, x), sums.x_first
    NEXT = WIDTH if x.slab else TILE  # words to the next 32 rows of float32
    part, FROM_ZERO, IN_WORD = at_once(sums), not form.is_16_bit, WIDTH // form.row
    add = pieces.add_times if sums.w.gated == WIDTH else pieces.add_once
    M, TILES = part.shape[0], x.groups // part.x.groups
    load, rest = tile_products(form, *part.operands)

    @cuda.jit(device=True)
    def multiply(shared, start, top, pitch, paired, gates, a, b, unit, acc):
        w_start = uint32(start + W_START)
        for u in range(TILES):
            x_start = uint32(start + top // IN_WORD + u * NEXT)
            if FROM_ZERO:
                pieces.clear(unit)
            if X_FIRST:
                load(shared, x_start, pitch, w_start, paired, gates, a, b, unit)
            else:
                load(shared, w_start, paired, x_start, pitch, gates, a, b, unit)
            if FROM_ZERO:
                rest(gates, a, b, unit)
                add(acc[M * u :], unit, gates)
            else:
                rest(gates, a, b, acc)

    return multiply


@cache
def finishing(lines: Lines) -> Any:
    """Write a line; of a line in parts, leave this part, and let the last one to finish write it.

    Of float32 operands in two parts, sums that are NaN are computed again.
    """
    sums, depth, *_ = lines
    put, repair, SPLIT = storing(sums), repairing(sums), sums.form.split
    nan_in, TILED = looking(sums), lines.tiled

    @cuda.jit(device=True)
    def finish(dense, size, top, parts_of, name, y, y_view, acc, room):
        plan, sections, partials, tickets = parts_of
        line, complete = int64(name), True
        if name < 0:
            cut = sections.cuts - 3 * (int64(name) + 1)
            line, first, many = int64(plan[cut]), int64(plan[cut + 1]), int64(plan[cut + 2])
            tile, tiles = (cuda.blockIdx.y, cuda.gridDim.y) if TILED else (0, 1)
            # Parts of the tiles take turns.
            part, first = (-1 - int64(name)) * tiles + tile, first * tiles + tile
            complete = pieces.join(partials, tickets, part, first, many, tiles, acc)
        if complete:
            put(y, top, line * depth, y_view, acc, room)
            if SPLIT and nan_in(acc, y_view[0] - top):
                repair(dense, size, top, line * depth, y, y_view)

    return finish
