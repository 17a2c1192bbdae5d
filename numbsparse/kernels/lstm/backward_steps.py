"""Backward steps in one kernel on Hopper: the recurrent product and the gates.

dh = dy + dgates @ w.T of a step is a line's sums in registers; with them a thread computes the
gates' gradients of the step before, which are the operand of the next product. They may take the
place of the gates, and c after a step is computed again from these and c before. float32 operands
are truncated to tf32, unless `exact`.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint32

from numbsparse.device import DeviceArray
from numbsparse.kernels.lstm import GATES, WARPS
from numbsparse.kernels.lstm.deal import KINDS, LINE, B
from numbsparse.kernels.lstm.on_gpu import cell_grad, tanh
from numbsparse.kernels.lstm.producers import Ring, ring_for
from numbsparse.kernels.lstm.steps import multiplying, run_steps, streaming
from numbsparse.kernels.lstm.units import (
    DOWN,
    SUMS,
    TWOS,
    column_of,
    eights,
    exchange,
    row_of,
    unit_of_eight,
)
from numbsparse.kernels.lstm.weights import images_of_blocks, multiplying_read
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.ptx import Operand, shfl_xor, wgmma
from numbsparse.kernels.smooth import ONE

OF_UNITS = 1, *SUMS
BIASES = TWOS * GATES  # twos of columns, of a thread


class Given(NamedTuple):
    """Arrays of a kernel, each along one axis."""

    gates: DeviceArray
    kept: DeviceArray
    c: DeviceArray
    dy: DeviceArray
    dc: DeviceArray
    dgates: DeviceArray
    dbias: DeviceArray


def backward(gates, kept, c, dy, dgates, dc, dbias, values, index, arrived, block=B, exact=False):
    """dgates[t - 1] from dgates[t], the last one first.

    dc is the gradient of c[t] before and after; dbias, float32 (for each tile of the batch WARPS at
    least, 4 * width), is added to. The rest is as in `forward_steps`, but for `values`, which are
    as they are stored, or as `blocks` makes them of these.
    """
    (steps, batch, width), units = dgates.shape, c.shape[2]
    ring = ring_for(True, dgates.itemsize, exact, batch, units, block)
    item, panel = ring.ITEM, LINE // ring.ITEM
    dz, panels = dgates.reshape(1, steps * batch, width), ring.FEW * B // panel // ring.COPIES
    if panels > 1:  # of each copy; of one at a time, the last may have fewer columns
        shape, strides = (width // panel, steps * batch, panel), (LINE, width * item, item)
        dz = DeviceArray(dgates.address, shape, dgates.dtype, strides, dgates.owner)
    weight = images_of_blocks(values, ring) if exact else (values, (ring.FEW, B, B))
    operands = weight, (dz, (panels, ring.tile, panel))
    kernel = steps_kernel(KINDS[dgates.dtype.name], kept is not None, ring)
    arrays = gates, dy if kept is None else kept, c, dy, dc, dgates, dbias
    given = Given(*(a.span for a in arrays))
    of_steps, size = (steps - 1, (steps - 1) * batch, -batch), (batch, units, width)
    run_steps(kernel, ring, 1, index, operands, given, arrived, of_steps, size)


@cache
def steps_kernel(kind: str, dropped: bool, ring: Ring) -> Any:
    AHEAD = kind != "tf32" or ring.alone  # as far as there are registers for it
    ITEM = ring.ITEM
    dz, w = Operand(LINE, LINE * ring.tile, group=ring.GROUP), Operand(ITEM * B, ITEM * B * B)
    multiply = wgmma(kind, 1, B, ring.FEW * B * ITEM // 32, dz, w)
    if ring.exact:
        multiply = multiplying_read(ring)
    TILE, first, how = ring.tile, DOWN - ring.tile // 32, (ring.tile, dropped, ring.block)
    load = one_by_one(lambda k: loading(kind, first + k, *how), DOWN - first)
    finish_rows = one_by_one(lambda k: finishing(kind, first + k, *how), DOWN - first)
    store_rows = one_by_one(lambda k: storing_states(first + k, TILE), DOWN - first)
    WORDS, add_own = DOWN * eights(kind).WORDS, adding_biases(TILE, ring.block)
    OF_GATES = GATES * WORDS

    @cuda.jit(device=True)
    def finish(sums, loaded, given, where):
        exchange(sums[0])
        finish_rows(sums, loaded, given, where)
        fold_biases(loaded[5])

    @cuda.jit(device=True)
    def rest(sums, loaded, given, where):
        store_rows(sums, loaded, given, where)
        add_own(loaded[5], given.dbias, where)

    run = multiplying(ring, multiply, 1, (None, load, finish, rest), AHEAD)

    @cuda.jit(device=True)
    def multiply_steps(*args):
        z, slope = cuda.local.array(OF_GATES, uint32), cuda.local.array(WORDS, uint32)
        share, before = cuda.local.array(WORDS, uint32), cuda.local.array(OF_STATE, uint32)
        of_c = cuda.local.array(OF_STATE, uint32)
        sums, biases = cuda.local.array(OF_UNITS, float32), cuda.local.array((BIASES, 2), float32)
        run(sums, (z, slope, share, before, of_c, biases), *args)

    return streaming(ring, multiply_steps)


OF_STATE, GRADIENTS = DOWN * 8, (GATES + 1, 2)  # of gates and c


@cache
def loading(kind: str, down: int, TILE: int, dropped: bool, block: int) -> Any:
    """What the gradients of eight units take besides their sums."""
    WORDS, load_eight, *_ = eights(kind)
    Z, STATE, OWN, load_floats = down * GATES * WORDS, down * 8, down * WORDS, eights("tf32").load
    column_of_unit = column_of(block)

    @cuda.jit(device=True)
    def load(loaded, given, where):
        z, slope, share, before, of_c, _ = loaded
        (line, first_row, top, batch, units, width), unit = where, unit_of_eight()
        n = min(top + row_of(down, TILE), batch - 1)
        i = (first_row + n) * width + column_of_unit(line, unit, width)
        for gate in range(GATES):
            load_eight(given.gates, i + gate * block, z, Z + gate * WORDS)
        unit = min(line * B + unit, units - 8)
        at = (first_row + n) * units + unit
        load_eight(given.dy, at, slope, OWN)
        if dropped:
            load_eight(given.kept, at, share, OWN)
        load_floats(given.c, at, before, STATE)
        load_floats(given.dc, n * units + unit, of_c, STATE)

    return load


@cache
def finishing(kind: str, down: int, TILE: int, dropped: bool, block: int) -> Any:
    """The gradients of eight units; those of the gates to their places."""
    WORDS, _, store_eight, *_ = eights(kind)
    Z, column_of_unit, SMALL = down * GATES * WORDS, column_of(block, False), block < B
    compute = one_by_one(lambda k: computing(kind, down, k, TILE, dropped), TWOS)

    @cuda.jit(device=True)
    def finish(sums, loaded, given, where):
        compute(sums, loaded, where)
        z = loaded[0]
        (line, first_row, top, batch, _, width), unit = where, unit_of_eight()
        n = top + row_of(down, TILE)
        column = column_of_unit(line, unit, width)
        i = (first_row + n) * width + column
        if n < batch and (not SMALL or column < width):
            for gate in range(GATES):
                store_eight(given.dgates, i + gate * block, z, Z + gate * WORDS)

    return finish


@cache
def storing_states(down: int, TILE: int) -> Any:
    """The gradients of c of eight units, to their places."""
    STATE, store_floats = down * 8, eights("tf32").store

    @cuda.jit(device=True)
    def store(sums, loaded, given, where):
        line, _, top, batch, units, _ = where
        n, unit = top + row_of(down, TILE), line * B + unit_of_eight()
        if n < batch and unit < units:
            store_floats(given.dc, n * units + unit, loaded[4], STATE)

    return store


@cache
def computing(kind: str, down: int, two: int, TILE: int, dropped: bool) -> Any:
    """The gradients of gates and c of two units take their places; the bias', of both rows."""
    (WORDS, _, _, take, put), (*_, take_floats, put_floats) = eights(kind), eights("tf32")
    Z, STATE, OWN = down * GATES * WORDS, down * 8, down * WORDS
    FIRST, ALONE = 2 * down, down == DOWN - TILE // 32

    @cuda.jit(device=True)
    def compute(sums, loaded, where):
        z, slope, share, before, of_c, biases = loaded
        (line, _, top, batch, units, _), n, unit = where, row_of(down, TILE), unit_of_eight()
        there = top + n < batch and line * B + unit < units
        a_i, a_f = take(z, Z, two), take(z, Z + WORDS, two)
        a_g, a_o = take(z, Z + 2 * WORDS, two), take(z, Z + 3 * WORDS, two)
        more, factors = take(slope, OWN, two), take(share, OWN, two) if dropped else (ONE, ONE)
        old = take_floats(before, STATE, two)
        d_c, dz = take_floats(of_c, STATE, two), cuda.local.array(GRADIENTS, float32)
        for j in range(2):
            new = a_f[j] * old[j] + a_i[j] * a_g[j] * factors[j]
            dh = sums[0, two, FIRST + j] + more[j]
            dz[0, j], dz[1, j], dz[2, j], dz[3, j], dz[4, j] = cell_grad(
                a_i[j], a_f[j], a_g[j], a_o[j], factors[j], old[j], tanh(new), dh, d_c[j]
            )
        put_floats(of_c, STATE, two, dz[GATES, 0], dz[GATES, 1])
        for gate in range(GATES):
            for j in range(2):
                d, i = dz[gate, j] if there else float32(0), two * GATES + gate
                dz[gate, j] = d
                biases[i, j] = d if ALONE else biases[i, j] + d
            put(z, Z + gate * WORDS, two, dz[gate, 0], dz[gate, 1])

    return compute


@cuda.jit(device=True)
def fold_biases(biases):
    """Sums over the rows of a warp: of two threads each keeps one half and gives the other."""
    fold(biases, 8, 16)
    fold(biases, 4, 8)
    fold(biases, 2, 4)


@cache
def adding_biases(TILE: int, block: int) -> Any:
    column_of_unit, SMALL = column_of(block, False), block < B

    @cuda.jit(device=True)
    def add(biases, dbias, where):
        line, _, top, _, _, width = where
        warp, lane = int64(cuda.threadIdx.x // 32), int64(cuda.threadIdx.x % 32)
        k = lane // 16 * 8 + lane // 8 % 2 * 4 + lane // 4 % 2 * 2  # the first of its own
        unit = lane % 4 * 8 + k // GATES * 2
        column = column_of_unit(line, unit, width) + k % GATES * block
        if SMALL and column >= width:
            return
        at = (top // TILE * WARPS + warp) * width + column
        a, b, c, d = dbias[at], dbias[at + 1], dbias[at + block], dbias[at + block + 1]
        dbias[at], dbias[at + 1] = a + biases[0, 0], b + biases[0, 1]
        dbias[at + block], dbias[at + block + 1] = c + biases[1, 0], d + biases[1, 1]

    return add


@cuda.jit(device=True)
def fold(values, count, mask):
    upper = cuda.threadIdx.x & mask != 0
    for i in range(count):
        for j in range(2):
            low, high = values[i, j], values[count + i, j]
            values[i, j] = (high if upper else low) + shfl_xor(low if upper else high, mask)
