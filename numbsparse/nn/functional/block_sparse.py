"""Block-sparse tensors in another layout, and their sums."""

from __future__ import annotations

from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, record
from numbsparse.nn.functional.columns import blocks_of
from numbsparse.nn.functional.products import matmul
from numbsparse.nn.functional.shape import Axis, reshape, sum


def remap(w: Any, layout: Any) -> Tensor:
    """A block-sparse tensor in another layout, as `BlockSparse.remap`; differentiable.

    Blocks of both layouts keep their values, new ones are zero; so have their gradients.

    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> w = ns.Tensor(ns.BlockSparse(np.ones((2, 4, 4)), [[1, 1, 0]]), requires_grad=True)
    >>> F.sum(F.remap(w, [[0, 1, 1]])).backward()
    >>> w.grad.data.block_norms("l1")
    array([ 0., 16.])
    """
    w = as_tensor(w)
    own = w.data.layout
    return record(ops.remap(w.data, layout), (w, lambda dv, v: remap(dv, own)))


def sum_block_sparse(w: Tensor, axis: Axis, keepdims: bool) -> Tensor:
    """`sum` of a block-sparse tensor: of its blocks, or as a product with ones."""
    axes = (0, 1) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    over = sorted({int(a) % 2 for a in axes if a in (-2, -1, 0, 1)})
    if len(over) != len(axes) or not over:
        raise ValueError(f"axis takes 0, 1, both or None, got {axis!r}")
    kept = tuple(1 if nth in over else n for nth, n in enumerate(w.shape))
    if len(over) == 2:
        total = sum(blocks_of(w))
    else:
        ones = ops.full((w.shape[over[0]],), 1.0, w.dtype, w.place)
        pair = (w, ones) if over[0] else (ones, w)
        total = matmul(*pair, precision="highest")
    return reshape(total, kept) if keepdims else total
