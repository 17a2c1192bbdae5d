"""The gates on a GPU: a thread per unit, for a few rows of the batch.

A thread loads what it needs of all its rows before it computes: what limits it is memory.
"""

from functools import cache
from math import prod
from typing import Any

from numba import cuda, float32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import threads_for
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.lstm.cell import GATES, ONE
from numbsparse.kernels.normalize import layer_norm_grad_kernel, layer_norm_kernel
from numbsparse.kernels.ptx import ex2, rcp
from numbsparse.kernels.smooth import LOG2_E, SMALL, TANH, TWO

THREADS = 8 if SIMULATED else 128
ROWS = 4  # of the batch, of a thread

A, B, C, D, E = TANH


def forward(gates, recurrent, bias, gain, kept, c_before, c, h, block_size):
    """One step; `gain` is None without layer norm, `kept` (batch, units) is None without dropout.

    With a gain, `gates` holds what is normalised, stays as it is, and `recurrent` is not read; with
    no bias it holds z, and stays so, too.
    """
    (batch, units), columns = h.shape, prod(gates.shape[1:])
    kernel = forward_kernel(gain is not None, bias is None, kept is not None, ROWS)
    arrays = gates, recurrent, bias, gain, kept, c_before, c, h
    flat = ((c if a is None else a).span for a in arrays)
    grid = -(-units // THREADS), parts(batch)
    launch(kernel, grid, THREADS, *flat, batch, units, columns, block_size)


def backward(
    gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, dbias, dgain, block_size,
    dc_before=None
):  # fmt: skip
    """dgates[:] = the gradient of z, 0 beyond the last unit; dc_before[:], or dc[:] without it.

    With a gain dgates is that of what is normalised. The gradient of h is dy + dh, or dy with no
    bias; dc is the gradient of c. Those of bias and gain are added to dbias and dgain, float32
    (parts(batch), 4 * width), a row for each group of rows.
    """
    (batch, units), columns = c.shape, prod(gates.shape[1:])
    kernel = backward_kernel(gain is not None, bias is None, kept is not None, ROWS)
    dc_before = dc if dc_before is None else dc_before
    arrays = gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, dc_before, dbias, dgain
    flat = ((c if a is None else a).span for a in arrays)
    grid = -(-columns // GATES // THREADS), parts(batch)
    launch(kernel, grid, THREADS, *flat, batch, units, columns, block_size)


def parts(batch: int) -> int:
    """In how many parts the gradients of bias and gain are summed."""
    return -(-batch // ROWS)


def normalise(gates, recurrent, eps, inverse_std, units, block_size):
    """gates[:] = (z - mean(z)) * inverse_std of z = gates + recurrent, over each gate's units.

    inverse_std (batch, 4) = 1 / sqrt(variance(z) + eps).
    """
    args = gates, recurrent, eps, gates, inverse_std, units, block_size
    launch(layer_norm_kernel, (gates.shape[0], GATES), threads_for(units), *args)


def normalise_grad(gates, inverse_std, dgates, units, block_size):
    """dgates[:], the gradient of what `normalise` made, becomes that of what it took."""
    args = gates, inverse_std, dgates, dgates, units, block_size
    launch(layer_norm_grad_kernel, (gates.shape[0], GATES), threads_for(units), *args)


@cuda.jit(device=True)
def sigmoid(x):
    return rcp(ONE + ex2(-LOG2_E * x))


@cuda.jit(device=True)
def far_tanh(x):
    """With an error of up to 2**-22, so with few bits near 0."""
    return ONE - TWO * rcp(ONE + ex2(TWO * LOG2_E * x))


@cuda.jit(device=True)
def tanh(x):
    far = far_tanh(x)
    xx = x * x
    near = x + x * xx * ((((A * xx + B) * xx + C) * xx + D) * xx + E)
    return cuda.selp(abs(x) < SMALL, near, far)  # no branch, so that several are in flight


@cuda.jit(device=True)
def activated(z_i, z_f, z_g, z_o):
    return sigmoid(z_i), sigmoid(z_f), tanh(z_g), sigmoid(z_o)


@cuda.jit(device=True)
def cell_grad(i, f, g, o, kept, c_before, t, dh, dc):
    """The gradients of z_i, z_f, z_g, z_o and c_before; t = tanh(c)."""
    dc += dh * o * (ONE - t * t)
    dg = dc * kept
    return (
        dg * g * i * (ONE - i),
        dc * c_before * f * (ONE - f),
        dg * i * (ONE - g * g),
        dh * t * o * (ONE - o),
        dc * f,
    )


@cuda.jit(device=True)
def first_gate(unit, block_size):
    """Where the input gate of a unit is among the gates; the others follow, a block each."""
    return unit + unit // uint64(block_size) * uint64((GATES - 1) * block_size)


@cache
def forward_kernel(normalised: bool, whole: bool, dropped: bool, ROWS: int) -> Any:
    """Gates hold what is `normalised`, or the `whole` z; or recurrent part and bias are added."""
    summed = not (normalised or whole)

    @cuda.jit
    def kernel(
        gates, recurrent, bias, gain, kept, c_before, c, h, batch, units, columns, block_size
    ):  # fmt: skip
        unit, first = uint64(cuda.grid(1)), uint64(cuda.blockIdx.y * ROWS)
        batch, units, columns = uint64(batch), uint64(units), uint64(columns)
        if unit >= units:
            return
        i, B = first_gate(unit, block_size), uint64(block_size)
        z = cuda.local.array((ROWS, GATES), float32)
        before, share = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        for r in range(ROWS):
            n = min(first + uint64(r), batch - uint64(1))
            at = n * units + unit
            before[r] = c_before[at]
            share[r] = widened(kept[at]) if dropped else ONE
            for k in range(GATES):
                at = n * columns + i + uint64(k) * B
                z[r, k] = widened(gates[at])
                if summed:
                    z[r, k] += widened(recurrent[at])
        for k in range(0 if whole else GATES):
            at = i + uint64(k) * B
            scale, shift = widened(gain[at]) if normalised else ONE, widened(bias[at])
            for r in range(ROWS):
                z[r, k] = z[r, k] * scale + shift
        for r in range(ROWS):
            n = first + uint64(r)
            if n < batch:
                own = a_i, a_f, a_g, a_o = activated(z[r, 0], z[r, 1], z[r, 2], z[r, 3])
                state = a_f * before[r] + a_i * a_g * share[r]
                at = n * units + unit
                c[at] = state
                h[at] = rounded(a_o * tanh(state), h)
                if summed:
                    for k in range(GATES):
                        gates[n * columns + i + uint64(k) * B] = rounded(own[k], gates)

    return kernel


@cache
def backward_kernel(normalised: bool, whole: bool, dropped: bool, ROWS: int) -> Any:
    """As `forward_kernel`; otherwise gates hold i, f, g and o."""

    @cuda.jit
    def kernel(
        gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, dc_before, dbias, dgain,
        batch, units, columns, block_size
    ):  # fmt: skip
        part = uint64(cuda.blockIdx.y)
        unit, first = uint64(cuda.grid(1)), uint64(part * ROWS)
        batch, units, columns = uint64(batch), uint64(units), uint64(columns)
        if GATES * unit >= columns:
            return
        i, B, none = first_gate(unit, block_size), uint64(block_size), float32(0)
        if unit >= units:
            for n in range(first, min(first + ROWS, batch)):
                for k in range(GATES):
                    dgates[n * columns + i + uint64(k) * B] = rounded(none, dgates)
            return
        z = cuda.local.array((ROWS, GATES), float32)
        before, t = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        share = cuda.local.array(ROWS, float32)
        of_h, of_c = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        of_bias, of_gain = cuda.local.array(GATES, float32), cuda.local.array(GATES, float32)
        scale, shift = cuda.local.array(GATES, float32), cuda.local.array(GATES, float32)
        for r in range(ROWS):
            n = min(first + uint64(r), batch - uint64(1))
            at = n * units + unit
            before[r], t[r], of_c[r] = c_before[at], c[at], dc[at]
            of_h[r] = widened(dy[at]) if whole else widened(dy[at]) + widened(dh[at])
            share[r] = widened(kept[at]) if dropped else ONE
            for k in range(GATES):
                z[r, k] = widened(gates[n * columns + i + uint64(k) * B])
        for k in range(GATES):
            of_bias[k], of_gain[k], at = none, none, i + uint64(k) * B
            if normalised:
                scale[k], shift[k] = widened(gain[at]), widened(bias[at])
        for r in range(ROWS):
            n = first + uint64(r)
            if n < batch:
                own = z[r, 0], z[r, 1], z[r, 2], z[r, 3]
                if normalised:
                    own = (
                        own[0] * scale[0] + shift[0],
                        own[1] * scale[1] + shift[1],
                        own[2] * scale[2] + shift[2],
                        own[3] * scale[3] + shift[3],
                    )
                if normalised or whole:
                    own = activated(*own)
                d = cell_grad(*own, share[r], before[r], tanh(t[r]), of_h[r], of_c[r])
                dc_before[n * units + unit] = d[GATES]
                for k in range(GATES):
                    slope = d[k] * scale[k] if normalised else d[k]
                    dgates[n * columns + i + uint64(k) * B] = rounded(slope, dgates)
                    of_bias[k] += d[k]
                    of_gain[k] += d[k] * z[r, k]
        for k in range(0 if whole else GATES):
            at = part * columns + i + uint64(k) * B
            dbias[at] += of_bias[k]
            if normalised:
                dgain[at] += of_gain[k]

    return kernel
