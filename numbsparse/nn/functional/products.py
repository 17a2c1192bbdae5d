"""The three block-sparse products; the gradient of each is another of them."""

from typing import Any

from numbsparse import edits, ops
from numbsparse.autograd import Tensor, as_tensor, is_recording, record, unread
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
    kept, trained = gates[2], gate.requires_grad
    takes = len(dense.shape) == 2 and (trained or not kept.is_all)
    if takes and ops.multiplies_gates(one, other, kept, trained=trained, **how):
        return _gated_product(dense, matrix, gates, first, how)
    v = scaled(matrix, gates)
    return _sparse_times_dense(v, dense, how) if first else _dense_times_sparse(dense, v, how)


def _gated_product(x: Tensor, w: Tensor, gates: AsStored, first: bool, how: Any) -> Tensor:
    """x @ w, or w @ x where w is `first`; each gradient is such a product, or one of gates."""
    (stored, by, kept), own, last = gates, unread(w), list[tuple[Tensor, Tensor, Any]]()
    trained = (stored.requires_grad or by.requires_grad) and is_recording()
    x = _aligned(x) if trained else x
    operands = (w.data, x.data) if first else (x.data, w.data)
    y = ops.matmul(*operands, gate=kept._replace(gates=by.data), **how)

    def of_kept(dy: Tensor) -> tuple[Tensor, Any]:
        """The gradient of the gated blocks, once for w and its gates, and which blocks these are:
        all, where those of gates that are zero are left open."""
        if last and last[0][0] is dy:
            return last.pop()[1:]
        a, b = (dy, transpose(x)) if first else (transpose(x), dy)
        a, b = (transpose(b), transpose(a)) if own.is_transposed else (a, b)
        selected = kept._replace(in_place=True)
        found = sddmm(a, b, selected, block_size=own.block_size, **how)
        is_full = kept.places is not None and unread(found).stored_layout is kept.full
        of = found, ops.all_of(kept.full, kept.gates) if is_full else kept
        last[:] = [(dy, *of)] if stored.requires_grad and by.requires_grad else []
        return of

    def of_w(dy: Tensor, y: Tensor) -> Tensor:
        found, blocks = of_kept(dy)
        return ungated(found, by, blocks, None, in_place=True)

    def of_gates(dy: Tensor, y: Tensor) -> Tensor:
        found, blocks = of_kept(dy)
        return dots(found, stored, blocks, None)

    def of_x(dy: Tensor, y: Tensor) -> Tensor:
        return _gated_product(dy, transpose(w), gates, first, how)

    y = record(y, (x, of_x), (stored, of_w), (by, of_gates), held=(w,))
    return _aligned_on_the_way_back(y) if trained and x.requires_grad else y


def _dense_times_sparse(x: Any, w: Any, how: Any) -> Tensor:
    """x (..., in_features) times w (in_features, out_features)."""
    x, w = as_tensor(x), as_tensor(w, "w")
    if len(x.shape) != 2 and x.shape:  # a number is refused later
        rows = reshape(x, (-1, x.shape[-1])) if x.size else reshape(x, (0, x.shape[-1]))
        y = _dense_times_sparse(rows, w, how)
        return reshape(y, (*x.shape[:-1], y.shape[1]))
    kept, trained = unread(w), w.requires_grad and is_recording()
    x = _aligned(x) if trained else x
    y = record(
        ops.matmul(x.data, w.data, **how),
        (x, lambda dy, y: matmul(dy, transpose(w), **how)),
        (w, lambda dy, y: sddmm(transpose(x), dy, kept, **how)),
        reads=(x, w),
    )
    return _aligned_on_the_way_back(y) if trained and x.requires_grad else y


def _sparse_times_dense(w: Any, x: Any, how: Any) -> Tensor:
    """w (out_features, in_features) times x (in_features) or (in_features, batch)."""
    x, w = as_tensor(x), as_tensor(w, "w")
    if len(x.shape) == 1:
        return reshape(_sparse_times_dense(w, reshape(x, (-1, 1)), how), (-1,))
    kept, trained = unread(w), w.requires_grad and is_recording()
    x = _aligned(x) if trained else x
    y = record(
        ops.matmul(w.data, x.data, **how),
        (x, lambda dy, y: matmul(transpose(w), dy, **how)),
        (w, lambda dy, y: sddmm(dy, transpose(x), kept, **how)),
        reads=(x, w),
    )
    return _aligned_on_the_way_back(y) if trained and x.requires_grad else y


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy for the product and for the gradient of w: see `ops.aligned`."""
    copy = ops.aligned(x.data)
    return x if copy is x.data else record(copy, (x, lambda dx, _: dx), reads=())


def _aligned_on_the_way_back(y: Tensor) -> Tensor:
    """y, whose gradient is copied once for those of both operands, where it lies as y does."""
    if not ops.begins_anywhere(y.data):
        return y
    return record(y.data, (y, lambda dy, _: _aligned(dy)), reads=())
