"""forward and input_grad: a warp adds up units of its share, line after line.

While one unit is multiplied, the next one is on its way to the registers, and the record of the one
after it. The warps of a share take equal runs of its units wherever lines end: a line that began in
an earlier warp is left in shared memory, where the warp in which it began adds it up.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numbsparse.kernels.matmul.k8_small_batch.finish import finishing
from numbsparse.kernels.matmul.k8_small_batch.fragments import Form, Side, fetch, operand, words
from numbsparse.kernels.matmul.k8_small_batch.outputs import store
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH
from numbsparse.kernels.matmul.k8_small_batch.products import products, tiles
from numbsparse.kernels.matmul.k8_small_batch.registers import jit_for
from numbsparse.kernels.matmul.k8_small_batch.repair import mend_line, own_lines, square_start
from numbsparse.kernels.matmul.k8_small_batch.sums import add, add_saved, clear, save
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels


class Way(NamedTuple):
    """What a kernel is made for."""

    form: Form
    size: int  # of a block
    turned: bool  # whether the sum runs along the rows of w
    w: Side
    x: Side
    y: str  # how outputs are stored
    warps: int
    overlap: bool  # whether it may start while the kernel before it ends


@cache
def line_kernel(way: Way) -> Any:
    """y = x @ w; operands are (batch, features, stride over the batch, stride over features)."""
    form, size, turned, w_side, x_side, _, WARPS, OVERLAP = way
    ROUNDS = form.rounds
    RECORD = 2 * max(WIDTH // size, 1) + 2
    J, JB = w_side.J, x_side.J
    M = tiles(J)
    W_RAW, X_RAW = (ROUNDS, words(form, w_side)), (ROUNDS, words(form, x_side))
    SUMS = (M, JB, 4)
    find, fetch_round, multiply = record(way), fetching(way), round_of(way)
    put, mend = writing(way), mend_line(size, turned, 2 * JB * J, own_lines(J, JB))
    finish = finishing(form, M, JB, put, mend)
    clear_sums, add_sums = clear(M, JB), add(M, JB)
    save_sums, add_part = save(M, JB), add_saved(M, JB)

    @jit_for(WARPS)
    def kernel(x, x_is, values, plan, each, sections, empty_lines, partials, tickets, y, y_is):
        slots = cuda.shared.array(0, float32)  # sums of lines that began in an earlier warp
        w_raw, x_raw = cuda.local.array(W_RAW, uint32), cuda.local.array(X_RAW, uint32)
        acc, part = cuda.local.array(SUMS, float32), cuda.local.array(SUMS, float32)
        blocks, lines = cuda.local.array(ROUNDS, int32), cuda.local.array(ROUNDS, int32)
        warp, number = cuda.threadIdx.x // 32, cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        unit = number * each
        count = plan[sections[0] + number]
        find(plan, unit, blocks, lines)
        name, end = plan[unit * RECORD + RECORD - 2], plan[unit * RECORD + RECORD - 1]
        empty = cuda.blockIdx.x + cuda.gridDim.x * int64(WARPS - 1 - warp)
        empty_line = plan[sections[2] + min(empty, empty_lines)]
        last, there, continued = unit + abs(count), count != 0, count < 0
        if OVERLAP:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        if there:
            fetch_round(0, x, x_is, values, blocks, lines, w_raw, x_raw)
            if ROUNDS == 2:
                fetch_round(1, x, x_is, values, blocks, lines, w_raw, x_raw)
        find(plan, unit + 1, blocks, lines)
        clear_sums(acc)
        while empty < empty_lines:  # while the first unit is on its way
            put(y, int64(empty_line), y_is, acc)
            empty += cuda.gridDim.x * WARPS
            empty_line = plan[sections[2] + min(empty, empty_lines)]
        while True:
            at = unit * RECORD + RECORD
            next_name, next_end = plan[at + RECORD - 2], plan[at + RECORD - 1]
            more = unit + 1 < last
            if there:
                clear_sums(part)
                multiply(0, x, x_is, values, blocks, lines, more, w_raw, x_raw, part)
                if ROUNDS == 2:
                    multiply(1, x, x_is, values, blocks, lines, more, w_raw, x_raw, part)
                find(plan, unit + 2, blocks, lines)
                add_sums(acc, part)
            unit += 1
            if not more or next_end != end:
                if continued:
                    save_sums(slots, warp - 1, acc)
                if not more:
                    cuda.syncthreads()
                if there and not continued:
                    slot, start = warp, unit
                    while start < end:  # what later warps have of this line
                        add_part(slots, slot, acc)
                        slot, start = slot + 1, start + each
                    finish(x, x_is, values, plan, sections, partials, tickets, name, y, y_is, acc)
                if not more:
                    break
                clear_sums(acc)
                continued = False
            name, end = next_name, next_end

    return kernel


@cache
def record(way: Way) -> Any:
    """blocks[h] and lines[h] = block and line of x of a unit, of this lane's run in round h."""
    ROUNDS, RUN, DEPTH = way.form.rounds, way.form.run, min(way.size, WIDTH)
    RECORD = 2 * (WIDTH // DEPTH) + 2

    @cuda.jit(device=True)
    def find(plan, unit, blocks, lines):
        for h in range(ROUNDS):
            k = (4 * h + cuda.threadIdx.x % 4) * RUN // DEPTH if DEPTH < WIDTH else 0
            blocks[h] = plan[unit * RECORD + 2 * k]
            lines[h] = plan[unit * RECORD + 2 * k + 1]

    return find


@cache
def round_of(way: Way) -> Any:
    """Multiply run h of a unit; as soon as it is in its last registers, load that of the next."""
    form, J, JB = way.form, way.w.J, way.x.J
    W_LINES, X_LINES = (2 * tiles(J), 2), (JB, 2)
    take_w, take_x = operand(form, way.w), operand(form, way.x)
    multiply, fetch_round = products(form, J, JB), fetching(way)

    @cuda.jit(device=True)
    def multiply_round(h, x, x_is, values, blocks, lines, more, w_raw, x_raw, acc):
        wr, w_lo = cuda.local.array(W_LINES, uint32), cuda.local.array(W_LINES, uint32)
        xr, x_lo = cuda.local.array(X_LINES, uint32), cuda.local.array(X_LINES, uint32)
        take_w(w_raw, h, 0, wr, w_lo)
        take_x(x_raw, h, 0, xr, x_lo)
        multiply(wr, w_lo, xr, x_lo, acc)
        take_w(w_raw, h, 1, wr, w_lo)
        take_x(x_raw, h, 1, xr, x_lo)
        if more:
            fetch_round(h, x, x_is, values, blocks, lines, w_raw, x_raw)
        multiply(wr, w_lo, xr, x_lo, acc)

    return multiply_round


@cache
def fetching(way: Way) -> Any:
    """Begin to load this lane's run h of a unit, of w and of x."""
    form, size, turned, w_side, x_side, *_ = way
    DEPTH, RUN, J, JB = min(size, WIDTH), form.run, w_side.J, x_side.J
    TERM, LINE = (1, size) if turned else (size, 1)
    # Lines of x in one load: all of them are there.
    SPAN = JB if x_side.beside else 1
    ALONG, BESIDE, WHOLE = x_side.along, x_side.beside, w_side.check == "whole"
    fetch_w, fetch_x, start_of = fetch(form, w_side), fetch(form, x_side), square_start(size)

    @cuda.jit(device=True)
    def fetch_round(h, x, x_is, values, blocks, lines, w_raw, x_raw):
        batch, in_features = x_is[0], x_is[1]
        x_batch, x_feature = 1 if BESIDE else x_is[2], 1 if ALONG else x_is[3]
        g, q = int64(cuda.threadIdx.x % 32 // 4), int64(cuda.threadIdx.x % 4)
        k = (4 * h + q) * RUN % DEPTH
        c = int64(lines[h]) * DEPTH + k
        terms = in_features - c if WHOLE or blocks[h] >= 0 else 0
        at = start_of(blocks[h]) + k * TERM + J * g * LINE
        fetch_w(values, at, TERM, LINE, terms, J, w_raw, h)
        b = min(JB * g, batch - SPAN)
        fetch_x(x, c * x_feature + b * x_batch, x_feature, x_batch, terms, batch - b, x_raw, h)

    return fetch_round


@cache
def writing(way: Way) -> Any:
    """Write the sums of a line."""
    J, DEPTH = way.w.J, min(way.size, WIDTH)
    write = store(way.form, J, way.x.J, way.y)

    @cuda.jit(device=True)
    def put(y, line, y_is, acc):
        batch, out_features, y_batch, y_feature = y_is
        first = line * DEPTH + J * int64(cuda.threadIdx.x % 32 // 4)
        write(y, first * y_feature, y_feature, y_batch, out_features - first, batch, acc)

    return put
