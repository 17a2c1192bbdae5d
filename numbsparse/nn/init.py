"""First values of block-sparse weights. A unit's fan-in counts only the kept blocks.

A wrong layout, shape, dtype or number is a TypeError or ValueError that names the argument.
"""

from functools import partial
from math import inf
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.block_sparse import BlockSparse
from numbsparse.blocks import checked_shape
from numbsparse.dtypes import check_kind, float_dtype
from numbsparse.layout import Layout, as_layout
from numbsparse.patterns.checks import any_generator, integer, number

__all__ = ["fan_in", "identity", "normal", "orthogonal", "uniform"]


def fan_in(w: BlockSparse, tap_features: int | None = None) -> np.ndarray:
    """How many inputs each output feature of `w` has: int64, (out_features,).

    Of a convolution's weight the rows of each tap end after `tap_features`: see `ns.conv`.

    >>> import numpy as np, numbsparse as ns
    >>> w = ns.BlockSparse(np.zeros((3, 4, 4)), ns.Layout([[1, 0], [1, 1]]))
    >>> ns.nn.init.fan_in(w)
    array([8, 8, 8, 8, 4, 4, 4, 4])
    """
    check_kind("w", w, BlockSparse, "a BlockSparse")
    features = w.shape[0] if tap_features is None else integer("tap_features", tap_features)
    return np.repeat(column_fan_in(w.layout, w.block_size, features), w.block_size)[: w.shape[1]]


def uniform(
    layout: Any,
    block_size: int = 32,
    *,
    shape: tuple[int, int] | None = None,
    gain: float = 1.0,
    dtype: Any = np.float32,
    seed: Any = None,
) -> BlockSparse:
    """Uniform within gain / sqrt(fan-in); zero beyond the edge.

    With gain sqrt(3) the variance of the inputs is kept; with 1 it is what torch's layers begin
    with.

    Parameters
    ----------
    layout : Layout or pattern
    block_size : int
    shape : (in_features, out_features), optional, as in BlockSparse
    gain : float
    dtype : float16, bfloat16, float32 or float64
    seed : int or numpy.random.Generator, optional

    Examples
    --------
    >>> import numbsparse as ns
    >>> w = ns.nn.init.uniform([[1, 0], [1, 1]], 4, seed=0)
    >>> w, bool(abs(w.values).max() <= 0.5)  # the second block column has 4 inputs
    (BlockSparse(8 x 8, float32, 3 blocks of 4 x 4, density 0.75), True)
    """
    rng, gain = any_generator(seed), number("gain", gain)
    return _scaled(partial(rng.uniform, -gain, gain), layout, block_size, shape, dtype)


def normal(
    layout: Any,
    block_size: int = 32,
    *,
    shape: tuple[int, int] | None = None,
    gain: float = 1.0,
    dtype: Any = np.float32,
    seed: Any = None,
) -> BlockSparse:
    """Normal with standard deviation gain / sqrt(fan-in); sqrt(2) suits a ReLU.

    Zero beyond the edge. He et al., "Delving Deep into Rectifiers", 2015, section 2.2. Parameters
    as in `uniform`.

    >>> import numpy as np, numbsparse as ns
    >>> w = ns.nn.init.normal(np.ones((32, 4)), 32, gain=2, seed=0)
    >>> round(float(w.values.std() * np.sqrt(1024)), 2)
    2.0
    """
    rng, gain = any_generator(seed), number("gain", gain)
    return _scaled(partial(rng.normal, 0, gain), layout, block_size, shape, dtype)


def identity(
    layout: Any,
    block_size: int = 32,
    *,
    shape: tuple[int, int] | None = None,
    scale: float = 1.0,
    dtype: Any = np.float32,
) -> BlockSparse:
    """`scale` on the diagonal of every kept block (i, j) with i = j modulo the shorter side.

    With the diagonal kept and as many inputs as outputs, x @ w = scale * x; where there are more of
    one, they share. Other kept blocks are zero. `shape` as in BlockSparse.

    >>> import numbsparse as ns
    >>> w = ns.nn.init.identity([[1, 0], [1, 1]], 2, scale=3)
    >>> w.toarray()
    array([[3., 0., 0., 0.],
           [0., 3., 0., 0.],
           [0., 0., 3., 0.],
           [0., 0., 0., 3.]], dtype=float32)
    """
    layout, block_size = as_layout(layout), integer("block_size", block_size)
    shorter = min(layout.shape)
    on_diagonal = layout.index.block_rows % shorter == layout.index.block_columns % shorter
    values = np.zeros((layout.n_blocks, block_size, block_size), float_dtype(dtype))
    values[on_diagonal] = number("scale", scale, least=-inf) * np.eye(block_size)
    w = BlockSparse(values, layout, shape=shape)
    return w.with_values(ops.inside(w))


def orthogonal(
    layout: Any,
    block_size: int = 32,
    *,
    gain: float = 1.0,
    dtype: Any = np.float32,
    seed: Any = None,
) -> BlockSparse:
    """Orthonormal columns within each block column, times `gain`.

    Of the kept blocks of a block column, one under the other, the columns q obey q.T @ q = I.
    After Saxe, McClelland and Ganguli, "Exact solutions to the nonlinear dynamics of learning in
    deep linear neural networks", 2014.

    >>> import numpy as np, numbsparse as ns
    >>> q = ns.nn.init.orthogonal([[1, 0], [1, 1]], 4, seed=0).toarray()[:, :4]
    >>> np.allclose(q.T @ q, np.eye(4), atol=1e-6)
    True
    """
    layout, rng = as_layout(layout), any_generator(seed)
    block_size = integer("block_size", block_size)
    gain, walk = number("gain", gain, least=-inf), layout.index.columns
    values = np.empty((layout.n_blocks, block_size, block_size), float_dtype(dtype))
    for column in range(layout.shape[1]):
        blocks = walk.blocks[walk.indptr[column] : walk.indptr[column + 1]]
        if blocks.size:
            q, r = np.linalg.qr(rng.standard_normal((blocks.size * block_size, block_size)))
            q *= np.sign(np.diag(r))  # every orthonormal q is as likely as any other
            values[blocks] = gain * q.reshape(blocks.size, block_size, block_size)
    return BlockSparse(values, layout)


def _scaled(draw: Any, layout: Any, block_size: int, shape: Any, dtype: Any) -> BlockSparse:
    """Drawn values over the square root of their block column's fan-in."""
    layout, block_size = as_layout(layout), integer("block_size", block_size)
    dtype = float_dtype(dtype)
    in_features, _ = checked_shape("shape", shape, layout.shape, block_size)
    values = draw((layout.n_blocks, block_size, block_size))
    inputs = np.maximum(column_fan_in(layout, block_size, in_features), 1)
    values /= np.sqrt(inputs)[layout.index.block_columns, None, None]
    w = BlockSparse(values.astype(dtype), layout, shape=shape)
    return w.with_values(ops.inside(w))


def column_fan_in(layout: Layout, block_size: int, in_features: int) -> np.ndarray:
    """Inputs of each block column, (out_blocks,); the last block row may be cut by the edge.

    Block rows beyond are those of further taps, cut the same way.
    """
    row_of_tap = np.arange(layout.shape[0]) % -(-in_features // block_size)
    heights = np.minimum(block_size, in_features - row_of_tap * block_size)
    index, columns = layout.index, layout.shape[1]
    inputs = np.bincount(index.block_columns, heights[index.block_rows], columns)
    return inputs.astype(np.int64)
