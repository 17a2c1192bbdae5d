"""Sums down the columns of block-sparse matrices, and their columns times numbers.

Matrices are their stored blocks, (n_blocks, B, B), and a layout. What belongs to columns is
(out_blocks * B,), in float32 with blocks of 16-bit floats.
"""

from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import DeviceArray, empty
from numbsparse.layout import Layout
from numbsparse.ops.elementwise import gapless
from numbsparse.ops.index import index_beside
from numbsparse.ops.operands import state_dtype


def column_dots(a: Any, b: Any, layout: Layout) -> Any:
    """The sum over c of a[c, k] * b[c, k], for each column k.

    >>> column_dots(np.full((1, 2, 2), 3.0), np.ones((1, 2, 2)), Layout([[0, 1]]))
    array([0., 0., 6., 6.])
    """
    size, index = a.shape[-1], index_beside(layout, a)
    if isinstance(a, DeviceArray):
        dots = empty((layout.shape[1] * size,), np.float32)
        one, other = (gapless(x).reshape(-1) for x in (a, b))
        kernels.columns.column_dots(size, one, other, index.columns, dots)
        return dots
    wide = state_dtype(a.dtype)
    totals = np.zeros((layout.shape[1], size), wide)
    of_blocks = np.einsum("nck,nck->nk", a.astype(wide, copy=False), b.astype(wide, copy=False))
    np.add.at(totals, index.block_columns, of_blocks)
    return totals.reshape(-1)


def scale_columns(a: Any, scale: Any, layout: Layout, b: Any = None, less: Any = None) -> Any:
    """a[c, k] * scale[k] - b[c, k] * less[k], as stored blocks of the dtype of a.

    Without `b` and `less` only the first product.

    >>> scale_columns(np.ones((1, 2, 2)), np.array([1.0, 2.0]), Layout([[1]]))
    array([[[1., 2.],
            [1., 2.]]])
    """
    size, columns = a.shape[-1], index_beside(layout, a).block_columns
    if isinstance(a, DeviceArray):
        out = empty(a.shape, a.dtype)
        flat = (x if x is None else gapless(x).reshape(-1) for x in (a, b))
        (a, b), target = flat, out.reshape(-1)
        kernels.columns.scale_columns(size, a, scale, b, less, columns, target)
        return out
    scaled = a * scale.reshape(-1, 1, size)[columns]
    if b is not None:
        scaled -= b * less.reshape(-1, 1, size)[columns]
    return scaled.astype(a.dtype, copy=False)
