"""forward and input_grad by warps that each have a ring of tiles in shared memory.

The work of a warp is that of `lines`, but for where its operands are: units that come next are on
their way to its ring while this one is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32, uint64

from numbsparse.kernels.matmul.k8_small_batch.finish import finishing
from numbsparse.kernels.matmul.k8_small_batch.registers import jit_for
from numbsparse.kernels.matmul.k8_small_batch.repair import mend_line
from numbsparse.kernels.matmul.k8_small_batch.ring import ALIGNED, Ring, ask, open_ring
from numbsparse.kernels.matmul.k8_small_batch.sums import add, add_saved, clear, save
from numbsparse.kernels.matmul.k8_small_batch.swapped_tiles import multiply_swapped
from numbsparse.kernels.matmul.k8_small_batch.tile_outputs import places, store_tiles
from numbsparse.kernels.matmul.k8_small_batch.tiles import multiply_tiles, words_of
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    first_multiple,
    let_next_kernel_start,
    load_4xu32,
    mbarrier_wait,
    sync_warp,
    wait_for_earlier_kernels,
)

RECORD = 4  # int32 of a unit


@cache
def ring_kernel(ring: Ring) -> Any:
    """y = x @ w; x and y are (batch, features, stride over the batch, stride over features).

    `maps` are those of x and w. Where they are `fresh`, the copy engine is told so.
    """
    WARPS, STAGES, STAGE, SLOTS = ring.warps, ring.stages, ring.stage_words, ring.slot_words
    (M, N), FAR, BARRIERS = ring.sums, ring.far, ring.warps * ring.stages
    FIRST, PATIENT = ring.first, ring.patient
    SUMS = (M, N, 4)
    prepare, ask_for, consume = open_ring(STAGES, 2), ask(ring), consuming(ring)
    put, mend = store_tiles(ring), mend_line(ring.size, ring.turned, 4 * M * N, places(ring))
    finish = finishing(ring.form, M, N, put, mend)
    clear_sums, save_sums, add_part = clear(M, N), save(M, N), add_saved(M, N)

    @jit_for(WARPS)
    def kernel(
        x, x_is, values, maps, fresh, plan, each, sections, empty_lines, partials, tickets, y, y_is
    ):
        shared = cuda.shared.array(0, uint32)
        slots = cuda.shared.array(0, float32)  # sums of lines that began in an earlier warp
        first_slot = int64(0)
        if FAR:
            slots, first_slot = partials, tickets.size + cuda.blockIdx.x * int64(WARPS - 1)
        bars = cuda.shared.array(BARRIERS, uint64)
        acc = cuda.local.array(SUMS, float32)
        squares, x_lines = cuda.local.array(FIRST, int32), cuda.local.array(FIRST, int32)
        x_map, w_map = maps[0], maps[1]
        warp = uint32(cuda.threadIdx.x) // 32
        base = uint32(first_multiple(shared, ALIGNED) + SLOTS + warp * (STAGES * STAGE))
        bar = uint32(warp * STAGES)
        let_next_kernel_start()
        number = int64(cuda.blockIdx.x) * WARPS + warp
        unit = number * each
        # All that is read of the plan, on its way at once; it is looked at after the wait.
        count = plan[sections[0] + number]
        for s in range(FIRST):
            squares[s], x_lines[s], _, _ = read(plan, unit + s)
        square, x_line, _, _ = read(plan, unit + FIRST)
        _, _, name, end = read(plan, unit)
        empty = cuda.blockIdx.x + cuda.gridDim.x * int64(WARPS - 1 - warp)
        empty_line = plan[sections[2] + min(empty, empty_lines)]
        prepare(bars, bar, fresh, maps)
        wait_for_earlier_kernels()
        last, there, continued = unit + abs(count), count != 0, count < 0
        for s in range(FIRST):
            if unit + s < last:
                start = uint32(base + s * STAGE)
                own = uint32(bar + s)
                ask_for(x_map, w_map, x_lines[s], squares[s], shared, start, bars, own)
        clear_sums(acc)
        while empty < empty_lines:  # while the first tiles are on their way
            put(y, int64(empty_line), y_is, acc)
            empty += cuda.gridDim.x * WARPS
            empty_line = plan[sections[2] + min(empty, empty_lines)]
        stage = phase = uint32(0)
        while True:
            more = unit + 1 < last
            _, _, next_name, next_end = read(plan, unit + 1)
            if there:
                start = uint32(base + stage * STAGE)
                mbarrier_wait(bars, bar + stage, phase)
                if PATIENT and more:
                    other = uint32(1 - stage)
                    place = uint32(base + other * STAGE)
                    ask_for(x_map, w_map, x_line, square, shared, place, bars, uint32(bar + other))
                    square, x_line, _, _ = read(plan, unit + 2)
                consume(shared, start, acc)
                sync_warp()
                if not PATIENT and unit + STAGES < last:
                    own = uint32(bar + stage)
                    ask_for(x_map, w_map, x_line, square, shared, start, bars, own)
                    square, x_line, _, _ = read(plan, unit + STAGES + 1)
            stage, phase = following(stage, phase, STAGES)
            unit += 1
            if not more or next_end != end:
                if continued:
                    save_sums(slots, first_slot + warp - 1, acc)
                if not more:
                    cuda.syncthreads()
                if there and not continued:
                    slot, start_of = first_slot + warp, unit
                    while start_of < end:  # what later warps have of this line
                        add_part(slots, slot, acc)
                        slot, start_of = slot + 1, start_of + each
                    finish(x, x_is, values, plan, sections, partials, tickets, name, y, y_is, acc)
                if not more:
                    break
                clear_sums(acc)
                continued = False
            name, end = next_name, next_end

    return kernel


@cuda.jit(device=True)
def read(plan, unit):
    """(square of w, line of x, name of the line of y, end of its piece)."""
    v = load_4xu32(plan, unit * RECORD)
    return int32(v[0]), int32(v[1]), int32(v[2]), int32(v[3])


@cache
def consuming(ring: Ring) -> Any:
    """acc += the products of the tiles of a stage."""
    TILE, W_START = words_of(ring.form), ring.x_words
    # Of float32, at most 32 rows of the batch at once, as registers allow; and each unit's sum
    # starts from zero, because tensor cores cut off what they add.
    ROWS = min(ring.groups, 4) if ring.form.dtype == "float32" else ring.groups
    SUMS, TILES = (ROWS // 2, 4, 4), ring.groups // ROWS
    product = multiply_swapped if ring.swapped else multiply_tiles
    multiply = product(ring.form, ring.x_across, not ring.turned, ROWS, ring.paired)
    clear_sums, add_sums = clear(ROWS // 2, 4), add(ROWS // 2, 4)

    @cuda.jit(device=True)
    def of_floats(shared, start, acc):
        for u in range(TILES):
            part = cuda.local.array(SUMS, float32)
            clear_sums(part)
            multiply(shared, uint32(start + u * TILE), uint32(start + W_START), part)
            add_sums(acc[u * ROWS // 2 :], part)

    @cuda.jit(device=True)
    def of_halves(shared, start, acc):
        multiply(shared, start, uint32(start + W_START), acc)

    return of_halves if ring.form.halves else of_floats
