"""Forward steps in one kernel on Hopper: the recurrent product and the gates.

A thread ends a line with all four gates of its units in registers. So a step reads the kept weights
once, little else, and writes no recurrent part at all. 16-bit floats are few enough registers to
have the x parts loaded while the line's products go on.

Factors of float32 are rounded to tf32. `wgmma` wants the terms of such a sum side by side, so there
`values` are those of `turned_blocks`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint16, uint32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.lstm.cell import GATES, ONE, WARPS
from numbsparse.kernels.lstm.deal import KINDS, ROWS, B, deal, places
from numbsparse.kernels.lstm.eights import (
    DOWN,
    TWOS,
    exchanging,
    loading_eight,
    one_by_one,
    place_of,
    putting,
    storing_eight,
    taking,
    words_of,
)
from numbsparse.kernels.lstm.on_gpu import activated, tanh
from numbsparse.kernels.lstm.parts import joining
from numbsparse.kernels.lstm.stream import (
    COLUMNS,
    KNOWN,
    THREADS,
    Ring,
    beginning,
    meeting,
    taking_reads,
)
from numbsparse.kernels.matmul.plans import planned
from numbsparse.kernels.ptx import (
    Operand,
    first_multiple,
    mbarrier_wait,
    to_local,
    wgmma,
    zeros,
)
from numbsparse.kernels.views import span

RINGS = {
    2: Ring(False, ITEM=2, FEW=GATES, BLOCKS=2, STAGES=2 if SIMULATED else 9),
    4: Ring(False, ITEM=4, FEW=GATES, BLOCKS=2, STAGES=2 if SIMULATED else 4),
}
SUMS = COLUMNS // 2  # of a thread


def forward(gates, bias, kept, hs, c, values, index, first, last, arrived):
    """Steps first to last - 1, of gates (time, batch, 4 * width) and kept (time, batch, units).

    hs and c (time + 1, batch, units) have the state before each step; `arrived` has a zero for each
    but the last one of these steps.
    """
    (_, batch, units), ring = c.shape, RINGS[hs.itemsize]
    count = places(ring.BLOCKS)
    plan = planned(index, deal, count, False, ring.FEW, SUMS * 32 * WARPS)
    of_h = hs.reshape(1, -1, units), (1, ROWS, B), ring.ITEM * B
    maps = tensor_maps((values, (ring.FEW, B, B), ring.ITEM * B), of_h)
    flat = map(span, (gates, bias, hs if kept is None else kept, hs, c))
    kernel = steps_kernel(KINDS[hs.dtype.name], kept is not None)
    args = maps, *plan, *flat, arrived, first, last, batch, units, bias.size
    how = {"shared_bytes": ring.shared_bytes, "together": last - first > 1}
    launch(kernel, count, THREADS, *args, **how)


@cache
def steps_kernel(kind: str, dropped: bool) -> Any:
    EARLY = kind != "tf32"
    ring = RINGS[2 if EARLY else 4]
    ITEM, BARS = ring.ITEM, ring.BARS
    begin, meet = beginning(ring), meeting(ring)
    h = Operand(ITEM * B, ITEM * B * ROWS)
    w = Operand(ITEM * B, ITEM * B * B, True) if EARLY else Operand(ITEM * B, ITEM * B * COLUMNS)
    start_from, multiply = zeros(SUMS), wgmma(kind, 1, COLUMNS, B * ITEM // 32, h, w)
    take = taking_reads(ring, multiply)
    join, exchange = joining(SUMS), exchanging(GATES)
    load = one_by_one(lambda down: loading(kind, down, dropped), DOWN)
    load_bias = bias_loading(kind)
    finish = one_by_one(lambda down: finishing(kind, down, dropped, not EARLY), DOWN)
    WORDS = words_of(kind)
    OF_GATES, OF_BIAS, OF_ROWS = DOWN * GATES * WORDS, GATES * WORDS, DOWN * WORDS

    @cuda.jit(**ring.options)
    def kernel(
        maps, starts, pieces, read_starts, reads, partials, tickets, gates, bias, kept, hs, c,
        arrived, first_step, last_step, batch, units, width
    ):  # fmt: skip
        shared = cuda.shared.array(0, uint16)
        bars = cuda.shared.array(BARS, uint64)
        known, turn = cuda.local.array(KNOWN, int32), cuda.local.array(2, uint32)
        z, shift = cuda.local.array(OF_GATES, uint32), cuda.local.array(OF_BIAS, uint32)
        state, share = cuda.local.array(OF_STATE, uint32), cuda.local.array(OF_ROWS, uint32)
        sums = cuda.local.array(SUMS, float32)
        place, steps, row = cuda.blockIdx.x, last_step - first_step, first_step * batch
        own = read_starts[place], read_starts[place + 1]
        engine = maps, reads, shared, first_multiple(shared, uint32(1024)), bars
        begin(known, engine, own, row, steps)
        turn[0] = turn[1] = uint32(0)
        for step in range(steps):
            for k in range(starts[place], starts[place + 1]):
                line, count, part = pieces[k, 0], pieces[k, 1], pieces[k, 2]
                first_part, many = pieces[k, 3], pieces[k, 4]
                where = int64(line), row, batch, units, width
                if EARLY:
                    if count > 0:  # the state before is known to be there with the rows
                        mbarrier_wait(bars, turn[0], turn[1])
                    load(gates, kept, c, where, z, state, share)
                    load_bias(bias, line, shift)
                acc = take(start_from(), count, turn, known, engine, own, row, steps)
                to_local(acc, sums)
                whole = True
                if many > 1:
                    whole = join(sums, partials, tickets, part, first_part, many)
                if whole:
                    exchange(sums)
                    if not EARLY:
                        load_bias(bias, line, shift)
                    finish(sums, z, shift, state, share, gates, kept, c, hs, where)
            row += batch
            if step < steps - 1:
                meet(step, known, engine, own, row, arrived)

    return kernel


OF_STATE = DOWN * 8
PER_GATE = SUMS // GATES


@cache
def loading(kind: str, down: int, dropped: bool) -> Any:
    """The x parts, c and the factors of the update of eight units."""
    WORDS, place = words_of(kind), place_of(down)
    Z, STATE, SHARE = down * GATES * WORDS, down * 8, down * WORDS
    load_eight, load_floats = loading_eight(kind), loading_eight("tf32")

    @cuda.jit(device=True)
    def load(gates, kept, c, where, z, state, share):
        (line, first_row, batch, units, width), (n, unit) = where, place()
        row, i = first_row + min(n, batch - 1), line * COLUMNS + unit
        for gate in range(GATES):
            load_eight(gates, row * width + i + gate * B, z, Z + gate * WORDS)
        at = row * units + min(line * B + unit, units - 8)
        load_floats(c, at, state, STATE)
        if dropped:
            load_eight(kept, at, share, SHARE)

    return load


@cache
def bias_loading(kind: str) -> Any:
    WORDS, load_eight = words_of(kind), loading_eight(kind)

    @cuda.jit(device=True)
    def load_bias(bias, line, shift):
        """Of eight units, the same for both rows."""
        for gate in range(GATES):
            at = line * COLUMNS + gate * B + cuda.threadIdx.x % 4 * 8
            load_eight(bias, at, shift, gate * WORDS)

    return load_bias


@cache
def finishing(kind: str, down: int, dropped: bool, late: bool) -> Any:
    """Gates, c and h of eight units, to where they belong; `late`, what they take is loaded now."""
    load, store = loading(kind, down, dropped), storing(kind, down)
    compute = one_by_one(lambda k: computing(kind, down, k, dropped), TWOS)

    @cuda.jit(device=True)
    def finish(sums, z, shift, state, share, gates, kept, c, hs, where):
        if late:
            load(gates, kept, c, where, z, state, share)
        compute(sums, z, shift, state, share)
        store(z, state, share, gates, c, hs, where)

    return finish


@cache
def computing(kind: str, down: int, two: int, dropped: bool) -> Any:
    """The gates and c of two units take the place of what they come from, h that of `share`."""
    WORDS, FIRST, take, put = words_of(kind), 4 * two + 2 * down, taking(kind), putting(kind)
    take_floats, put_floats = taking("tf32"), putting("tf32")
    Z, STATE, SHARE = down * GATES * WORDS, down * 8, down * WORDS

    @cuda.jit(device=True)
    def compute(sums, z, shift, state, share):
        v = cuda.local.array((GATES, 2), float32)
        for gate in range(GATES):
            part, add = take(z, Z + gate * WORDS, two), take(shift, gate * WORDS, two)
            for j in range(2):
                v[gate, j] = sums[gate * PER_GATE + FIRST + j] + part[j] + add[j]
        factors = take(share, SHARE, two) if dropped else (ONE, ONE)
        before, after = take_floats(state, STATE, two), cuda.local.array(2, float32)
        h = cuda.local.array(2, float32)
        for j in range(2):
            a_i, a_f, a_g, a_o = activated(v[0, j], v[1, j], v[2, j], v[3, j])
            update = a_i * a_g * factors[j] if dropped else a_i * a_g
            after[j] = a_f * before[j] + update
            h[j] = a_o * tanh(after[j])
            v[0, j], v[1, j], v[2, j], v[3, j] = a_i, a_f, a_g, a_o
        for gate in range(GATES):
            put(z, Z + gate * WORDS, two, v[gate, 0], v[gate, 1])
        put_floats(state, STATE, two, after[0], after[1])
        put(share, SHARE, two, h[0], h[1])

    return compute


@cache
def storing(kind: str, down: int) -> Any:
    """Gates, c and h of eight units, from where `compute` left them."""
    WORDS, place = words_of(kind), place_of(down)
    Z, STATE, SHARE = down * GATES * WORDS, down * 8, down * WORDS
    store_eight, store_floats = storing_eight(kind), storing_eight("tf32")

    @cuda.jit(device=True)
    def store(z, state, share, gates, c, hs, where):
        (line, first_row, batch, units, width), (n, unit) = where, place()
        row, i = first_row + n, line * COLUMNS + unit
        unit += line * B
        if n < batch and unit < units:
            for gate in range(GATES):
                store_eight(gates, row * width + i + gate * B, z, Z + gate * WORDS)
            at = (row + batch) * units + unit
            store_floats(c, at, state, STATE)
            store_eight(hs, at, share, SHARE)

    return store
