"""The gates on the CPU: block after block of a row, in loops that fill vectors."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from numbsparse.kernels.lstm.cell import GATES, ONE, cell_grad
from numbsparse.kernels.smooth import FAST, sigmoid, tanh

HOW = FAST | {"nogil": True, "cache": True}
SUM = HOW | {"fastmath": {"contract", "reassoc"}}

_cell_grad = njit(**FAST)(cell_grad)


def forward(gates, recurrent, bias, gain, kept, c_before, c, h, block_size):
    """As on_gpu.forward."""
    if gain is None:
        _activate(gates, recurrent, bias, h.shape[1], block_size)
        _update(gates, _all(kept, c), c_before, c, h, block_size)
    else:
        activated = _rescaled(gates, gain, bias, h.shape[1], block_size)
        _update(activated, _all(kept, c), c_before, c, h, block_size)


def backward(gates, bias, gain, kept, c_before, c, dy, dh, dc, dgates, dbias, dgain, block_size):
    """As on_gpu.backward."""
    units = dy.shape[1]
    activated = gates if gain is None else _rescaled(gates, gain, bias, units, block_size)
    if units % block_size:
        dgates[:, -GATES * block_size :] = 0
    _differentiate(activated, _all(kept, c), c_before, c, dy, dh, dc, dgates, block_size)
    dbias += np.add.reduce(dgates, axis=0)
    if gain is not None:
        dgain += np.einsum("ij,ij->j", gates, dgates)


def parts(batch: int) -> int:
    """As on_gpu.parts."""
    return 1


def normalise(gates, recurrent, eps, inverse_std, units, block_size):
    """As on_gpu.normalise."""
    gates += recurrent
    _normalise(gates, eps, inverse_std, units, block_size)


def normalise_grad(gates, gain, inverse_std, dgates, units, block_size):
    """As on_gpu.normalise_grad."""
    dgates *= gain
    _normalise_grad(gates, inverse_std, dgates, units, block_size)


def _all(kept, like):
    """The update's shares; ones, which lie in memory once, where nothing is dropped."""
    return np.ones((1, like.shape[1]), like.dtype) if kept is None else kept


def _rescaled(gates, gain, bias, units, block_size):
    """The activations of gates that are normalised."""
    scaled = gates * gain
    _activate(scaled, np.zeros((1, len(bias)), bias.dtype), bias, units, block_size)
    return scaled


@njit(**HOW)
def _activate(gates, recurrent, bias, units, B):
    for n in range(gates.shape[0]):
        z, r = gates[n], recurrent[min(n, len(recurrent) - 1)]
        for start in range(0, len(z), GATES * B):
            middle, end = start + 2 * B, start + GATES * B
            _sigmoid_of(z[start:middle], r[start:middle], bias[start:middle])
            _tanh_of(z[middle : middle + B], r[middle : middle + B], bias[middle : middle + B])
            _sigmoid_of(z[middle + B : end], r[middle + B : end], bias[middle + B : end])


@njit(**FAST)
def _sigmoid_of(z, r, b):
    for j in range(len(z)):
        z[j] = sigmoid(z[j] + r[j] + b[j])


@njit(**FAST)
def _tanh_of(z, r, b):
    for j in range(len(z)):
        z[j] = tanh(z[j] + r[j] + b[j])


@njit(**HOW)
def _update(gates, kept, c_before, c, h, B):
    for n in range(h.shape[0]):
        share = kept[min(n, len(kept) - 1)]
        for u in range(0, h.shape[1], B):
            last = min(u + B, h.shape[1])
            z = gates[n, GATES * u : GATES * (u + B)]
            _update_block(z, share[u:last], c_before[n, u:last], c[n, u:last], h[n, u:last], B)


@njit(**FAST)
def _update_block(z, kept, c_before, c, h, B):
    for j in range(len(c)):
        c[j] = z[B + j] * c_before[j] + z[j] * z[2 * B + j] * kept[j]
        h[j] = z[3 * B + j] * tanh(c[j])


@njit(**HOW)
def _differentiate(gates, kept, c_before, c, dy, dh, dc, dgates, B):
    for n in range(dy.shape[0]):
        share = kept[min(n, len(kept) - 1)]
        for u in range(0, dy.shape[1], B):
            last = min(u + B, dy.shape[1])
            _differentiate_block(
                gates[n, GATES * u : GATES * (u + B)],
                share[u:last],
                c_before[n, u:last],
                c[n, u:last],
                dy[n, u:last],
                dh[n, u:last],
                dc[n, u:last],
                dgates[n, GATES * u : GATES * (u + B)],
                B,
            )


@njit(**FAST)
def _differentiate_block(z, kept, c_before, c, dy, dh, dc, dz, B):
    for j in range(len(c)):
        i, f, g, o = z[j], z[B + j], z[2 * B + j], z[3 * B + j]
        t, d = tanh(c[j]), dy[j] + dh[j]
        di, df, dg, do, before = _cell_grad(i, f, g, o, kept[j], c_before[j], t, d, dc[j])
        dz[j], dz[B + j], dz[2 * B + j], dz[3 * B + j] = di, df, dg, do
        dc[j] = before


@njit(**SUM)
def _normalise(gates, eps, inverse_std, units, B):
    for n in range(gates.shape[0]):
        for gate in range(GATES):
            z = gates[n, gate * B :]  # its blocks are every fourth
            total = z.dtype.type(0)
            for u in range(0, units, B):
                for j in range(GATES * u, GATES * u + min(B, units - u)):
                    total += z[j]
            mean = z.dtype.type(total / units)
            total = z.dtype.type(0)
            for u in range(0, units, B):
                for j in range(GATES * u, GATES * u + min(B, units - u)):
                    z[j] -= mean
                    total += z[j] * z[j]
            scale = ONE / math.sqrt(total / units + eps)
            inverse_std[n, gate] = scale
            for u in range(0, units, B):
                for j in range(GATES * u, GATES * u + min(B, units - u)):
                    z[j] *= inverse_std[n, gate]


@njit(**SUM)
def _normalise_grad(gates, inverse_std, dgates, units, B):
    for n in range(gates.shape[0]):
        for gate in range(GATES):
            z, dz = gates[n, gate * B :], dgates[n, gate * B :]
            total, dot = z.dtype.type(0), z.dtype.type(0)
            for u in range(0, units, B):
                for j in range(GATES * u, GATES * u + min(B, units - u)):
                    total += dz[j]
                    dot += dz[j] * z[j]
            mean, mean_dot = z.dtype.type(total / units), z.dtype.type(dot / units)
            for u in range(0, units, B):
                for j in range(GATES * u, GATES * u + min(B, units - u)):
                    dz[j] = inverse_std[n, gate] * (dz[j] - mean - z[j] * mean_dot)
