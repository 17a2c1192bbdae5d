"""Backward steps in one kernel on Hopper: the recurrent product and the gates.

dh = dy + dgates @ w.T of a step is a line's sums in registers; with them a thread computes the
gates' gradients of the step before, which are the operand of the next product. They may take the
place of the gates, and c after a step is computed again from these and c before. float32 operands
are truncated to tf32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_maps
from numbsparse.kernels.lstm.cell import GATES, ONE, WARPS
from numbsparse.kernels.lstm.deal import KINDS, ROWS, B, deal, places
from numbsparse.kernels.lstm.on_gpu import gpu_cell_grad, tanh
from numbsparse.kernels.lstm.producers import BLOCKS, LINE, THREADS, Ring
from numbsparse.kernels.lstm.steps import multiplying, streaming
from numbsparse.kernels.lstm.units import (
    COLUMNS,
    DOWN,
    TWOS,
    exchanging,
    loading_eight,
    place_of,
    putting,
    storing_eight,
    taking,
    words_of,
)
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.parts.plans import planned
from numbsparse.kernels.ptx import (
    Operand,
    shfl_xor,
    wgmma,
)
from numbsparse.kernels.views import span

RINGS = {
    2: Ring(ITEM=2, FEW=GATES, STAGES=2 if SIMULATED else 4, transposed=True),
    4: Ring(ITEM=4, FEW=GATES // 2, STAGES=2 if SIMULATED else 4, transposed=True),
}
SUMS = B // 2  # of a thread
BIASES = TWOS * GATES  # twos of columns, of a thread


def backward(gates, kept, c, dy, dgates, dc, dbias, values, index, first, last, arrived):
    """dgates[t - 1] from dgates[t], for t = first - 1, first - 2, ..., last.

    dc is the gradient of c[t] before and after; dbias, float32 (for each tile of the batch WARPS at
    least, 4 * width), is added to. The rest is as in `forward_steps`, but for `values`, which are
    as they are stored.
    """
    (steps, batch, width), units = dgates.shape, c.shape[2]
    ring = RINGS[dgates.itemsize]
    count, item, panel = places(BLOCKS), ring.ITEM, ring.PANEL
    tiles = -(-batch // ROWS)
    plan = planned(index, deal, count, True, ring.FEW, SUMS * 32 * WARPS, tiles)
    panels = DeviceArray(
        dgates.address,
        (width // panel, steps * batch, panel),
        dgates.dtype,
        (LINE, width * item, item),
        dgates.owner,
    )
    box = ring.FEW * B // panel, ROWS, panel
    maps = tensor_maps((values, (ring.FEW, B, B), item * B), (panels, box, LINE))
    kernel = steps_kernel(KINDS[dgates.dtype.name], kept is not None, tiles > 1)
    flat = map(span, (gates, dy if kept is None else kept, c, dy, dc, dgates, dbias))
    args = maps, *plan, *flat, arrived, first, last, batch, units, width
    how = {"shared_bytes": ring.shared_bytes, "together": first - last > 1}
    launch(kernel, count, THREADS, *args, **how)


@cache
def steps_kernel(kind: str, dropped: bool, tiled: bool) -> Any:
    AHEAD = kind != "tf32"  # 16-bit floats are few enough registers to be loaded ahead
    ring = RINGS[2 if AHEAD else 4]._replace(tiled=tiled)
    ITEM = ring.ITEM
    dz, w = Operand(LINE, LINE * ROWS), Operand(ITEM * B, ITEM * B * B)
    multiply = wgmma(kind, 1, B, ring.FEW * B * ITEM // 32, dz, w)
    load = one_by_one(lambda down: loading(kind, down, dropped), DOWN)
    OF_GATES, OF_UNITS = DOWN * GATES * words_of(kind), DOWN * words_of(kind)
    run = multiplying(ring, multiply, SUMS, nothing, load, ending(kind, dropped), AHEAD)

    @cuda.jit(device=True)
    def multiply_steps(*args):
        z, slope = cuda.local.array(OF_GATES, uint32), cuda.local.array(OF_UNITS, uint32)
        share, before = cuda.local.array(OF_UNITS, uint32), cuda.local.array(OF_STATE, uint32)
        of_c = cuda.local.array(OF_STATE, uint32)
        sums, biases = cuda.local.array(SUMS, float32), cuda.local.array((BIASES, 2), float32)
        run(sums, (z, slope, share, before, of_c, biases), *args)

    stream = streaming(ring, multiply_steps)

    @cuda.jit(**ring.options)
    def kernel(
        maps, starts, pieces, read_starts, reads, partials, tickets, gates, kept, c, dy, dc,
        dgates, dbias, arrived, first_step, last_step, batch, units, width
    ):  # fmt: skip
        plan = starts, pieces, read_starts, reads, partials, tickets
        given = gates, kept, c, dy, dc, dgates, dbias
        of_steps = first_step - last_step, (first_step - 1) * batch, -batch
        stream(maps, plan, given, arrived, of_steps, (batch, units, width))

    return kernel


@cuda.jit(device=True)
def nothing(sums, given, where):
    """With which sums begin."""


@cache
def ending(kind: str, dropped: bool) -> Any:
    """The gradients of gates, c and bias, from the sums of a line."""
    exchange, add_biases = exchanging(), biases_adding()
    finish = one_by_one(lambda down: finishing(kind, down, dropped), DOWN)

    @cuda.jit(device=True)
    def end(sums, loaded, given, where):
        exchange(sums)
        finish(sums, loaded, given, where)
        add_biases(loaded[5], given[6], where)

    return end


OF_STATE, GRADIENTS = DOWN * 8, (GATES + 1, 2)  # of gates and c


@cache
def loading(kind: str, down: int, dropped: bool) -> Any:
    """What the gradients of eight units take besides their sums."""
    WORDS, place = words_of(kind), place_of(down)
    Z, STATE, OWN = down * GATES * WORDS, down * 8, down * WORDS
    load_eight, load_floats = loading_eight(kind), loading_eight("tf32")

    @cuda.jit(device=True)
    def load(loaded, given, where):
        z, slope, share, before, of_c, _ = loaded
        gates, kept, c, dy, dc, _, _ = given
        (line, first_row, top, batch, units, width), (n, unit) = where, place()
        n = min(top + n, batch - 1)
        i = (first_row + n) * width + line * COLUMNS + unit
        for gate in range(GATES):
            load_eight(gates, i + gate * B, z, Z + gate * WORDS)
        unit = min(line * B + unit, units - 8)
        at = (first_row + n) * units + unit
        load_eight(dy, at, slope, OWN)
        if dropped:
            load_eight(kept, at, share, OWN)
        load_floats(c, at, before, STATE)
        load_floats(dc, n * units + unit, of_c, STATE)

    return load


@cache
def finishing(kind: str, down: int, dropped: bool) -> Any:
    """The gradients of eight units, to their places."""
    WORDS, place = words_of(kind), place_of(down)
    Z, STATE = down * GATES * WORDS, down * 8
    store_eight, store_floats = storing_eight(kind), storing_eight("tf32")
    compute = one_by_one(lambda k: computing(kind, down, k, dropped), TWOS)

    @cuda.jit(device=True)
    def finish(sums, loaded, given, where):
        compute(sums, loaded, where)
        z, _, _, _, of_c, _ = loaded
        _, _, _, _, dc, dgates, _ = given
        (line, first_row, top, batch, units, width), (n, unit) = where, place()
        n += top
        i = (first_row + n) * width + line * COLUMNS + unit
        if n < batch:
            for gate in range(GATES):
                store_eight(dgates, i + gate * B, z, Z + gate * WORDS)
            if line * B + unit < units:
                store_floats(dc, n * units + line * B + unit, of_c, STATE)

    return finish


@cache
def computing(kind: str, down: int, two: int, dropped: bool) -> Any:
    """The gradients of gates and c of two units take their places; the bias', of both rows."""
    WORDS, place, FIRST = words_of(kind), place_of(down), 4 * two + 2 * down
    Z, STATE, OWN = down * GATES * WORDS, down * 8, down * WORDS
    take, put, take_floats, put_floats = (
        taking(kind),
        putting(kind),
        taking("tf32"),
        putting("tf32"),
    )

    @cuda.jit(device=True)
    def compute(sums, loaded, where):
        z, slope, share, before, of_c, biases = loaded
        (line, _, top, batch, units, _), (n, unit) = where, place()
        there = top + n < batch and line * B + unit < units
        a_i, a_f = take(z, Z, two), take(z, Z + WORDS, two)
        a_g, a_o = take(z, Z + 2 * WORDS, two), take(z, Z + 3 * WORDS, two)
        more, factors = (
            take(slope, OWN, two),
            take(share, OWN, two) if dropped else (ONE, ONE),
        )
        old = take_floats(before, STATE, two)
        d_c, dz = take_floats(of_c, STATE, two), cuda.local.array(GRADIENTS, float32)
        for j in range(2):
            new, dh = a_f[j] * old[j] + a_i[j] * a_g[j] * factors[j], sums[FIRST + j] + more[j]
            dz[0, j], dz[1, j], dz[2, j], dz[3, j], dz[4, j] = gpu_cell_grad(
                a_i[j], a_f[j], a_g[j], a_o[j], factors[j], old[j], tanh(new), dh, d_c[j]
            )
        put_floats(of_c, STATE, two, dz[GATES, 0], dz[GATES, 1])
        for gate in range(GATES):
            for j in range(2):
                d, i = dz[gate, j] if there else float32(0), two * GATES + gate
                dz[gate, j] = d
                biases[i, j] = d if down == 0 else biases[i, j] + d
            put(z, Z + gate * WORDS, two, dz[gate, 0], dz[gate, 1])

    return compute


@cache
def biases_adding() -> Any:
    """Sums over the 16 rows of a warp: of two threads each keeps one half and gives the other."""
    first, second, third = folding(8, 16), folding(4, 8), folding(2, 4)

    @cuda.jit(device=True)
    def add(biases, dbias, where):
        line, _, top, _, _, width = where
        first(biases)
        second(biases)
        third(biases)
        warp, lane = int64(cuda.threadIdx.x // 32), int64(cuda.threadIdx.x % 32)
        k = lane // 16 * 8 + lane // 8 % 2 * 4 + lane // 4 % 2 * 2  # the first of its own
        at = (
            (top // ROWS * WARPS + warp) * width
            + line * COLUMNS
            + lane % 4 * 8
            + k // GATES * 2
            + k % GATES * B
        )
        a, b, c, d = dbias[at], dbias[at + 1], dbias[at + B], dbias[at + B + 1]
        dbias[at], dbias[at + 1] = a + biases[0, 0], b + biases[0, 1]
        dbias[at + B], dbias[at + B + 1] = c + biases[1, 0], d + biases[1, 1]

    return add


@cache
def folding(COUNT: int, MASK: int) -> Any:
    @cuda.jit(device=True)
    def fold(values):
        upper = cuda.threadIdx.x & MASK != 0
        for i in range(COUNT):
            for j in range(2):
                low, high = values[i, j], values[COUNT + i, j]
                values[i, j] = (high if upper else low) + shfl_xor(low if upper else high, MASK)

    return fold
