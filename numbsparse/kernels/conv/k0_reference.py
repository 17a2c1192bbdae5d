"""Rung 0: the definition. A product of matrices for every tap and block, in float64."""

from functools import partial

import numpy as np

from numbsparse.kernels.conv.walks import entries
from numbsparse.kernels.matmul.reach import reach

unsupported = reach("k0_reference", "cpu")


def weight_grad(x, dy, index, window, dvalues, precision="highest"):
    """dvalues[b] = the block b of the sum over pixels of (what its tap sees in x).T @ dy."""
    size, (only,) = dvalues.shape[1], window.passes("weight_grad")
    x, dy = _padded(x, size), _padded(dy, size)
    found = entries(index, window.taps, "forward")
    for column, tap, row, block in zip(*found[:4], strict=True):
        seen = _seen(x[:, :, row * size :][:, :, :size], only.sources(tap, window.big))
        outputs = dy[:, :, column * size :][:, :, :size]
        dvalues[block] = np.einsum("npi,npj->ij", seen, outputs, optimize=True)


def _lines(product, x, values, index, window, y, precision="highest"):
    """y[:] = conv(x, w), or conv_transpose(x, w)."""
    size, features = values.shape[1], x.shape[2]
    sizes = window.big, window.small
    sizes, out_sizes = sizes if product == "forward" else sizes[::-1]
    x, total = _padded(x, size), np.zeros_like(_padded(y, size))
    for of in window.passes(product):
        outputs = of.outputs(out_sizes)
        found = entries(index, window.taps, product).of(of.taps)
        for line, tap, other, block in zip(*found[:4], strict=True):
            w = values[block].astype(np.float64)
            w = w.T if product == "input_grad" else w
            inside = min(size, features - other * size)
            seen = _seen(x[:, :, other * size :][:, :, :inside], of.sources(tap, sizes))
            columns = slice(line * size, (line + 1) * size)
            total[:, outputs, columns] += seen @ w[:inside]
    y[:] = total[:, :, : y.shape[2]]


forward, input_grad = partial(_lines, "forward"), partial(_lines, "input_grad")


def _seen(x, sources):
    """x (batch, pixels, features) at the sources, zero where there is none."""
    return np.where((sources >= 0)[:, None], x[:, sources], 0)


def _padded(x, size):
    """x in float64, with columns of zeros up to a whole number of blocks."""
    padded = np.zeros((*x.shape[:2], -(-x.shape[2] // size) * size))
    padded[:, :, : x.shape[2]] = x
    return padded
