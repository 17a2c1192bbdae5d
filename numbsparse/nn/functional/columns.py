"""The columns of a block-sparse matrix: their lengths, and each times a number."""

from __future__ import annotations

from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, record
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional.arithmetic import add, multiply, sqrt
from numbsparse.nn.functional.shape import getitem, reshape, sum


def column_norms(w: Tensor, eps: float = 0.0) -> Tensor:
    """sqrt(eps + sum over c of w[c, k]^2), (out_features,), of a block-sparse w; differentiable.

    >>> import numpy as np, numbsparse as ns
    >>> w = ns.Tensor(ns.BlockSparse(np.full((2, 2, 2), 3.0), [[1, 0], [1, 1]][1:]))
    >>> column_norms(w)
    Tensor([4.24264069, 4.24264069, 4.24264069, 4.24264069])
    """
    columns = _block_columns(w.data)
    values = blocks_of(w)
    squares = sum(multiply(values, values), axis=1)  # (n_blocks, B)
    totals = _sum_rows(squares, columns, w.data.layout.shape[1])
    flat = reshape(totals, (-1,))
    flat = getitem(flat, slice(0, w.shape[1])) if flat.size != w.shape[1] else flat
    return sqrt(add(flat, eps) if eps else flat)


def scale_columns(w: Tensor, scale: Tensor) -> Tensor:
    """w[c, k] * scale[k], of a block-sparse w, with its layout; differentiable."""
    data: BlockSparse = w.data
    columns = _block_columns(data)
    if scale.shape != (data.shape[1],):
        raise ValueError(f"scale takes the shape {(data.shape[1],)} with this w, got {scale.shape}")
    size, out_blocks = data.block_size, data.layout.shape[1]
    padded = _padded(scale, out_blocks * size)
    rows = _take_rows(reshape(padded, (out_blocks, size)), columns)
    return with_blocks(data, multiply(blocks_of(w), reshape(rows, (-1, 1, size))))


def blocks_of(w: Tensor) -> Tensor:
    """The stored blocks of a block-sparse tensor as a dense one, (n_blocks, B, B)."""
    like: BlockSparse = w.data
    return record(like.values, (w, lambda dy, y: with_blocks(like, dy)))


def with_blocks(like: BlockSparse, values: Tensor) -> Tensor:
    """A block-sparse tensor with the layout of `like` and these stored blocks."""
    return record(like.with_values(values.data), (values, lambda dw, w: blocks_of(dw)))


def _block_columns(w: Any) -> Any:
    if not isinstance(w, BlockSparse):
        raise TypeError(f"w takes a Tensor of a BlockSparse, got one of {type(w).__name__}")
    if w.is_transposed:
        raise ValueError("w takes a matrix that is no transposed view")
    return ops.index_beside(w.layout, w.values).block_columns


def _take_rows(table: Tensor, rows: Any) -> Tensor:
    count = table.shape[0]
    return record(
        ops.take_rows(table.data, rows), (table, lambda dy, y: _sum_rows(dy, rows, count))
    )


def _sum_rows(x: Tensor, rows: Any, count: int) -> Tensor:
    return record(ops.sum_rows(x.data, rows, count), (x, lambda dy, y: _take_rows(dy, rows)))


def _padded(x: Tensor, length: int) -> Tensor:
    """x with zeros after it: (length,)."""
    if x.size == length:
        return x
    return record(
        ops.put((length,), slice(0, x.size), x.data),
        (x, lambda dy, y: getitem(dy, slice(0, x.size))),
    )
