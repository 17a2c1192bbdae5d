"""Rows of a table, and the sum back into the table."""

from typing import Any

import numpy as np
from scipy.sparse import csc_array

from numbsparse import kernels
from numbsparse.device import empty
from numbsparse.ops.operands import check_integers, check_range, on_gpu
from numbsparse.ops.shape import reshape
from numbsparse.patterns.checks import integer


def take_rows(table: Any, indices: Any) -> Any:
    """table[indices]: a row for each index, (*indices.shape, width).

    Indices beyond the table raise ValueError on the CPU; on a GPU, where looking would mean a copy
    to the host, they give a row of NaN.

    >>> take_rows(np.float32([[1, 2], [3, 4]]), np.array([1, 1, 0]))
    array([[3., 4.],
           [3., 4.],
           [1., 2.]], dtype=float32)
    """
    gpu = on_gpu(table, "table")
    check_integers(indices, "indices", "table", gpu)
    if table.ndim != 2:
        raise ValueError(f"table takes the shape (rows, width), got {table.shape}")
    if gpu:
        taken = empty((*indices.shape, table.shape[1]), table.dtype)
        width = table.shape[1]
        flat = reshape(indices, (indices.size,))
        kernels.embedding.take_rows(table, flat, taken.reshape(indices.size, width))
        return taken
    check_range(indices, table.shape[0], "indices")
    # NumPy 2.0 takes no uint64, which all fit now.
    return np.take(table, indices.astype(np.intp, copy=False), axis=0)


def sum_rows(dy: Any, indices: Any, rows: int) -> Any:
    """dtable[r] = the sum of dy[i] where indices[i] == r, in the order of i: take_rows' gradient.

    (rows, width), the same bits every time. On a GPU indices beyond the table are left out.
    """
    gpu = on_gpu(dy, "dy")
    check_integers(indices, "indices", "dy", gpu)
    if dy.shape[:-1] != indices.shape or dy.ndim == 0:
        raise ValueError(
            f"dy takes the shape (*indices.shape, width), got {dy.shape} with {indices.shape}"
        )
    rows = integer("rows", rows, least=0)
    if gpu:
        dtable = empty((rows, dy.shape[-1]), dy.dtype)
        flat = reshape(indices, (indices.size,))
        kernels.embedding.sum_rows(reshape(dy, (indices.size, dy.shape[-1])), flat, dtable)
        return dtable
    check_range(indices, rows, "indices")
    # A column with a single 1 for each index: SciPy multiplies it column by column, in order.
    ones = np.ones(indices.size, dy.dtype)
    one_hot = csc_array(
        (ones, indices.reshape(-1), np.arange(indices.size + 1)), shape=(rows, indices.size)
    )
    return one_hot @ np.ascontiguousarray(dy).reshape(indices.size, dy.shape[-1])
