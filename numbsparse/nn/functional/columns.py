"""The columns of a block-sparse matrix: their lengths, each times a number, and normalised."""

from __future__ import annotations

from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, is_recording, record
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional.arithmetic import add, cast, divide, multiply, negative, sqrt
from numbsparse.nn.functional.repeated import jointly
from numbsparse.nn.functional.shape import getitem, reshape, sum


def column_norms(w: Tensor, eps: float = 0.0) -> Tensor:
    """sqrt(eps + sum over c of w[c, k]^2), (out_features,), of a block-sparse w; differentiable.

    >>> import numpy as np, numbsparse as ns
    >>> w = ns.Tensor(ns.BlockSparse(np.full((2, 2, 2), 3.0), [[1, 0], [1, 1]][1:]))
    >>> column_norms(w)
    Tensor([4.24264069, 4.24264069, 4.24264069, 4.24264069])
    """
    squares = _dots(w, w)
    return sqrt(add(squares, eps) if eps else squares)


def scale_columns(w: Tensor, scale: Tensor) -> Tensor:
    """w[c, k] * scale[k], of a block-sparse w, with its layout; differentiable.

    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> w = ns.Tensor(ns.BlockSparse(np.ones((1, 2, 2)), [[0, 1]]))
    >>> F.scale_columns(w, ns.Tensor([1.0, 2.0, 3.0, 4.0])).numpy()
    array([[0., 0., 3., 4.],
           [0., 0., 3., 4.]])
    """
    data: BlockSparse = w.data
    columns = _block_columns(data)
    _check_columns(data, scale, "scale")
    size, out_blocks = data.block_size, data.layout.shape[1]
    padded = _padded(scale, out_blocks * size)
    rows = _take_rows(reshape(padded, (out_blocks, size)), columns)
    return with_blocks(data, multiply(blocks_of(w), reshape(rows, (-1, 1, size))))


def normalise_columns(v: Tensor, g: Tensor, eps: float = 0.0) -> Tensor:
    """v[c, k] * g[k] / sqrt(eps + sum over c of v[c, k]^2), with the layout of v; differentiable.

    Lengths of 16-bit floats are computed in float32. Salimans and Kingma, "Weight Normalization",
    2016, equations 2 and 3.

    >>> import numpy as np, numbsparse as ns
    >>> v = ns.Tensor(ns.BlockSparse(np.full((1, 2, 2), 3.0), [[1]]))
    >>> normalise_columns(v, ns.Tensor([1.0, 2.0])).numpy()
    array([[0.70710678, 1.41421356],
           [0.70710678, 1.41421356]])
    """
    data: BlockSparse = v.data
    _block_columns(data)
    _check_columns(data, g, "g")
    layout, n, width = data.layout, data.shape[1], data.layout.shape[1] * data.block_size
    squares = ops.column_dots(data.values, data.values, layout)[:n]
    lengths = ops.sqrt(ops.add(squares, eps) if eps else squares)
    scale = ops.divide(_cast(g.data, lengths.dtype), lengths)

    def whole(of_columns: Any) -> Any:
        return of_columns if n == width else ops.put((width,), slice(0, n), of_columns)

    def fused(dw: Tensor, w: Tensor) -> list[Tensor]:
        slopes = dw.data.data  # in the order of v's blocks
        dg = ops.divide(ops.column_dots(slopes, data.values, layout)[:n], lengths)
        along = ops.divide(ops.multiply(scale, dg), lengths)
        dv = ops.scale_columns(slopes, whole(scale), layout, data.values, whole(along))
        return [Tensor(data.with_values(dv)), Tensor(_cast(dg, g.dtype))]

    def recorded(dw: Tensor) -> tuple[Tensor, Tensor]:
        own, norms = cast(v, lengths.dtype), column_norms(cast(v, lengths.dtype), eps)
        by, dw = divide(cast(g, lengths.dtype), norms), cast(dw, lengths.dtype)
        dg = divide(_dots(dw, own), norms)
        along = scale_columns(own, negative(divide(multiply(by, dg), norms)))
        return cast(add(scale_columns(dw, by), along), v.dtype), cast(dg, g.dtype)

    edges = jointly(fused, v, g)

    def edge(i: int) -> Any:
        return lambda dw, w: recorded(dw)[i] if is_recording() else edges[i][1](dw, w)

    values = ops.scale_columns(data.values, whole(scale), layout)
    return record(data.with_values(values), (v, edge(0)), (g, edge(1)))


def blocks_of(w: Tensor) -> Tensor:
    """The stored blocks of a block-sparse tensor as a dense one, (n_blocks, B, B)."""
    like: BlockSparse = w.data
    return record(like.values, (w, lambda dy, y: with_blocks(like, dy)))


def with_blocks(like: BlockSparse, values: Tensor) -> Tensor:
    """A block-sparse tensor with the layout of `like` and these stored blocks."""
    return record(like.with_values(values.data), (values, lambda dw, w: blocks_of(dw)))


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """The sum over c of a[c, k] * b[c, k], (out_features,), of matrices of one layout."""
    columns = _block_columns(a.data)
    of_blocks = sum(multiply(blocks_of(a), blocks_of(b)), axis=1)  # (n_blocks, B)
    flat = reshape(_sum_rows(of_blocks, columns, a.data.layout.shape[1]), (-1,))
    return getitem(flat, slice(0, a.shape[1])) if flat.size != a.shape[1] else flat


def _check_columns(w: BlockSparse, of_columns: Tensor, argument: str) -> None:
    if of_columns.shape != w.shape[1:]:
        raise ValueError(f"{argument} takes the shape {w.shape[1:]} here, got {of_columns.shape}")


def _cast(array: Any, dtype: Any) -> Any:
    return array if array.dtype == dtype else ops.cast(array, dtype)


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
