"""BlockSparse with a JAX array for its values, and the products of such matrices."""

from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from numbsparse import ops
from numbsparse.blocks import Blocks, check_values, checked_shape
from numbsparse.dtypes import as_array, check_kind, type_name
from numbsparse.jax import products
from numbsparse.jax.shards import ASKS
from numbsparse.layout import Layout, as_layout
from numbsparse.ops.operands import check_pair
from numbsparse.patterns.checks import check_block_size, integer

DTYPES = ("float16", "bfloat16", "float32", "float64")
Dense: TypeAlias = jax.Array | np.ndarray


class BlockSparse(Blocks):
    """A block-sparse matrix of shape (in_features, out_features) whose values are a JAX array.

    A pytree with one leaf, the values: `jax.grad` of a function of it gives such a matrix, jit
    compiles once for each layout, and `jax.tree.map(function, w)` changes the values.

    Parameters
    ----------
    values : array of JAX or NumPy, (n_blocks, B, B), of float16, bfloat16, float32 or float64
        The kept blocks, block row by block row. float64 takes `jax_enable_x64`, and the CPU.
    layout : Layout or pattern, (in_blocks, out_blocks)
        Which blocks are kept. Static: jit compiles anew for another one.
    shape : (in_features, out_features), optional
        If the features are not multiples of B; what is beyond the edge is never read.

    Attributes
    ----------
    values, layout, shape : as given; ndim : 2
    dtype : of the values
    block_size : B
    T : the transposed matrix, a view

    Raises
    ------
    TypeError
        If values are not an array of these dtypes.
    ValueError
        If values, layout and shape disagree.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, numbsparse.jax as nsj
    >>> w = nsj.BlockSparse(jnp.ones((3, 4, 4)), [[1, 0], [1, 1]])
    >>> x = jnp.ones((1, 8))
    >>> x @ w
    Array([[8., 8., 8., 8., 4., 4., 4., 4.]], dtype=float32)
    >>> jax.jit(jax.grad(lambda w: (x @ w).sum()))(w)
    BlockSparse(8 x 8, float32, 3 blocks of 4 x 4, density 0.75)
    """

    values: jax.Array

    def __init__(self, values: Dense, layout: Any, *, shape: tuple[int, int] | None = None) -> None:
        values, layout = _array("values", values), as_layout(layout)
        if values.dtype.name not in DTYPES:
            raise TypeError(f"values takes one of {', '.join(DTYPES)}, got {values.dtype}")
        check_values(values, layout.n_blocks)
        self.values, self.stored_layout, self.is_transposed = values, layout, False
        self.shape = checked_shape("shape", shape, layout.shape, values.shape[1])
        products.meet(layout)

    @property
    def T(self) -> "BlockSparse":
        """The transposed matrix: the same values, walked the other way."""
        of = self.stored_layout, self.shape[::-1], not self.is_transposed
        return _unflatten(of, (self.values,))

    def __matmul__(self, x: Dense) -> jax.Array:
        return matmul(self, x)

    def __rmatmul__(self, x: Dense) -> jax.Array:
        return matmul(x, self)

    @classmethod
    def from_dense(cls, array: Any, layout: Any, *, block_size: int) -> "BlockSparse":
        """The blocks of a dense matrix that a layout keeps; the others are dropped.

        Differentiable. Raises TypeError and ValueError as the constructor does.

        >>> import jax.numpy as jnp, numbsparse.jax as nsj
        >>> nsj.BlockSparse.from_dense(jnp.eye(8), [[1, 0], [0, 1]], block_size=4)
        BlockSparse(8 x 8, float32, 2 blocks of 4 x 4, density 0.5)
        """
        array, layout = _array("array", array), as_layout(layout)
        size = integer("block_size", block_size)
        shape = checked_shape("array.shape", array.shape, layout.shape, size)
        (rows, columns), index = layout.shape, layout.index
        edge = [(0, n * size - length) for n, length in zip(layout.shape, shape, strict=True)]
        blocks = jnp.pad(array, edge).reshape(rows, size, columns, size)
        values = blocks.swapaxes(1, 2)[index.block_rows, index.block_columns]
        return cls(values, layout, shape=shape)

    def to_dense(self) -> jax.Array:
        """The dense matrix, (in_features, out_features); differentiable."""
        index, (in_blocks, out_blocks) = self.stored_layout.index, self.stored_layout.shape
        size, (rows, columns) = self.block_size, self.stored_shape
        dense = jnp.zeros((in_blocks, out_blocks, size, size), self.dtype)
        dense = dense.at[index.block_rows, index.block_columns].set(self.values)
        dense = dense.swapaxes(1, 2).reshape(in_blocks * size, out_blocks * size)
        dense = dense[:rows, :columns]
        return dense.T if self.is_transposed else dense

    def __repr__(self) -> str:
        if len(shape := getattr(self.values, "shape", ())) == 3:
            return super().__repr__()
        values = f"values of {shape}" if shape else f"values={self.values!r}"  # a tree's
        return f"BlockSparse({self.shape[0]} x {self.shape[1]}, {values})"


def _flatten(w: BlockSparse) -> tuple[tuple[Any], Any]:
    return (w.values,), (w.stored_layout, w.shape, w.is_transposed)


def _flatten_with_keys(w: BlockSparse) -> tuple[tuple[Any], Any]:
    return ((jax.tree_util.GetAttrKey("values"), w.values),), _flatten(w)[1]


def _unflatten(static: Any, leaves: Any) -> BlockSparse:
    """A matrix of any leaf, unchecked: JAX also puts tracers, shapes and None there."""
    w = BlockSparse.__new__(BlockSparse)
    (w.values,) = leaves
    w.stored_layout, w.shape, w.is_transposed = static
    return w


jax.tree_util.register_pytree_with_keys(BlockSparse, _flatten_with_keys, _unflatten, _flatten)


def matmul(
    x: Dense | BlockSparse, w: BlockSparse | Dense, *, precision: str | None = None
) -> jax.Array:
    """The product of a dense and a block-sparse matrix, `x @ w` or `w @ x`.

    y[n, k] = sum over c of x[n, c] * w[c, k], in time proportional to the kept blocks. A primitive
    of JAX, under jit too: differentiable any number of times, forward and reverse; vmap over x
    makes one product of all rows, vmap over w one after the other. Rows of x that are on several
    devices stay there under jit.

    Parameters
    ----------
    x : array of JAX or NumPy, (..., in_features), or BlockSparse
    w : BlockSparse, (in_features, out_features), or array, (out_features, batch)
        One of the two is a BlockSparse; both are of one dtype.
    precision : str, optional
        "highest" or "high", as in `numbsparse.matmul`. Static.

    Returns
    -------
    jax.Array, (..., out_features), or (in_features, batch) in `w @ x`
        Sums are float32, for float64 float64, and rounded at the end.

    Raises
    ------
    TypeError
        If not one operand is a BlockSparse, or dtypes differ, or for float64 on a GPU.
    ValueError
        If shapes do not match.
    NotImplementedError
        If arrays are neither on a CPU nor on an NVIDIA GPU.

    Examples
    --------
    >>> import jax.numpy as jnp, numbsparse.jax as nsj
    >>> w = nsj.BlockSparse(jnp.ones((1, 4, 4)), [[1, 0]])
    >>> nsj.matmul(jnp.ones((2, 4)), w)
    Array([[4., 4., 4., 4., 0., 0., 0., 0.],
           [4., 4., 4., 4., 0., 0., 0., 0.]], dtype=float32)

    Follows S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
    """
    if isinstance(x, BlockSparse):
        dense = _array("w", w)
        if dense.ndim > 2:
            raise ValueError(f"w @ x takes an x of one or two axes, got {dense.ndim}")
        if dense.ndim == 0 or dense.shape[0] != x.shape[1]:
            takes = f"in w @ x, x takes the shape ({x.shape[1]}, batch) with this w"
            raise ValueError(f"{takes}, got {dense.shape}")
        return matmul(dense.T, x.T, precision=precision).T
    x = _array("x", x)
    if not isinstance(w, BlockSparse):
        raise TypeError(f"w takes a BlockSparse of numbsparse.jax, got {type_name(w)}")
    features, outputs = w.shape
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"x takes the shape (..., {features}) with this w, got {x.shape}")
    values = _array("w.values", w.values)
    check_pair("x", x, "w", values)
    check_values(values, w.stored_layout.n_blocks)  # which jax.tree.map may have changed
    checked_shape("w.shape", w.stored_shape, w.stored_layout.shape, values.shape[1])
    product = products.transposed if w.is_transposed else products.matmul
    rows = x if x.ndim == 2 else x.reshape(prod(x.shape[:-1]), features)
    how = _static(w.stored_layout, w.stored_shape, w.block_size, precision)
    y: jax.Array = product.bind(rows, values, **how)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], outputs)


def sddmm(
    a: Dense, b: Dense, layout: Any, *, block_size: int | None = None, precision: str | None = None
) -> BlockSparse:
    """The product of two dense matrices at the kept blocks only: the weight-gradient.

    s[c, k] = sum over n of a[c, n] * b[n, k] where the layout keeps the block of (c, k). A
    primitive of JAX, as `matmul` is; vmap makes one product after the other.

    Parameters
    ----------
    a : array of JAX or NumPy, (in_features, batch); for a weight-gradient `x.T`
    b : array, (batch, out_features), of the dtype of a
    layout : Layout, pattern, or BlockSparse of numbsparse.jax, whose block size it takes too
    block_size : int, optional
        Needed only where the features are not multiples of it.
    precision : str, optional, as in `matmul`

    Returns
    -------
    BlockSparse, (in_features, out_features); zero beyond the edge

    Raises TypeError, ValueError and NotImplementedError as `matmul` does.

    Examples
    --------
    >>> import jax.numpy as jnp, numbsparse.jax as nsj
    >>> x, dy = jnp.ones((3, 8)), jnp.ones((3, 4))
    >>> nsj.sddmm(x.T, dy, [[1], [0]]).to_dense()[:5, 0]
    Array([3., 3., 3., 3., 0.], dtype=float32)
    """
    a, b = _array("a", a), _array("b", b)
    check_pair("a", a, "b", b)
    if a.dtype.name not in DTYPES:
        raise TypeError(f"a and b take one of {', '.join(DTYPES)}, got {a.dtype}")
    ops.check_factors(a, b)
    if isinstance(layout, BlockSparse):
        block_size = layout.own_size(block_size)
        if layout.is_transposed:  # keep the order of the stored blocks
            return sddmm(b.T, a.T, layout.T, precision=precision).T
        layout = layout.stored_layout
    layout, shape = as_layout(layout), (a.shape[0], b.shape[1])
    size = ops.size_of_blocks(shape, layout.shape, block_size)
    values = products.sddmm.bind(a.T, b, **_static(layout, shape, size, precision))
    return _unflatten((layout, shape, False), (values,))


def _static(layout: Layout, shape: tuple[int, int], size: int, precision: str | None) -> Any:
    size, precision = check_block_size(size), ops.checked_precision(precision)
    how = {"layout": layout, "shape": shape, "block_size": size, "precision": precision}
    return how | {"asks": ASKS}


def _array(argument: str, x: Any) -> jax.Array:
    check_kind(argument, x, jax.Array | np.ndarray, "an array of JAX or NumPy")
    if isinstance(x, jax.Array):
        return x
    array = as_array(x, argument)
    if not array.dtype.isnative:
        raise TypeError(f"{argument} takes this machine's byte order, got {array.dtype}")
    return jnp.asarray(array)
