"""BlocksparseMatMul: see `numbsparse.compat.blocksparse`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, record
from numbsparse.block_sparse import BlockSparse
from numbsparse.compat.blocksparse.arrays import check_shape, is_torch, run
from numbsparse.layout import Layout
from numbsparse.nn import functional, init
from numbsparse.nn.functional.columns import blocks_of, with_blocks
from numbsparse.patterns import as_pattern
from numbsparse.patterns.checks import check_block_size, flag, integer

Initializer = Callable[..., np.ndarray]  # of a shape and a dtype


class BlocksparseMatMul:
    """The product with block-sparse weights of one layout, as openai/blocksparse names it.

    y[n, k] = sum over c of x[n, c] * gate[b] * w[c, k], where b is the block of (c, k).

    Parameters
    ----------
    layout : array of zeros and ones, (in_blocks, out_blocks)
    block_size : 4, 8, 16, 32, 64 or 128
    feature_axis : 1 for activations (batch, features), 0 for (features, batch)
    z_order : bool, in which order `from_blocksparse` finds blocks
    name : str, optional

    Attributes
    ----------
    w_shape, g_shape : (blocks, B, B) and (blocks,), of a weight and of a gate
    layout, blocks, bsize, axis, CB, KB, C, K, sparsity, name
        The layout as booleans, kept blocks, their size, `feature_axis`, blocks and features in and
        out, the share of blocks that are kept.

    Raises TypeError or ValueError for another layout, block size or axis; a call likewise for
    operands of another shape, dtype or place.

    Examples
    --------
    >>> import numpy as np
    >>> from numbsparse.compat.blocksparse.matmul import BlocksparseMatMul
    >>> hidden_size, block_size, minibatch_size = 4096, 32, 64
    >>> sparsity = np.random.randint(2, size=(hidden_size // block_size, hidden_size // block_size))
    >>> bsmm = BlocksparseMatMul(sparsity, block_size=block_size)
    >>> x = np.ones((minibatch_size, hidden_size), "float32")  # was a placeholder
    >>> w = np.random.random(bsmm.w_shape).astype("float32")  # was a variable
    >>> y = bsmm(x, w)
    >>> y.shape == bsmm.o_shape(minibatch_size)
    True
    """

    def __init__(
        self,
        layout: Any,
        block_size: int = 32,
        feature_axis: int = 1,
        z_order: bool = True,
        name: str = "BlocksparseMatMul",
    ) -> None:
        self.bsize = block_size = check_block_size(block_size)
        self.axis = integer("feature_axis", feature_axis, 0, 1)
        self.z_order, self.name = flag("z_order", z_order), name
        self._layout = Layout(as_pattern(layout, "layout"))
        self.layout, self.sparsity = self._layout.pattern, round(self._layout.density, 3)
        self.blocks, (self.CB, self.KB) = self._layout.n_blocks, self._layout.shape
        self.C, self.K = self.CB * block_size, self.KB * block_size
        self.w_shape, self.g_shape = (self.blocks, block_size, block_size), (self.blocks,)

    def i_shape(self, N: int) -> tuple[int, int]:
        """The shape of x for a batch of N."""
        return (N, self.C) if self.axis else (self.C, N)

    def o_shape(self, N: int) -> tuple[int, int]:
        """The shape of y for a batch of N."""
        return (N, self.K) if self.axis else (self.K, N)

    def block_coord(self, block: int) -> tuple[int, int]:
        """(block row, block column) of a block of the weight, by its number."""
        block, index = integer("block", block, 0, self.blocks - 1), self._layout.index
        return int(index.block_rows[block]), int(index.block_columns[block])

    def __call__(
        self, x: Any, w: Any, gate: Any = None, gate_grad: bool = False, dw_gated: bool = False
    ) -> Any:
        """The product. `gate` is (blocks,), of the dtype of w, or None.

        The gradient of w is that of an ungated weight, so that blocks with a gate of 0 learn too;
        with `dw_gated` or `gate_grad` it is times the gate. Without `gate_grad` the gate has none.
        """
        check_shape("w", w, self.w_shape)
        learns = flag("gate_grad", gate_grad), flag("dw_gated", dw_gated)
        batch = getattr(x, "shape", ())[1 - self.axis :][:1] or (0,)
        check_shape("x", x, self.i_shape(*batch), f"; feature_axis is {self.axis}")
        if gate is not None:
            check_shape("gate", gate, self.g_shape)

        def compute(x: Any, w: Any, gate: Any) -> Any:
            w = self._matrix(gated(w, gate, *learns))
            return x @ w if self.axis else w.T @ x

        of_torch = all(is_torch(array) for array in (x, w, gate) if array is not None)
        return compute(x, w, gate) if of_torch else run(compute, x, w, gate)

    matmul = __call__

    def _matrix(self, values: Any) -> Any:
        if is_torch(values):
            from numbsparse import torch as nst

            return nst.BlockSparse(values, self._layout)
        return with_blocks(BlockSparse(values.data, self._layout), values)

    def l2_normalize(self, w: Any, gain: Any = None, epsilon: float = 1e-12) -> Any:
        """gain[k] * w[c, k] / sqrt(epsilon + sum over c of w[c, k]^2); gain (K,), or None."""
        check_shape("w", w, self.w_shape)

        def compute(w: Tensor, gain: Tensor | None) -> Tensor:
            gain = Tensor(ops.full((self.K,), 1.0, w.dtype, w.device)) if gain is None else gain
            return blocks_of(functional.normalise_columns(self._matrix(w), gain, epsilon))

        return run(compute, w, gain)

    def identity_init(self, scale: float = 1.0) -> Initializer:
        """A function that makes first values: see `numbsparse.nn.init.identity`."""
        return self._initializer(init.identity, scale=scale)

    def ortho_init(self) -> Initializer:
        """A function that makes first values: see `numbsparse.nn.init.orthogonal`."""
        return self._initializer(init.orthogonal)

    def _initializer(self, make: Callable[..., BlockSparse], **how: float) -> Initializer:
        def initializer(shape: Any, dtype: Any = "float32", partition_info: Any = None) -> Any:
            if not isinstance(shape, list | tuple) or tuple(shape) != self.w_shape:
                raise ValueError(f"shape takes {self.w_shape}, got {shape!r}")
            return make(self._layout, self.bsize, dtype=dtype, **how).data

        return initializer

    def from_blocksparse(self, w: Any) -> np.ndarray:
        """A weight of this layout that openai/blocksparse trained, its blocks row by row.

        It has them in Morton's order with `z_order`, else column by column.
        """
        check_shape("w", w, self.w_shape)
        rows, columns = np.divmod(self._layout.flat_indices, self.KB)
        theirs: Any = columns * self.CB + rows
        if self.z_order:  # the bits of both take turns, a row's before a column's
            bits = range(max(self.CB, self.KB).bit_length())
            theirs = sum((rows >> b & 1) << 2 * b | (columns >> b & 1) << 2 * b + 1 for b in bits)
        return np.asarray(w)[np.argsort(np.argsort(theirs))]


def gated(values: Any, gate: Any, gate_grad: bool, dw_gated: bool) -> Any:
    """values * gate, of Tensors or of tensors of torch, with openai/blocksparse's gradients."""
    if gate is None:
        return values
    column = gate.reshape((-1, 1, 1))
    product = values * (column if gate_grad else column.detach())
    if gate_grad or dw_gated:
        return product
    if isinstance(values, Tensor):
        return record(product.data, (values, lambda dw, _: dw), reads=())
    return product.detach() + (values - values.detach()).nan_to_num()  # 0: gradient of values
