"""The gates on the CPU: block after block of a row, in loops that fill vectors."""

import math

import numpy as np

from numbsparse.kernels.cores import compiled
from numbsparse.kernels.lstm import GATES
from numbsparse.kernels.smooth import FAST, ONE, sigmoid, tanh

SUM = FAST | {"fastmath": {"contract", "reassoc"}}


def forward(
    gates, recurrent, bias, kept, c_before, c, h, block_size, gain=None, eps=0.0, inverse_std=None
):  # fmt: skip
    """As on_gpu.forward; with a gain as normed.forward."""
    if gain is not None:
        gates += recurrent
        _normalise(gates, eps, inverse_std, c.shape[1], block_size)
        gates, recurrent = gates * gain, np.zeros((1, len(bias)), bias.dtype)
    z, r, b = (by_gate(a, block_size) for a in (gates, recurrent, bias))
    activate(z, r, as_read_only(b))
    update(z, as_read_only(all_kept(kept, c)), c_before, c, h)


def backward(
    gates, bias, kept, c_before, c, dy, dh, dc, dgates, dbias, block_size,
    gain=None, inverse_std=None, dgain=None
):  # fmt: skip
    """As on_gpu.backward, but that dgates are the gates themselves; with a gain as
    normed.backward."""
    dz = by_gate(dgates, block_size)
    if gain is not None:
        np.multiply(gates, gain, out=dgates)
        zeros = np.zeros((1, *dz.shape[1:]), dz.dtype)
        activate(dz, zeros, as_read_only(by_gate(bias, block_size)))
    differentiate(dz, *map(as_read_only, (all_kept(kept, c), c_before, c, dy)), dh, dc)
    dbias += np.add.reduce(dgates, axis=0)
    if gain is not None:
        dgain += np.einsum("ij,ij->j", gates, dgates)
        dgates *= gain
        for padded in (dz, by_gate(dgain, block_size)):  # whatever gates and gain are there
            padded[..., -1, :, (c.shape[1] - 1) % block_size + 1 :] = 0
        _normalise_grad(gates, inverse_std, dgates, c.shape[1], block_size)


def parts(batch: int, units: int) -> int:
    """As on_gpu.parts."""
    return 1


def by_gate(gates, block_size):
    """(..., 4 * width) as (..., blocks, 4, B), a view."""
    blocks = gates.shape[-1] // (GATES * block_size)
    return gates.reshape(*gates.shape[:-1], blocks, GATES, block_size)


def all_kept(kept, like):
    """The update's dropout factors; ones, for all steps and rows, where nothing is dropped."""
    if kept is not None:
        return kept
    return as_read_only(np.ones((*[1] * (like.ndim - 1), like.shape[-1]), like.dtype))


def as_read_only(array):
    """A view that nobody writes to, as an LSTM's steps have it: a kernel is compiled for one more
    with each array that may be written in one call and not in another."""
    view = array.view()
    view.flags.writeable = False
    return view


# Loops over j run to the end of a block and use few arrays each, so that they vectorise.


@compiled(**FAST)
def activate(gates, recurrent, bias):
    """gates[:] = i, f, g and o of z = gates + recurrent + bias."""
    batch, blocks, _, B = gates.shape
    for n in range(batch):
        r = min(n, len(recurrent) - 1)
        for b in range(blocks):
            for gate in range(GATES):
                z, x, y = gates[n, b, gate], recurrent[r, b, gate], bias[b, gate]
                if gate == 2:
                    for j in range(B):
                        z[j] = tanh(z[j] + x[j] + y[j])
                else:
                    for j in range(B):
                        z[j] = sigmoid(z[j] + x[j] + y[j])


@compiled(**FAST)
def update(gates, kept, c_before, c, h):
    """c[:] and h[:] of a step whose gates are i, f, g and o."""
    batch, blocks, _, B = gates.shape
    for n in range(batch):
        share = min(n, len(kept) - 1)
        for b in range(blocks):
            for j in range(B):
                u = b * B + j
                if u < c.shape[1]:
                    new = gates[n, b, 0, j] * gates[n, b, 2, j] * kept[share, u]
                    c[n, u] = gates[n, b, 1, j] * c_before[n, u] + new
                    h[n, u] = gates[n, b, 3, j] * tanh(c[n, u])


@compiled(**FAST)
def differentiate(gates, kept, c_before, c, dy, dh, dc):
    """gates[:], i, f, g and o, become the gradients of z, 0 beyond the last unit.

    The gradient of h is dy + dh; dc[:], that of c, becomes that of c_before. See `cell_grad`.
    """
    batch, blocks, _, B = gates.shape
    for n in range(batch):
        share = min(n, len(kept) - 1)
        for b in range(blocks):
            for j in range(B):
                u, o = b * B + j, gates[n, b, 3, j]
                gates[n, b, 3, j] = 0
                if u < c.shape[1]:
                    t, d = tanh(c[n, u]), dy[n, u] + dh[n, u]
                    dc[n, u] += d * o * (ONE - t * t)
                    gates[n, b, 3, j] = d * t * o * (ONE - o)
            for j in range(B):
                u, i, g = b * B + j, gates[n, b, 0, j], gates[n, b, 2, j]
                gates[n, b, 0, j] = gates[n, b, 2, j] = 0
                if u < c.shape[1]:
                    dg = dc[n, u] * kept[share, u]
                    gates[n, b, 0, j] = dg * g * i * (ONE - i)
                    gates[n, b, 2, j] = dg * i * (ONE - g * g)
            for j in range(B):
                u, f = b * B + j, gates[n, b, 1, j]
                gates[n, b, 1, j] = 0
                if u < c.shape[1]:
                    gates[n, b, 1, j] = dc[n, u] * c_before[n, u] * f * (ONE - f)
                    dc[n, u] *= f


@compiled(**SUM)
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


@compiled(**SUM)
def _normalise_grad(gates, inverse_std, dgates, units, B):
    """dgates, the gradient of what `_normalise` made, become that of what it took."""
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
