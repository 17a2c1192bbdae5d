"""The three block-sparse products; the gradient of each is another of them."""

from typing import Any

from numbsparse import edits, ops
from numbsparse.autograd import Tensor, as_tensor, record, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional.arithmetic import data_of
from numbsparse.nn.functional.gates import AsStored, as_stored, dots, scaled, ungated
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
        return _gated(x, w, as_tensor(gate, "gate"), how)
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
    if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
        return ops.sddmm(a, b, layout, block_size=block_size, kernel=kernel, precision=precision)
    how: Any = {"kernel": kernel, "precision": ops.checked_precision(precision)}
    product = ops.sddmm(data_of(a), data_of(b), layout, block_size=block_size, **how)
    a, b = as_tensor(a, "a"), as_tensor(b, "b")
    # s = (a @ b) at the kept blocks, so da = ds @ b.T and db = a.T @ ds.
    return record(
        product,
        (a, lambda ds, s: transpose(matmul(b, transpose(ds), **how))),
        (b, lambda ds, s: matmul(transpose(a), ds, **how)),
    )


matmul.__doc__ = ops.matmul.__doc__
sddmm.__doc__ = ops.sddmm.__doc__


def _gated(x: Any, w: Any, gate: Tensor, how: Any) -> Tensor:
    """With the gates in the kernel that multiplies, or, if that takes none, on their own before."""
    first = isinstance(unread(x), BlockSparse)
    dense, matrix = (as_tensor(a) for a in ((w, x) if first else (x, w)))
    gates = as_stored(matrix, gate)
    one, other = map(unread, (matrix, dense) if first else (dense, matrix))
    if len(dense.shape) == 2 and ops.multiplies_gates(one, other, gates[2], **how):
        return _gated_product(dense, matrix, gates, first, how)
    v = scaled(matrix, gates)
    return _sparse_times_dense(v, dense, how) if first else _dense_times_sparse(dense, v, how)


def _gated_product(x: Tensor, w: Tensor, gates: AsStored, first: bool, how: Any) -> Tensor:
    """x @ w, or w @ x where w is `first`; each gradient is such a product, or one of gates."""
    (stored, by, kept), own, last = gates, unread(w), list[tuple[Tensor, Tensor]]()
    operands = (w.data, x.data) if first else (x.data, w.data)
    y = ops.matmul(*operands, gate=kept._replace(gates=by.data), **how)

    def of_kept(dy: Tensor) -> Tensor:
        """The gradient of the gated blocks: once for w and its gates."""
        if last and last[0][0] is dy:
            return last.pop()[1]
        a, b = (dy, transpose(x)) if first else (transpose(x), dy)
        a, b = (transpose(b), transpose(a)) if own.is_transposed else (a, b)
        found = sddmm(a, b, kept, block_size=own.block_size, **how)
        last[:] = [(dy, found)] if stored.requires_grad and by.requires_grad else []
        return found

    return record(
        y,
        (x, lambda dy, y: _gated_product(dy, transpose(w), gates, first, how)),
        (stored, lambda dy, y: ungated(of_kept(dy), by, kept, None, in_place=True)),
        (by, lambda dy, y: dots(of_kept(dy), stored, kept, None)),
        held=(w,),
    )


def _dense_times_sparse(x: Any, w: Any, how: Any) -> Tensor:
    """x (..., in_features) times w (in_features, out_features)."""
    x, w = as_tensor(x), as_tensor(w, "w")
    if len(x.shape) != 2 and x.shape:  # a number is refused later
        rows = reshape(x, (-1, x.shape[-1])) if x.size else reshape(x, (0, x.shape[-1]))
        y = _dense_times_sparse(rows, w, how)
        return reshape(y, (*x.shape[:-1], y.shape[1]))
    kept = unread(w)
    return record(
        ops.matmul(x.data, w.data, **how),
        (x, lambda dy, y: matmul(dy, transpose(w), **how)),
        (w, lambda dy, y: sddmm(transpose(x), dy, kept, **how)),
        reads=(x, w),
    )


def _sparse_times_dense(w: Any, x: Any, how: Any) -> Tensor:
    """w (out_features, in_features) times x (in_features) or (in_features, batch)."""
    x, w = as_tensor(x), as_tensor(w, "w")
    if len(x.shape) == 1:
        return reshape(_sparse_times_dense(w, reshape(x, (-1, 1)), how), (-1,))
    kept = unread(w)
    return record(
        ops.matmul(w.data, x.data, **how),
        (x, lambda dy, y: matmul(transpose(w), dy, **how)),
        (w, lambda dy, y: sddmm(dy, transpose(x), kept, **how)),
        reads=(x, w),
    )
