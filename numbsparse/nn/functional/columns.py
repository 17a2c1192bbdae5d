"""The columns of a block-sparse matrix: their lengths, each times a number, and normalised."""

from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, record, unchanged
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional.arithmetic import add, as_matrix, cast, divide, multiply, negative
from numbsparse.nn.functional.joint import jointly
from numbsparse.nn.functional.layers import check_features
from numbsparse.nn.functional.shape import getitem, reshape, sum, sum_rows, take_rows
from numbsparse.patterns.checks import number


def column_norms(w: Tensor, eps: float = 0.0, *, tap_features: int | None = None) -> Tensor:
    """sqrt(eps + sum over c of w[c, k]^2), (out_features,), of a block-sparse w; differentiable.

    The gradient of a length of 0 is 0. Of a convolution's weight the rows of each tap end after
    `tap_features`; default: w is a matrix.

    >>> import numpy as np, numbsparse as ns
    >>> w = ns.Tensor(ns.BlockSparse(np.full((2, 2, 2), 3.0), [[1, 1]]))
    >>> ns.nn.functional.column_norms(w)
    Tensor([4.24264069, 4.24264069, 4.24264069, 4.24264069])
    """
    (w, _), eps = _with_columns(w), number("eps", eps)
    data = w.matrix
    lengths = _lengths(ops.inside(data, tap_features), data, eps)

    def gradient(dy: Tensor, norms: Tensor) -> Tensor:
        return scale_columns(w, by_length(dy, norms), tap_features=tap_features)

    return record(_cast(lengths, w.dtype), (w, gradient))


def by_length(dy: Tensor, lengths: Tensor) -> Tensor:
    """dy / length, of vectors with these lengths; of those that are 0 dy / 1, times what is 0."""
    above_0 = ops.relu_grad(lengths.values, ops.full_like(lengths.values, 1.0))
    return divide(dy, add(lengths, Tensor(ops.subtract(1.0, above_0))))


def scale_columns(w: Tensor, scale: Tensor, *, tap_features: int | None = None) -> Tensor:
    """w[c, k] * scale[k], of a block-sparse w, with its layout; differentiable.

    `tap_features` as in `column_norms`.

    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> w = ns.Tensor(ns.BlockSparse(np.ones((1, 2, 2)), [[0, 1]]))
    >>> F.scale_columns(w, ns.Tensor([1.0, 2.0, 3.0, 4.0])).numpy()
    array([[0., 0., 3., 4.],
           [0., 0., 3., 4.]])
    """
    w, columns = _with_columns(w)
    data, scale = w.matrix, as_tensor(scale, "scale")
    check_features(data.shape[1:], data.dtype, scale=scale)
    size, out_blocks = data.block_size, data.layout.shape[1]
    padded = _padded(scale, out_blocks * size)
    rows = take_rows(reshape(padded, (out_blocks, size)), columns)
    scaled = multiply(blocks_of(w, tap_features), reshape(rows, (-1, 1, size)))
    return with_blocks(data, scaled, tap_features)


def normalise_columns(
    v: Tensor, g: Tensor, eps: float = 0.0, *, tap_features: int | None = None
) -> Tensor:
    """v[c, k] * g[k] / sqrt(eps + sum over c of v[c, k]^2), with the layout of v; differentiable.

    Lengths of 16-bit floats are computed in float32; `tap_features` as in `column_norms`. Salimans
    and Kingma, "Weight Normalization", 2016, equations 2 and 3.

    >>> import numpy as np, numbsparse as ns
    >>> v = ns.Tensor(ns.BlockSparse(np.full((1, 2, 2), 3.0), [[1]]))
    >>> ns.nn.functional.normalise_columns(v, ns.Tensor([1.0, 2.0])).numpy()
    array([[0.70710678, 1.41421356],
           [0.70710678, 1.41421356]])
    """
    (v, _), eps = _with_columns(v, "v"), number("eps", eps)
    data, g = v.matrix, as_tensor(g, "g")
    check_features(data.shape[1:], None, g=g)
    layout, n, width = data.layout, data.shape[1], data.layout.shape[1] * data.block_size
    inner: Any = {"tap_features": tap_features}
    blocks = ops.inside(data, **inner)
    lengths = _lengths(blocks, data, eps)
    scale = ops.divide(_cast(g.data, lengths.dtype), lengths)

    def whole(of_columns: Any) -> Any:
        return of_columns if n == width else ops.put((width,), slice(0, n), of_columns)

    def fused(dw: Tensor, w: Tensor) -> list[Tensor]:
        unchanged(v, g)
        slopes = ops.inside(data.with_values(dw.matrix.data), **inner)  # in the order of v's blocks
        dg = ops.divide(ops.column_dots(slopes, blocks, layout)[:n], lengths)
        along = ops.divide(ops.multiply(scale, dg), lengths)
        dv = ops.scale_columns(slopes, whole(scale), layout, blocks, whole(along))
        return [Tensor(data.with_values(dv)), Tensor(_cast(dg, g.dtype))]

    def recorded(dw: Tensor, w: Tensor) -> list[Tensor]:
        own, dw = cast(v, lengths.dtype), cast(dw, lengths.dtype)
        norms = column_norms(own, eps, **inner)
        by = divide(cast(g, lengths.dtype), norms)
        dg = divide(_dots(dw, own, tap_features), norms)
        along = scale_columns(own, negative(divide(multiply(by, dg), norms)), **inner)
        return [cast(add(scale_columns(dw, by, **inner), along), v.dtype), cast(dg, g.dtype)]

    values = ops.scale_columns(blocks, whole(scale), layout)
    return record(data.with_values(values), *jointly(fused, v, g, again=recorded))


def blocks_of(w: Tensor, tap_features: int | None = None) -> Tensor:
    """The stored blocks of a block-sparse tensor, zeros beyond the edge, (n_blocks, B, B)."""
    like = w.matrix
    inside = ops.inside(like, tap_features)
    return record(inside, (w, lambda dy, y: with_blocks(like, dy, tap_features)))


def with_blocks(like: BlockSparse, values: Tensor, tap_features: int | None = None) -> Tensor:
    """A block-sparse tensor with the layout of `like` and these stored blocks."""
    whole = like.with_values(values.data)
    return record(whole, (values, lambda dw, w: blocks_of(dw, tap_features)))


def _lengths(blocks: Any, like: BlockSparse, eps: float) -> Any:
    """Of the columns of `like`, from its stored blocks: in float32 with 16-bit floats."""
    squares = ops.column_dots(blocks, blocks, like.layout)[: like.shape[1]]
    return ops.sqrt(ops.add(squares, eps) if eps else squares)


def _dots(a: Tensor, b: Tensor, tap_features: int | None) -> Tensor:
    """The sum over c of a[c, k] * b[c, k], (out_features,), of matrices of one layout."""
    _, columns = _with_columns(a)
    products = multiply(blocks_of(a, tap_features), blocks_of(b, tap_features))
    of_blocks = sum(products, axis=1)  # (n_blocks, B)
    flat = reshape(sum_rows(of_blocks, columns, a.matrix.layout.shape[1]), (-1,))
    return getitem(flat, slice(0, a.shape[1])) if flat.size != a.shape[1] else flat


def _cast(array: Any, dtype: Any) -> Any:
    return array if array.dtype == dtype else ops.cast(array, dtype)


def _with_columns(w: Any, argument: str = "w") -> tuple[Tensor, Any]:
    """A block-sparse tensor, and the block column of each of its blocks."""
    w = as_matrix(w, argument)
    own = w.matrix
    if own.is_transposed:
        raise ValueError(f"{argument} takes a matrix that is not a transposed view")
    return w, ops.index_beside(own.layout, own.values).block_columns


def _padded(x: Tensor, length: int) -> Tensor:
    """x with zeros after it: (length,)."""
    if x.size == length:
        return x
    return record(
        ops.put((length,), slice(0, x.size), x.data),
        (x, lambda dy, y: getitem(dy, slice(0, x.size))),
    )
