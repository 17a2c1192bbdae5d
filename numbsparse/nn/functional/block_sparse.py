"""Slices of block-sparse tensors, their sums, and the norms of their blocks."""

from contextlib import suppress
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, record, unread
from numbsparse.nn.functional.activations import abs
from numbsparse.nn.functional.arithmetic import as_matrix, cast, multiply
from numbsparse.nn.functional.columns import blocks_of, by_length
from numbsparse.nn.functional.gates import in_order
from numbsparse.nn.functional.products import matmul
from numbsparse.nn.functional.shape import Axis, reshape, sum
from numbsparse.ops.operands import axes_of
from numbsparse.patterns.checks import flag


def slice_block_sparse(w: Tensor, key: Any) -> Tensor:
    """`getitem` of a block-sparse tensor: slices of whole blocks."""
    own = unread(w)
    return record(w.matrix[key], (w, lambda dv, v: _placed(dv, own, key)), reads=())


def _placed(v: Tensor, like: Any, key: Any) -> Tensor:
    """Zeros with v at `key`: the gradient of a slice, and the other way round."""
    whole = ops.placed(v.matrix, like, key)
    return record(whole, (v, lambda dw, w: slice_block_sparse(dw, key)), reads=())


def block_norms(w: Any, by: str = "l2") -> Tensor:
    """The norm of each block of a block-sparse tensor: see `BlockSparse.block_norms`.

    (n_blocks,), in the order of `w.data.data` and the dtype of w, float32 of 16-bit floats. It is
    differentiable: the gradient of a block of zeros is 0, and of "max" the values that are largest
    share it evenly. The sum of "l2" is the penalty of a group lasso. Raises TypeError where w is
    not block-sparse, ValueError for another norm.

    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> w = ns.Tensor(ns.BlockSparse(np.array([[[3.0, -4], [0, 0]]]), [[1]]), requires_grad=True)
    >>> F.block_norms(w)
    Tensor([5.])
    >>> F.sum(F.block_norms(w)).backward()
    >>> w.grad.data.data
    array([[[ 0.6, -0.8],
            [ 0. ,  0. ]]])
    """
    w = as_matrix(w)
    like = w.matrix
    ops.checked_norm(by)
    w = cast(w, "float32") if w.dtype.itemsize == 2 else w
    values = reshape(blocks_of(w), (like.n_blocks, like.block_size**2))
    norms = {"l1": lambda a: sum(abs(a), axis=1), "l2": _lengths, "max": _largest}[by](values)
    return in_order(norms, like.stored_layout) if like.is_transposed else norms


def _lengths(values: Tensor) -> Tensor:
    def gradient(dy: Tensor, lengths: Tensor) -> Tensor:
        return multiply(values, reshape(by_length(dy, lengths), (-1, 1)))

    lengths = ops.row_norms(values.data, "l2")
    return record(ops.cast(lengths, values.dtype), (values, gradient))


def _largest(values: Tensor) -> Tensor:
    sizes = abs(values)

    def gradient(dy: Tensor, largest: Tensor) -> Tensor:
        below = ops.subtract(ops.reshape(largest.data, (-1, 1)), sizes.data)
        is_largest = ops.subtract(1.0, ops.relu_grad(below, ops.full_like(below, 1.0)))
        share = ops.divide(is_largest, ops.sum(is_largest, 1, keepdims=True))
        return multiply(Tensor(share), reshape(dy, (-1, 1)))

    return record(ops.max(sizes.data, 1), (sizes, gradient))


def sum_block_sparse(w: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """`sum` of a block-sparse tensor: of its blocks, or as a product with ones."""
    over: list[int] = []
    with suppress(TypeError, ValueError):
        over = sorted(axes_of((0, 1) if axis is None else axis, 2))
    if not over:
        raise ValueError(f"axis takes 0, 1, both or None, got {axis!r}")
    kept = tuple(1 if nth in over else n for nth, n in enumerate(w.shape))
    if len(over) == 2:
        total = sum(blocks_of(w))
    else:
        ones = ops.full((w.shape[over[0]],), 1.0, w.dtype, w.device)
        pair = (w, ones) if over[0] else (ones, w)
        total = matmul(*pair, precision="highest")
    return reshape(total, kept) if flag("keepdims", keepdims) else total
