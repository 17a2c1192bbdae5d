"""BlockSparse with a tensor of torch for its values, and the products of such matrices."""

from typing import Any

import torch

from numbsparse import ops
from numbsparse.blocks import Blocks, check_values, checked_shape
from numbsparse.dtypes import type_name
from numbsparse.layout import Layout
from numbsparse.torch import operators
from numbsparse.torch.handles import Handle, handle_of


class BlockSparse(Blocks):
    """A block-sparse matrix of shape (in_features, out_features) whose values are a tensor.

    Parameters
    ----------
    values : Tensor, (n_blocks, B, B), of float16, bfloat16, float32 or, on the CPU, float64
        The kept blocks, block row by block row. Never copied; gradients are this tensor's own.
    layout : Layout or pattern, (in_blocks, out_blocks)
        Which blocks are kept.
    shape : (in_features, out_features), optional
        If the features are not multiples of B; what is beyond the edge is never read.

    Attributes
    ----------
    values, layout, shape : as given; ndim : 2
    dtype, device : of the values
    T : the transposed matrix, a view

    Raises
    ------
    TypeError
        If values are not a tensor of these dtypes.
    ValueError
        If values, layout and shape disagree.

    Examples
    --------
    >>> import torch, numbsparse as ns, numbsparse.torch as nst
    >>> values = torch.ones(3, 4, 4, requires_grad=True)
    >>> w = nst.BlockSparse(values, ns.Layout([[1, 0], [1, 1]]))
    >>> y = torch.ones(1, 8) @ w
    >>> y
    tensor([[8., 8., 8., 8., 4., 4., 4., 4.]], grad_fn=<...>)
    >>> y.sum().backward()
    >>> values.grad.shape
    torch.Size([3, 4, 4])
    """

    def __init__(
        self, values: torch.Tensor, layout: Any, *, shape: tuple[int, int] | None = None
    ) -> None:
        handle = layout if isinstance(layout, Handle) else handle_of(layout)
        if not isinstance(values, torch.Tensor) or values.dtype not in operators.CODES:
            got = values.dtype if isinstance(values, torch.Tensor) else type_name(values)
            raise TypeError(
                f"values takes a tensor of float16, bfloat16, float32 or float64, got {got}"
            )
        operators.check_dense("values", values)
        check_values(values, handle.n_blocks)
        size = values.shape[1]
        self.values, self.handle, self.is_transposed = values, handle, False
        self.shape = checked_shape("shape", shape, handle.grid, size)
        self.form = handle.word, *self.shape, size  # as operators take it, of the stored values

    @property
    def stored_layout(self) -> Layout:  # type: ignore[override]
        return self.handle.layout

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def T(self) -> "BlockSparse":
        """The transposed matrix: the same values, walked the other way."""
        view = BlockSparse(self.values, self.handle, shape=self.stored_shape)
        view.shape, view.is_transposed = self.shape[::-1], not self.is_transposed
        return view

    def __matmul__(self, x: torch.Tensor) -> torch.Tensor:
        return matmul(self, x)

    def __rmatmul__(self, x: torch.Tensor) -> torch.Tensor:
        return matmul(x, self)

    def to(self, *where: Any, **how: Any) -> "BlockSparse":
        """The same matrix with its values elsewhere, or of another dtype: as `Tensor.to`."""
        moved = BlockSparse(self.values.to(*where, **how), self.handle, shape=self.stored_shape)
        return moved.T if self.is_transposed else moved

    def to_dense(self) -> torch.Tensor:
        """The dense matrix, (in_features, out_features); differentiable."""
        index, (in_blocks, out_blocks) = self.handle.layout.index, self.handle.layout.shape
        size, device = self.values.shape[1], self.values.device
        at = [
            torch.from_numpy(lines.copy()).to(device)
            for lines in (index.block_rows, index.block_columns)
        ]
        dense = self.values.new_zeros(in_blocks, out_blocks, size, size)
        dense = dense.index_put((at[0].long(), at[1].long()), self.values)
        rows, columns = self.stored_shape
        dense = dense.transpose(1, 2).reshape(in_blocks * size, -1)[:rows, :columns]
        return dense.T if self.is_transposed else dense

    @property
    def _place(self) -> str:  # type: ignore[override]
        return f", on {self.values.device}"


def matmul(
    x: torch.Tensor | BlockSparse, w: BlockSparse | torch.Tensor, *, precision: str | None = None
) -> torch.Tensor:
    """The product of a dense and a block-sparse matrix, `x @ w` or `w @ x`.

    y[n, k] = sum over c of x[n, c] * w[c, k], in time proportional to the kept blocks. An operator
    of torch: differentiable any number of times, and traced whole by torch.compile, which of a
    product written with @ makes two graphs.

    Parameters
    ----------
    x : Tensor, (..., in_features), or BlockSparse
    w : BlockSparse, (in_features, out_features), or Tensor, (out_features, batch)
        One of the two is a BlockSparse; both are of one dtype and on one device. Under
        torch.autocast both are cast to its dtype.
    precision : str, optional
        "highest" or "high", as in `numbsparse.matmul`.

    Returns
    -------
    Tensor, (..., out_features), or (in_features, batch) in `w @ x`
        Sums are float32, for float64 float64, and rounded at the end.

    Raises
    ------
    TypeError
        If not one operand is a BlockSparse, or dtypes differ.
    ValueError
        If shapes or devices do not meet.

    Examples
    --------
    >>> import torch, numbsparse.torch as nst
    >>> w = nst.BlockSparse(torch.ones(1, 4, 4), [[1, 0]])
    >>> nst.matmul(torch.ones(2, 4), w)
    tensor([[4., 4., 4., 4., 0., 0., 0., 0.],
            [4., 4., 4., 4., 0., 0., 0., 0.]])

    Follows S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
    """
    if isinstance(x, BlockSparse):
        operators.check_dense("w", w)
        dense: Any = w
        if dense.dim() == 0 or dense.shape[-min(dense.dim(), 2)] != x.shape[1]:
            takes = f"in w @ x, x takes the shape ({x.shape[1]}, batch) with this w"
            raise ValueError(f"{takes}, got {tuple(dense.shape)}")
        y = matmul(dense.mT if dense.dim() > 1 else dense, x.T, precision=precision)
        return y.mT if dense.dim() > 1 else y
    if not isinstance(w, BlockSparse):
        operators.check_dense("x", x)
        raise TypeError(f"w takes a BlockSparse of numbsparse.torch, got {type_name(w)}")
    product = operators.transposed if w.is_transposed else operators.matmul
    result: torch.Tensor = product((x, w.values), (*w.form, ops.checked_precision(precision)))
    return result


def sddmm(
    a: torch.Tensor,
    b: torch.Tensor,
    layout: Any,
    *,
    block_size: int | None = None,
    precision: str | None = None,
) -> BlockSparse:
    """The product of two dense matrices at the kept blocks only: the weight-gradient.

    s[c, k] = sum over n of a[c, n] * b[n, k] where the layout keeps the block of (c, k).

    Parameters
    ----------
    a : Tensor, (in_features, batch); for a weight-gradient `x.T`
    b : Tensor, (batch, out_features), of the dtype and device of a
    layout : Layout, pattern, or BlockSparse of numbsparse.torch, whose block size it takes too
    block_size : int, optional
        Needed only where the features are not multiples of it.
    precision : str, optional, as in `matmul`

    Returns
    -------
    BlockSparse, (in_features, out_features); zero beyond the edge

    Raises TypeError and ValueError as `matmul` does.

    Examples
    --------
    >>> import torch, numbsparse.torch as nst
    >>> x, dy = torch.ones(3, 8), torch.ones(3, 4)
    >>> nst.sddmm(x.T, dy, [[1], [0]]).to_dense()[:5, 0]
    tensor([3., 3., 3., 3., 0.])
    """
    operators.check_dense("a", a)
    operators.check_dense("b", b)
    operators.check_alike("a", a, "b", b)
    ops.check_factors(a, b)
    if isinstance(layout, BlockSparse):
        if layout.is_transposed:
            return sddmm(b.T, a.T, layout.T, block_size=block_size, precision=precision).T
        handle, block_size = layout.handle, layout.own_size(block_size)
    else:
        handle = handle_of(layout)
    shape = a.shape[0], b.shape[1]
    size = ops.size_of_blocks(shape, handle.grid, block_size)
    how = (handle.word, *shape, size, ops.checked_precision(precision))
    values = operators.sddmm((a.T, b), how)
    return BlockSparse(values, handle, shape=shape)
