"""weight_grad by warps that each have a ring of tiles in shared memory.

The work of a warp is that of `blocks`, but for where its operands are: tiles of dy that come next
are on their way to its ring while this one is multiplied.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint32, uint64

from numbsparse.kernels.matmul.k8_small_batch.block_ring import BlockRing, ask
from numbsparse.kernels.matmul.k8_small_batch.block_tiles import (
    LINES,
    hold,
    multiply_held,
    write_square,
)
from numbsparse.kernels.matmul.k8_small_batch.registers import jit_for
from numbsparse.kernels.matmul.k8_small_batch.ring import ALIGNED, open_ring
from numbsparse.kernels.matmul.k8_small_batch.ring_lines import read
from numbsparse.kernels.matmul.k8_small_batch.sums import clear
from numbsparse.kernels.matmul.k8_small_batch.tiles import steps, words_of
from numbsparse.kernels.parts.ring import following
from numbsparse.kernels.ptx import (
    bulk_wait_read,
    elect,
    first_multiple,
    let_next_kernel_start,
    mbarrier_wait,
    sync_warp,
    wait_for_earlier_kernels,
)


@cache
def block_ring_kernel(ring: BlockRing) -> Any:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]; operands as in `ring_lines`.

    `maps` are those of x, dy and dvalues; a unit of the plan is (square, line of dy, line of x, -).
    """
    WARPS, STAGES, STAGE = ring.warps, ring.stages, ring.stage_words
    ALL, MINE, BARRIERS = ring.warps * ring.shares, ring.warp_words, ring.warps * ring.stages
    TILE, HELD = words_of(ring.form), (steps(ring.form), *LINES)
    ask_for, write, clear_sums = ask(ring), write_square(ring), clear(2, 4)
    hold_x, multiply = hold(ring.form, ring.x_across), multiply_held(ring.form, ring.dy_across)
    prepare = open_ring(STAGES, 3)

    @jit_for(WARPS)
    def kernel(x, x_is, dy, dy_is, maps, fresh, plan, count):
        shared = cuda.shared.array(0, uint32)
        bars = cuda.shared.array(BARRIERS, uint64)
        acc = cuda.local.array((2, 4, 4), float32)
        x_hi, x_lo = cuda.local.array(HELD, uint32), cuda.local.array(HELD, uint32)
        dy_lines, x_lines = cuda.local.array(STAGES, int32), cuda.local.array(STAGES, int32)
        x_map, dy_map, dw_map = maps[0], maps[1], maps[2]
        warp = uint32(cuda.threadIdx.x) // 32
        base = uint32(first_multiple(shared, ALIGNED) + warp * MINE)
        leaving, bar = uint32(base + STAGES * STAGE), uint32(warp * STAGES)
        number = int64(cuda.blockIdx.x) * WARPS + warp
        unit, last = count * number // ALL, count * (number + 1) // ALL
        let_next_kernel_start()
        for s in range(STAGES):
            _, dy_lines[s], x_lines[s], _ = read(plan, unit + s)
        _, dy_line, x_line, _ = read(plan, unit + STAGES)
        square, column, line, _ = read(plan, unit)
        prepare(bars, bar, fresh, maps)
        wait_for_earlier_kernels()
        asked = held = line - 1
        for s in range(STAGES):
            if unit + s < last:
                start, other = uint32(base + s * STAGE), x_lines[s] != asked
                asked = x_lines[s]
                ask_for(x_map, dy_map, asked, other, dy_lines[s], shared, start, bars, bar + s)
        stage = phase = uint32(0)
        while unit < last:
            next_square, next_column, next_line, _ = read(plan, unit + 1)
            start = uint32(base + stage * STAGE)
            mbarrier_wait(bars, bar + stage, phase)
            if line != held:
                hold_x(shared, uint32(start + TILE), x_hi, x_lo)
                held = line
            clear_sums(acc)
            multiply(shared, start, x_hi, x_lo, acc)
            sync_warp()
            if unit + STAGES < last:
                other = x_line != asked
                ask_for(x_map, dy_map, x_line, other, dy_line, shared, start, bars, bar + stage)
                asked = x_line
                _, dy_line, x_line, _ = read(plan, unit + STAGES + 1)
            write(x, x_is, line, dy, dy_is, column, dw_map, square, shared, leaving, acc)
            square, column, line = next_square, next_column, next_line
            unit += 1
            stage, phase = following(stage, phase, STAGES)
        if elect() != 0:
            bulk_wait_read()

    return kernel
