"""Forward steps in one kernel on Hopper: the recurrent product and the gates.

A line's sums begin as its bias and x parts, and a thread ends it with all four gates of its units
in registers. So a step reads the kept weights once, little else, and writes no recurrent part.
Inputs with few blocks are multiplied here, before the rows of h, while these are computed. Of two
blocks of threads on a multiprocessor one computes gates while the other multiplies.

float32 operands are rounded to tf32, unless `exact`, and like 16-bit floats have few bits of a tanh
near 0. `wgmma` needs the terms of such a sum contiguous: there `values` are `transposed_blocks`.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int64

from numbsparse.device import DeviceArray, empty
from numbsparse.device.launch import launch
from numbsparse.kernels.elementwise import THREADS, blocks
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.lstm.deal import KINDS, B
from numbsparse.kernels.lstm.on_gpu import far_tanh, sigmoid, tanh
from numbsparse.kernels.lstm.producers import Ring, ring_for
from numbsparse.kernels.lstm.steps import multiplying, run_steps, streaming
from numbsparse.kernels.lstm.units import (
    COLUMNS,
    DOWN,
    SUMS,
    TWOS,
    column_of,
    loading_two,
    row_of,
    storing_twos,
    unit_of,
)
from numbsparse.kernels.lstm.weights import images_of_blocks, multiplying_read
from numbsparse.kernels.parts.one_by_one import one_by_one
from numbsparse.kernels.ptx import Operand, as_float32, cvt_rna_tf32, wgmma


class Given(NamedTuple):
    """Arrays of a kernel, each along one axis; of 16-bit floats twos, as words."""

    gates: DeviceArray
    bias: DeviceArray
    kept: DeviceArray
    hs: DeviceArray
    c: DeviceArray


def forward(gates, bias, kept, hs, c, values, index, arrived, inputs=None, block=B, exact=False):
    """All steps, of gates (time, batch, 4 * width) and kept (time, batch, units).

    `block` is of how many units the gates in memory are and the blocks of the index, and values as
    `blocks` makes them of these.

    hs and c (time + 1, batch, units) have the state before each step; `arrived` has a zero for each
    step. With inputs, x (time, batch, features) and the values that it meets, gates hold
    nothing before, and the index is of both weights, those of h above those of x.
    """
    (batch, units), (steps, _, width) = c.shape[1:], gates.shape
    ring = ring_for(False, hs.itemsize, exact, batch, units, block)
    ring = ring._replace(inputs=inputs is not None)
    of_read, rows = (ring.FEW, B, B), (1, ring.tile, ring.WIDTH // ring.ITEM)
    weight = images_of_blocks(values, ring) if exact else (values, of_read)
    operands = [weight, (hs.reshape(1, -1, units), rows)]
    if inputs is not None:
        x, more = inputs
        operands += [(more, of_read), (x.reshape(1, -1, x.shape[2]), rows)]
    kernel = steps_kernel(KINDS[hs.dtype.name], kept is not None, ring)
    arrays = gates, bias, hs if kept is None else kept, hs, c
    given = Given(*(a.span.view("uint32") if a.itemsize == 2 else a.span for a in arrays))
    of_steps, size = (steps, 0, batch), (batch, units, width)
    run_steps(kernel, ring, GATES, index, operands, given, arrived, of_steps, size)


@cache
def steps_kernel(kind: str, dropped: bool, ring: Ring) -> Any:
    ITEM = ring.ITEM
    h = Operand(ring.WIDTH, ring.WIDTH * ring.tile, group=ring.GROUP)
    w = Operand(ITEM * B, ITEM * B * B, True)
    if kind == "tf32":
        w = Operand(ITEM * B, ITEM * B * COLUMNS)
    exact, multiply = ring.exact, wgmma(kind, 1, COLUMNS, B * ITEM // 32, h, w)
    if exact:
        multiply = multiplying_read(ring)
    count, block = ring.tile // 32 * TWOS, ring.block
    places = [(*divmod(k, TWOS), ring.tile) for k in range(DOWN * TWOS - count, DOWN * TWOS)]
    start = one_by_one(lambda k: starting(kind, *places[k], ring.inputs, block), count)
    load = one_by_one(lambda k: loading(kind, *places[k], dropped), count)
    finish = one_by_one(lambda k: finishing(kind, *places[2 * k], dropped, exact), count // 2)
    rest = one_by_one(lambda k: storing_rest(kind, *places[2 * k], block), count // 2)
    run = multiplying(ring, multiply, GATES, (start, load, finish, rest), not exact or ring.alone)

    @cuda.jit(device=True)
    def multiply_steps(*args):
        sums = cuda.local.array(OF_GATES, float32)
        state, share = cuda.local.array(SUMS, float32), cuda.local.array(SUMS, float32)
        run(sums, (state, share), *args)

    return streaming(ring, multiply_steps)


OF_GATES = GATES, *SUMS


@cache
def starting(kind: str, down: int, two: int, TILE: int, inputs: bool, block: int) -> Any:
    """The x part, but where inputs are multiplied here, and bias of a two of each gate."""
    take, column_of_unit, FIRST = loading_two(kind), column_of(block), 2 * down

    @cuda.jit(device=True)
    def start(sums, given, where):
        line, first_row, top, batch, _, width = where
        column = column_of_unit(line, unit_of(two), width)
        at = (first_row + min(top + row_of(down, TILE), batch - 1)) * width + column
        for gate in range(GATES):
            shift = take(given.bias, column + gate * block)
            for j in range(2):
                sums[gate, two, FIRST + j] = shift[j]
            if not inputs:
                part = take(given.gates, at + gate * block)
                for j in range(2):
                    sums[gate, two, FIRST + j] += part[j]

    return start


@cache
def loading(kind: str, down: int, two: int, TILE: int, dropped: bool) -> Any:
    """c and the dropout factors of the update of a two."""
    take, take_floats, FIRST = loading_two(kind), loading_two("tf32"), 2 * down

    @cuda.jit(device=True)
    def load(loaded, given, where):
        (state, share), (line, first_row, top, batch, units, _) = loaded, where
        unit = min(line * B + unit_of(two), units - 2)
        at = (first_row + min(top + row_of(down, TILE), batch - 1)) * units + unit
        state[two, FIRST], state[two, FIRST + 1] = take_floats(given.c, at)
        if dropped:
            share[two, FIRST], share[two, FIRST + 1] = take(given.kept, at)

    return load


@cache
def finishing(kind: str, down: int, two: int, TILE: int, dropped: bool, exact: bool) -> Any:
    """Gates, c and h of four units, two and two neighbours; h to its place."""
    store = storing_twos(kind, two, down)
    compute = one_by_one(lambda k: computing(two + k // 2, 2 * down + k % 2, dropped, exact), 4)

    @cuda.jit(device=True)
    def finish(sums, loaded, given, where):
        (state, share), (line, first_row, top, batch, units, _) = loaded, where
        n = top + row_of(down, TILE)
        compute(sums, state, share)
        left = units - line * B if n < batch else int64(0)
        store(given.hs, (first_row + n + batch) * units + line * B, left, share)

    return finish


@cache
def storing_rest(kind: str, down: int, two: int, TILE: int, block: int) -> Any:
    """Their gates and c, which no other unit takes."""
    store, store_floats = storing_twos(kind, two, down, block), storing_twos("tf32", two, down)
    column_of_unit = column_of(block)

    @cuda.jit(device=True)
    def rest(sums, loaded, given, where):
        (state, _), (line, first_row, top, batch, units, width) = loaded, where
        n = top + row_of(down, TILE)
        left = units - line * B if n < batch else int64(0)
        at = (first_row + n) * width + column_of_unit(line, 0, width)
        for gate in range(GATES):
            store(given.gates, at + gate * block, left, sums[gate])
        store_floats(given.c, (first_row + n + batch) * units + line * B, left, state)

    return rest


@cache
def computing(two: int, i: int, dropped: bool, exact: bool) -> Any:
    """The gates and c of a unit take the place of their inputs, h that of its dropout factor."""
    bent = tanh if exact else far_tanh

    @cuda.jit(device=True)
    def compute(sums, state, share):
        a_i, a_f = sigmoid(sums[0, two, i]), sigmoid(sums[1, two, i])
        a_g, a_o = bent(sums[2, two, i]), sigmoid(sums[3, two, i])
        update = a_i * a_g
        if dropped:
            update *= share[two, i]
        after = a_f * state[two, i] + update
        sums[0, two, i], sums[1, two, i], sums[2, two, i], sums[3, two, i] = a_i, a_f, a_g, a_o
        state[two, i], share[two, i] = after, a_o * bent(after)

    return compute


def transposed_blocks(values: DeviceArray) -> DeviceArray:
    """(blocks, 32, 32) of float32, each transposed and rounded to tf32."""
    transposed = empty(values.shape, values.dtype)
    launch(transposing_kernel, blocks(values.size), THREADS, values.span, transposed.span)
    return transposed


@cuda.jit
def transposing_kernel(values, transposed):
    i = int64(cuda.grid(1))
    if i < values.size:
        line, column = i // B % B, i % B
        value = values[i + (column - line) * (B - 1)]
        transposed[i] = as_float32(cvt_rna_tf32(value))
