"""The gates on a GPU: a thread per unit, for a few rows of the batch.

A thread loads what it needs of all its rows before it computes: what limits it is memory.
"""

import math
from functools import cache
from typing import Any

from numba import cuda, float32, uint64

from numbsparse.device import SIMULATED
from numbsparse.device.launch import launch
from numbsparse.kernels.blocks import MOST_THREADS, block_sum, threads_for
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.lstm.cell import GATES, ONE, TWO, cell_grad, column
from numbsparse.kernels.ptx import ex2, rcp
from numbsparse.kernels.smooth import LOG2_E, SMALL, TANH

THREADS = 8 if SIMULATED else 128
ROWS = 4  # of the batch, of a thread

A, B, C, D, E = TANH

_column = cuda.jit(device=True)(column)
gpu_cell_grad = cuda.jit(device=True)(cell_grad)


def forward(gates, recurrent, bias, gain, kept, c_before, c, h, block_size):
    """One step; `gain` is None without layer norm, `kept` (batch, units) is None without dropout.

    With a gain, `gates` holds what is normalised, stays as it is, and `recurrent` is not read.
    """
    kernel = forward_kernel(gain is not None, kept is not None, block_size, ROWS)
    gain, kept = bias if gain is None else gain, c if kept is None else kept
    flat = (a.span for a in (gates, recurrent, bias, gain, kept, c_before, c, h))
    launch(kernel, _grid(h.shape[1], h.shape[0]), THREADS, *flat, *h.shape)


def backward(gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, dbias, dgain, block_size):
    """dgates[:] = the gradient of z, 0 beyond the last unit; dc[:] = that of c_before.

    The gradient of h is dy + dh; dc is the gradient of c on entry. Those of bias and gain are added
    to dbias and dgain, float32 (parts(batch), 4 * width), a row for each group of rows.
    """
    kernel = backward_kernel(gain is not None, kept is not None, block_size, ROWS)
    gain, kept = bias if gain is None else gain, c if kept is None else kept
    dgain = dbias if dgain is None else dgain
    arrays = gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, dbias, dgain
    grid = _grid(dgates.shape[1] // GATES, dy.shape[0])
    launch(kernel, grid, THREADS, *(a.span for a in arrays), *dy.shape)


def parts(batch: int) -> int:
    """In how many parts the gradients of bias and gain are summed."""
    return -(-batch // ROWS)


def normalise(gates, recurrent, eps, inverse_std, units, block_size):
    """gates[:] = (z - mean(z)) * inverse_std of z = gates + recurrent, over each gate's units.

    inverse_std (batch, 4) = 1 / sqrt(variance(z) + eps).
    """
    grid, threads = (gates.shape[0], GATES), threads_for(units)
    launch(normalise_kernel, grid, threads, gates, recurrent, eps, inverse_std, units, block_size)


def normalise_grad(gates, gain, inverse_std, dgates, units, block_size):
    """dgates[:], the gradient of n * gain + bias, becomes that of what was normalised."""
    grid, threads = (gates.shape[0], GATES), threads_for(units)
    args = gates, gain, inverse_std, dgates, units, block_size
    launch(normalise_grad_kernel, grid, threads, *args)


def _grid(units: int, batch: int) -> tuple[int, int]:
    return -(-units // THREADS), parts(batch)


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


@cache
def forward_kernel(normalised: bool, dropped: bool, B: int, ROWS: int) -> Any:
    @cuda.jit
    def kernel(gates, recurrent, bias, gain, kept, c_before, c, h, batch, units):
        unit, first = uint64(cuda.grid(1)), uint64(cuda.blockIdx.y * ROWS)
        batch, units, columns = uint64(batch), uint64(units), uint64(bias.size)
        if unit >= units:
            return
        i = uint64(_column(unit, uint64(B)))
        z = cuda.local.array((ROWS, GATES), float32)
        before, share = cuda.local.array(ROWS, float32), cuda.local.array(ROWS, float32)
        for r in range(ROWS):
            n = min(first + uint64(r), batch - uint64(1))
            at = n * units + unit
            before[r] = c_before[at]
            share[r] = widened(kept[at]) if dropped else ONE
            for k in range(GATES):
                at = n * columns + i + uint64(k * B)
                z[r, k] = widened(gates[at])
                if not normalised:
                    z[r, k] += widened(recurrent[at])
        for k in range(GATES):
            at = i + uint64(k * B)
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
                if not normalised:
                    for k in range(GATES):
                        gates[n * columns + i + uint64(k * B)] = rounded(own[k], gates)

    return kernel


@cache
def backward_kernel(normalised: bool, dropped: bool, B: int, ROWS: int) -> Any:
    @cuda.jit
    def kernel(
        gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, dbias, dgain,
        batch, units
    ):  # fmt: skip
        part = uint64(cuda.blockIdx.y)
        unit, first, columns = uint64(cuda.grid(1)), uint64(part * ROWS), uint64(bias.size)
        batch, units = uint64(batch), uint64(units)
        if GATES * unit >= columns:
            return
        i, none = uint64(_column(unit, uint64(B))), float32(0)
        if unit >= units:
            for n in range(first, min(first + ROWS, batch)):
                for k in range(GATES):
                    dgates[n * columns + i + uint64(k * B)] = rounded(none, dgates)
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
            of_h[r] = widened(dy[at]) + widened(dh[at])
            share[r] = widened(kept[at]) if dropped else ONE
            for k in range(GATES):
                z[r, k] = widened(gates[n * columns + i + uint64(k * B)])
        for k in range(GATES):
            of_bias[k], of_gain[k], at = none, none, i + uint64(k * B)
            scale[k], shift[k] = widened(gain[at]), widened(bias[at])
        for r in range(ROWS):
            n = first + uint64(r)
            if n < batch:
                own = z[r, 0], z[r, 1], z[r, 2], z[r, 3]
                if normalised:
                    own = activated(
                        own[0] * scale[0] + shift[0],
                        own[1] * scale[1] + shift[1],
                        own[2] * scale[2] + shift[2],
                        own[3] * scale[3] + shift[3],
                    )
                d = gpu_cell_grad(*own, share[r], before[r], tanh(t[r]), of_h[r], of_c[r])
                dc[n * units + unit] = d[GATES]
                for k in range(GATES):
                    dgates[n * columns + i + uint64(k * B)] = rounded(d[k], dgates)
                    of_bias[k] += d[k]
                    of_gain[k] += d[k] * z[r, k]
        for k in range(GATES):
            at = part * columns + i + uint64(k * B)
            dbias[at] += of_bias[k]
            if normalised:
                dgain[at] += of_gain[k]

    return kernel


@cuda.jit
def normalise_kernel(gates, recurrent, eps, inverse_std, units, block_size):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    n, gate, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    acc = float32(0)
    for unit in range(t, units, cuda.blockDim.x):
        k = _column(unit, block_size) + gate * block_size
        acc += widened(gates[n, k]) + widened(recurrent[n, k])
    mean = block_sum(acc, scratch) / float32(units)
    acc = float32(0)
    for unit in range(t, units, cuda.blockDim.x):
        k = _column(unit, block_size) + gate * block_size
        centred = widened(gates[n, k]) + widened(recurrent[n, k]) - mean
        acc += centred * centred
    scale = ONE / math.sqrt(block_sum(acc, scratch) / float32(units) + eps)
    for unit in range(t, units, cuda.blockDim.x):
        k = _column(unit, block_size) + gate * block_size
        centred = widened(gates[n, k]) + widened(recurrent[n, k]) - mean
        gates[n, k] = rounded(centred * scale, gates)
    if t == 0:
        inverse_std[n, gate] = scale


@cuda.jit
def normalise_grad_kernel(gates, gain, inverse_std, dgates, units, block_size):
    scratch = cuda.shared.array(MOST_THREADS, float32)
    n, gate, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    total, dot = float32(0), float32(0)
    for unit in range(t, units, cuda.blockDim.x):
        k = _column(unit, block_size) + gate * block_size
        d = widened(dgates[n, k]) * widened(gain[k])
        total += d
        dot += d * widened(gates[n, k])
    mean = block_sum(total, scratch) / float32(units)
    mean_dot = block_sum(dot, scratch) / float32(units)
    scale = inverse_std[n, gate]
    for unit in range(t, units, cuda.blockDim.x):
        k = _column(unit, block_size) + gate * block_size
        slope = widened(dgates[n, k]) * widened(gain[k]) - mean - widened(gates[n, k]) * mean_dot
        dgates[n, k] = rounded(scale * slope, dgates)
