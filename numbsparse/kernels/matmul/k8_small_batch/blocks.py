"""weight_grad: a warp computes units of dvalues, each written once.

The batch is the sum, 32 terms at most, so each unit is one step; x is loaded anew only where the
line of x changes. What bounds it is writing dvalues.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form, Side, fetch, operand, words
from numbsparse.kernels.matmul.k8_small_batch.outputs import store
from numbsparse.kernels.matmul.k8_small_batch.plan import WIDTH
from numbsparse.kernels.matmul.k8_small_batch.products import products
from numbsparse.kernels.matmul.k8_small_batch.registers import jit_for
from numbsparse.kernels.matmul.k8_small_batch.repair import all_finite, mend_square, square_start
from numbsparse.kernels.matmul.k8_small_batch.sums import clear
from numbsparse.kernels.ptx import let_next_kernel_start, wait_for_earlier_kernels


class BlockWay(NamedTuple):
    """What a kernel is made for."""

    form: Form
    size: int  # of a block
    dy: Side  # 32 lines, of several blocks where they are smaller
    x: Side
    edge: bool  # whether blocks reach beyond the features
    y: str  # how outputs are stored
    warps: int  # of a share
    shares: int
    overlap: bool  # whether it may start while the kernel before it ends


@cache
def block_kernel(way: BlockWay) -> Any:
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]; operands as in `lines.line_kernel`."""
    form, size, dy_side, x_side, _, _, WARPS, shares, OVERLAP = way
    ROUNDS, ALL = form.rounds, WARPS * shares
    RECORD = 2 * max(WIDTH // size, 1) + 2
    JB = x_side.J
    DY_RAW, X_RAW = (ROUNDS, words(form, dy_side)), (ROUNDS, words(form, x_side))
    SUMS = (2, JB, 4)
    find, fetch_round, multiply = record(way), fetching(way), round_of(way)
    clear_sums, write = clear(2, JB), writing(way)

    @jit_for(WARPS)
    def kernel(x, x_is, dy, dy_is, units, count, dvalues):
        dy_raw, x_raw = cuda.local.array(DY_RAW, uint32), cuda.local.array(X_RAW, uint32)
        acc = cuda.local.array(SUMS, float32)
        warp = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32
        unit, last = count * warp // ALL, count * (warp + 1) // ALL
        now = coming = (int32(-1), int32(-1), int32(-1))  # block, line of dy, line of x
        if unit < last:
            now = find(units, unit * RECORD)
            if unit + 1 < last:
                coming = find(units, (unit + 1) * RECORD)
        if OVERLAP:
            let_next_kernel_start()
            wait_for_earlier_kernels()
        if unit < last:
            fetch_round(0, x, x_is, dy, dy_is, now, x_raw, dy_raw)
            if ROUNDS == 2:
                fetch_round(1, x, x_is, dy, dy_is, now, x_raw, dy_raw)
        while unit < last:
            clear_sums(acc)
            more = unit + 1 < last
            # x stays in its registers as long as its line does.
            load = coming[0], coming[1], coming[2] if coming[2] != now[2] else int32(-1)
            multiply(0, x, x_is, dy, dy_is, load, more, x_raw, dy_raw, acc)
            if ROUNDS == 2:
                multiply(1, x, x_is, dy, dy_is, load, more, x_raw, dy_raw, acc)
            write(x, x_is, dy, dy_is, now, dvalues, acc)
            unit += 1
            now = coming
            if unit + 1 < last:
                coming = find(units, (unit + 1) * RECORD)

    return kernel


@cache
def round_of(way: BlockWay) -> Any:
    """Multiply run h of a unit; as soon as it is in its last registers, load that of the next."""
    form, dy_side, x_side = way.form, way.dy, way.x
    DY_LINES, X_LINES = (4, 2), (x_side.J, 2)
    take_dy, take_x = operand(form, dy_side), operand(form, x_side)
    multiply, fetch_round = products(form, 4, x_side.J), fetching(way)

    @cuda.jit(device=True)
    def multiply_round(h, x, x_is, dy, dy_is, coming, more, x_raw, dy_raw, acc):
        dyr, dy_lo = cuda.local.array(DY_LINES, uint32), cuda.local.array(DY_LINES, uint32)
        xr, x_lo = cuda.local.array(X_LINES, uint32), cuda.local.array(X_LINES, uint32)
        take_dy(dy_raw, h, 0, dyr, dy_lo)
        take_x(x_raw, h, 0, xr, x_lo)
        multiply(dyr, dy_lo, xr, x_lo, acc)
        take_dy(dy_raw, h, 1, dyr, dy_lo)
        take_x(x_raw, h, 1, xr, x_lo)
        if more:
            fetch_round(h, x, x_is, dy, dy_is, coming, x_raw, dy_raw)
        multiply(dyr, dy_lo, xr, x_lo, acc)

    return multiply_round


@cache
def record(way: BlockWay) -> Any:
    """(block, line of dy, line of x) of a unit, of the block that this lane's lines lie in."""
    DEPTH = min(way.size, WIDTH)
    TOGETHER = WIDTH // DEPTH

    @cuda.jit(device=True)
    def find(units, at):
        k = cuda.threadIdx.x % 32 // 4 * 4 // DEPTH
        return units[at + 2 * k], units[at + 2 * k + 1], units[at + 2 * TOGETHER]

    return find


@cache
def fetching(way: BlockWay) -> Any:
    """Begin to load this lane's run h of a unit, of dy and, unless its line is -1, of x."""
    DEPTH, RUN, JB = min(way.size, WIDTH), way.form.run, way.x.J
    fetch_dy, fetch_x = fetch(way.form, way.dy), fetch(way.form, way.x)

    @cuda.jit(device=True)
    def fetch_round(h, x, x_is, dy, dy_is, unit, x_raw, dy_raw):
        block, column, line = unit
        batch, in_features, x_batch, x_feature = x_is
        _, out_features, dy_batch, dy_feature = dy_is
        g, q = int64(cuda.threadIdx.x % 32 // 4), int64(cuda.threadIdx.x % 4)
        b = (4 * h + q) * RUN
        terms = batch - b if block >= 0 else 0
        first = int64(column) * DEPTH + 4 * g % DEPTH
        at = b * dy_batch + first * dy_feature
        fetch_dy(dy, at, dy_batch, dy_feature, terms, out_features - first, dy_raw, h)
        if line >= 0:
            first = int64(line) * DEPTH + JB * g
            at = b * x_batch + first * x_feature
            fetch_x(x, at, x_batch, x_feature, batch - b, in_features - first, x_raw, h)

    return fetch_round


@cache
def writing(way: BlockWay) -> Any:
    """Write a unit: rows are lines of x, and this lane's four columns lie in one block."""
    form, size, _, x_side, EDGE, stored, *_ = way
    DEPTH, JB, SPLIT = min(size, WIDTH), x_side.J, way.form.split
    put, start_of, finite = store(form, 4, JB, stored), square_start(size), all_finite(2, JB)
    mend, clear_beyond = mend_square(size, JB), zero_beyond(JB, EDGE)

    @cuda.jit(device=True)
    def write(x, x_is, dy, dy_is, unit, dvalues, acc):
        block, column, line = unit
        g = int64(cuda.threadIdx.x % 32 // 4)
        row, first = int64(line) * DEPTH, int64(column) * DEPTH + 4 * g % DEPTH
        clear_beyond(x_is[1] - row, dy_is[1] - first, acc)
        if block >= 0:
            at = start_of(block) + 4 * g % DEPTH
            put(dvalues, at, 1, size, 4, DEPTH, acc)
            return at
        return int64(-1)

    @cuda.jit(device=True)
    def write_mended(x, x_is, dy, dy_is, unit, dvalues, acc):
        at = write(x, x_is, dy, dy_is, unit, dvalues, acc)
        if at >= 0 and not finite(acc):
            first = int64(unit[1]) * DEPTH + at % size % DEPTH
            mend(x, x_is, int64(unit[2]) * DEPTH, dy, dy_is, first, dvalues, at)

    return write_mended if SPLIT else write


@cache
def zero_beyond(JB: int, edge: bool) -> Any:
    """Products beyond the features are 0, whatever they were multiplied with."""

    @cuda.jit(device=True)
    def nothing(rows, columns, acc):
        pass

    @cuda.jit(device=True)
    def clear_beyond(rows, columns, acc):
        q = cuda.threadIdx.x % 4
        for m in range(2):
            for n in range(JB):
                for i in range(4):
                    if 2 * m + i // 2 >= columns or JB * (2 * q + i % 2) + n >= rows:
                        acc[m, n, i] = float32(0)

    return clear_beyond if edge else nothing
