"""Rung 0: what right means. SciPy's BSR product, in float64.

It is slow and takes every block size; every other rung is compared with this one, and with no
other.
"""

import numpy as np
import scipy.sparse

from numbsparse.kernels.matmul.reach import reach

unsupported = reach("k0_reference", "cpu")


def forward(x, values, index, y, precision="highest"):
    """y[:] = x @ w."""
    w = _matrix(values, index, x.shape[1], y.shape[1])
    y[:] = (_padded(x, w.shape[0]) @ w)[:, : y.shape[1]]


def input_grad(dy, values, index, dx, precision="highest"):
    """dx[:] = dy @ w.T."""
    w = _matrix(values, index, dx.shape[1], dy.shape[1])
    dx[:] = (_padded(dy, w.shape[1]) @ w.T)[:, : dx.shape[1]]


def weight_grad(x, dy, index, dvalues, precision="highest"):
    """dvalues[b] = x[:, rows of b].T @ dy[:, columns of b]."""
    size = dvalues.shape[1]
    x = _padded(x, size * (len(index.rows.indptr) - 1))
    dy = _padded(dy, size * (len(index.columns.indptr) - 1))
    for b, (row, column) in enumerate(zip(index.block_rows, index.block_columns, strict=True)):
        x_rows = x[:, row * size : (row + 1) * size]  # (batch, B)
        dy_columns = dy[:, column * size : (column + 1) * size]  # (batch, B)
        dvalues[b] = x_rows.T @ dy_columns


def _matrix(values, index, in_features, out_features):
    """The weight as SciPy's bsr_array, in float64, with zeros beyond the edge."""
    size = values.shape[1]
    grid = (len(index.rows.indptr) - 1, len(index.columns.indptr) - 1)
    data = values.astype(np.float64)
    data[index.block_rows == in_features // size, in_features % size :, :] = 0
    data[index.block_columns == out_features // size, :, out_features % size :] = 0
    arrays = (data, index.rows.indices, index.rows.indptr)
    return scipy.sparse.bsr_array(arrays, shape=(grid[0] * size, grid[1] * size))


def _padded(x, features):
    """x in float64, with columns of zeros up to a whole number of blocks."""
    padded = np.zeros((x.shape[0], features))
    padded[:, : x.shape[1]] = x
    return padded
