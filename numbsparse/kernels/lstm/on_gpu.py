"""The gates on a GPU: a thread per unit, for a few rows of the batch.

A thread loads what it needs of all its rows before it computes: what limits it is memory.
"""

from functools import cache
from math import prod
from typing import Any

from numba import cuda, float32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.ptx import ex2, let_next_kernel_start, rcp, wait_for_earlier_kernels
from numbsparse.kernels.smooth import LOG2_E, ONE, SMALL, TANH, TWO

THREADS = 8 if SIMULATED else 128
ROWS = 4  # of the batch, of a thread

A, B, C, D, E = TANH


def forward(gates, recurrent, bias, kept, c_before, c, h, block_size):
    """One step; `kept` (batch, units) is None without dropout.

    With no bias `gates` hold z, stay as they are, and `recurrent` is not read.
    """
    (batch, units), columns = h.shape, prod(gates.shape[1:])
    kernel = forward_kernel(bias is None, kept is not None, ROWS, copy_engine())
    arrays = gates, recurrent, bias, kept, c_before, c, h
    flat = ((c if a is None else a).span for a in arrays)
    grid = -(-units // THREADS), parts(batch, units)
    of = *flat, batch, units, columns, block_size
    launch(kernel, grid, THREADS, *of, overlap=copy_engine())


def backward(
    gates, bias, kept, c_before, c, dy, dh, dc, dgates, dbias, block_size, dc_before=None
):  # fmt: skip
    """dgates[:] = the gradient of z, 0 beyond the last unit; dc_before[:], or dc[:] without it.

    The gradient of h is dy + dh, or dy with no bias; dc is the gradient of c. That of the bias is
    added to dbias, float32 (parts(batch, units), 4 * width), a row for each group of rows.
    """
    (batch, units), columns = c.shape, prod(gates.shape[1:])
    kernel = backward_kernel(bias is None, kept is not None, ROWS, copy_engine())
    dc_before = dc if dc_before is None else dc_before
    arrays = gates, kept, c_before, c, dy, dh, dc, dgates, dc_before, dbias
    flat = ((c if a is None else a).span for a in arrays)
    grid = -(-columns // GATES // THREADS), parts(batch, units)
    of = *flat, batch, units, columns, block_size
    launch(kernel, grid, THREADS, *of, overlap=copy_engine())


def parts(batch: int, units: int) -> int:
    """In how many parts the gradient of the bias is summed."""
    return -(-batch // ROWS)


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
def forward_kernel(whole: bool, dropped: bool, ROWS: int, OVERLAP: bool) -> Any:
    """Gates hold the `whole` z, or recurrent part and bias are added."""

    @cuda.jit
    def kernel(gates, recurrent, bias, kept, c_before, c, h, batch, units, columns, block_size):
        unit, first = uint64(cuda.grid(1)), uint64(cuda.blockIdx.y * ROWS)
        batch, units, columns = uint64(batch), uint64(units), uint64(columns)
        if OVERLAP:
            let_next_kernel_start()
            wait_for_earlier_kernels()
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
                if not whole:
                    z[r, k] += widened(recurrent[at])
        for k in range(0 if whole else GATES):
            shift = widened(bias[i + uint64(k) * B])
            for r in range(ROWS):
                z[r, k] += shift
        for r in range(ROWS):
            n = first + uint64(r)
            if n < batch:
                own = a_i, a_f, a_g, a_o = activated(z[r, 0], z[r, 1], z[r, 2], z[r, 3])
                state = a_f * before[r] + a_i * a_g * share[r]
                at = n * units + unit
                c[at] = state
                h[at] = rounded(a_o * tanh(state), h)
                for k in range(0 if whole else GATES):
                    gates[n * columns + i + uint64(k) * B] = rounded(own[k], gates)

    return kernel


@cache
def backward_kernel(whole: bool, dropped: bool, ROWS: int, OVERLAP: bool) -> Any:
    """As `forward_kernel`; but where it is `whole` gates hold i, f, g and o, not z."""

    @cuda.jit
    def kernel(
        gates, kept, c_before, c, dy, dh, dc, dgates, dc_before, dbias,
        batch, units, columns, block_size
    ):  # fmt: skip
        part = uint64(cuda.blockIdx.y)
        unit, first = uint64(cuda.grid(1)), uint64(part * ROWS)
        batch, units, columns = uint64(batch), uint64(units), uint64(columns)
        if OVERLAP:
            let_next_kernel_start()
            wait_for_earlier_kernels()
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
        of_bias = cuda.local.array(GATES, float32)
        for r in range(ROWS):
            n = min(first + uint64(r), batch - uint64(1))
            at = n * units + unit
            before[r], t[r], of_c[r] = c_before[at], c[at], dc[at]
            of_h[r] = widened(dy[at]) if whole else widened(dy[at]) + widened(dh[at])
            share[r] = widened(kept[at]) if dropped else ONE
            for k in range(GATES):
                z[r, k] = widened(gates[n * columns + i + uint64(k) * B])
        for k in range(GATES):
            of_bias[k] = none
        for r in range(ROWS):
            n = first + uint64(r)
            if n < batch:
                own = z[r, 0], z[r, 1], z[r, 2], z[r, 3]
                if whole:
                    own = activated(*own)
                d = cell_grad(*own, share[r], before[r], tanh(t[r]), of_h[r], of_c[r])
                dc_before[n * units + unit] = d[GATES]
                for k in range(GATES):
                    dgates[n * columns + i + uint64(k) * B] = rounded(d[k], dgates)
                    of_bias[k] += d[k]
        for k in range(0 if whole else GATES):
            dbias[part * columns + i + uint64(k) * B] += of_bias[k]

    return kernel
