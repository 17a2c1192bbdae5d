"""The three block-sparse products; the gradient of each is another of them."""

from __future__ import annotations

from typing import Any

from numbsparse import edits, ops
from numbsparse.autograd import Tensor, as_tensor, record, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional.arithmetic import data_of
from numbsparse.nn.functional.gates import scale_blocks
from numbsparse.nn.functional.shape import reshape, transpose


def matmul(
    x: Any,
    w: Any,
    *,
    gate: Any = None,
    out: Any = None,
    kernel: str = "auto",
    precision: str | None = None,
) -> Any:
    if not (isinstance(x, Tensor) or isinstance(w, Tensor) or isinstance(gate, Tensor)):
        result = ops.matmul(x, w, gate=gate, out=out, kernel=kernel, precision=precision)
        if out is not None:
            edits.note(out, "matmul with it as out")
        return result
    if out is not None:
        raise ValueError("out takes no Tensor operands: what is differentiated is not overwritten")
    how = {"kernel": kernel, "precision": ops.checked_precision(precision)}
    if gate is not None:
        is_first = isinstance(unread(x), BlockSparse)
        x, w = (scale_blocks(x, gate), w) if is_first else (x, scale_blocks(w, gate))
    if isinstance(data_of(x), BlockSparse):
        return _sparse_times_dense(x, w, how)
    return _dense_times_sparse(x, w, how)


def sddmm(
    a: Any,
    b: Any,
    layout: Any,
    *,
    block_size: int | None = None,
    kernel: str = "auto",
    precision: str | None = None,
) -> Any:
    how: Any = {"kernel": kernel, "precision": ops.checked_precision(precision)}
    product = ops.sddmm(data_of(a), data_of(b), layout, block_size=block_size, **how)
    if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
        return product
    a, b = as_tensor(a), as_tensor(b)
    # s = (a @ b) at the kept blocks, so da = ds @ b.T and db = a.T @ ds.
    return record(
        product,
        (a, lambda ds, s: transpose(matmul(b, transpose(ds), **how))),
        (b, lambda ds, s: matmul(transpose(a), ds, **how)),
    )


matmul.__doc__ = ops.matmul.__doc__
sddmm.__doc__ = ops.sddmm.__doc__


def _dense_times_sparse(x: Any, w: Any, how: Any) -> Tensor:
    """x (..., in_features) times w (in_features, out_features)."""
    x, w = as_tensor(x), as_tensor(w)
    if len(x.shape) != 2:
        rows = reshape(x, (-1, x.shape[-1])) if x.size else reshape(x, (0, x.shape[-1]))
        y = _dense_times_sparse(rows, w, how)
        return reshape(y, (*x.shape[:-1], y.shape[1]))
    kept = unread(w)
    return record(
        ops.matmul(x.data, w.data, **how),
        (x, lambda dy, y: matmul(dy, transpose(w), **how)),
        (w, lambda dy, y: sddmm(transpose(x), dy, kept, **how)),
    )


def _sparse_times_dense(w: Any, x: Any, how: Any) -> Tensor:
    """w (out_features, in_features) times x (in_features) or (in_features, batch)."""
    x, w = as_tensor(x), as_tensor(w)
    if len(x.shape) == 1:
        return reshape(_sparse_times_dense(w, reshape(x, (-1, 1)), how), (-1,))
    kept = unread(w)
    return record(
        ops.matmul(w.data, x.data, **how),
        (x, lambda dy, y: matmul(transpose(w), dy, **how)),
        (w, lambda dy, y: sddmm(dy, transpose(x), kept, **how)),
    )
