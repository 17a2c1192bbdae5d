"""Linear: a sparse one is a Linear with a layout."""

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import float_dtype
from numbsparse.layout import Layout, as_layout
from numbsparse.nn import functional, init
from numbsparse.nn.module import MatrixParameter, Module, Parameter
from numbsparse.patterns.checks import any_generator, check_block_size, flag, integer


class Linear(Module):
    """y = x @ weight + bias, or x @ (gate * weight) + bias with a number for each block.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    layout : Layout or pattern, (in_blocks, out_blocks), optional
        Which blocks of the weight are kept; None keeps all.
    block_size : int
        Features that are not multiples of it are allowed.
    dtype : float32 or float64 (float16 or bfloat16 on a GPU)
    precision : "highest" or "high", optional
        Of its three products, in training too: see `numbsparse.set_precision`.
    gate : bool
        Whether each block of the weight has a trained gate, at first one: see `numbsparse.matmul`.
    seed : int or numpy.random.Generator, optional

    Attributes
    ----------
    weight : Parameter of a BlockSparse, (in_features, out_features)
        Drawn uniformly within 1 / sqrt(fan-in), as in torch; the fan-in counts kept blocks only.
    bias : Parameter, (out_features,), or None
    gate : Parameter of a BlockSparse of 1 x 1 blocks, in the layout of the weight, or None
        Of float32 with 16-bit floats. Pruning and an optimizer's `remap` keep it with its blocks.
        In its place may be a Module whose call gives one: see `nn.utils.HardConcrete`.

    Raises
    ------
    ValueError
        If `layout` does not fit the features.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse import nn
    >>> dense = nn.Linear(1024, 256, seed=0)
    >>> sparse = nn.Linear(1024, 256, layout=ns.patterns.random(32, 8, 0.1, seed=0), seed=0)
    >>> sparse(np.ones((5, 1024), np.float32)).shape
    (5, 256)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        layout: Any = None,
        block_size: int = 32,
        dtype: Any = np.float32,
        precision: str | None = None,
        gate: bool = False,
        seed: Any = None,
    ):
        super().__init__()
        rng = any_generator(seed)
        self.precision = ops.own_precision(precision)
        layout = layout_for(in_features, out_features, layout, block_size)
        dtype, shape = float_dtype(dtype), (in_features, out_features)
        weight = init.uniform(layout, block_size, shape=shape, dtype=dtype, seed=rng)
        self.weight = MatrixParameter(weight)
        self.bias = None
        if flag("bias", bias):
            bound = 1 / np.sqrt(np.maximum(init.fan_in(self.weight.data), 1))
            self.bias = Parameter((rng.uniform(-1, 1, out_features) * bound).astype(dtype))
        self.gate: Any = Parameter(ones_for(self.weight.data)) if flag("gate", gate) else None

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        gate = self.gate() if isinstance(self.gate, Module) else self.gate
        return functional.linear(x, self.weight, self.bias, gate=gate, precision=self.precision)

    def describe(self) -> str:
        gated = ", gate=True" * isinstance(self.gate, Parameter)
        return f"{self.weight.data!r}, bias={self.bias is not None}{gated}"


def ones_for(weight: BlockSparse, value: float = 1.0) -> BlockSparse:
    """A gate of each block of a weight, all of one value, beside it."""
    numbers = np.full((weight.n_blocks, 1, 1), value, ops.state_dtype(weight.dtype))
    like = BlockSparse(numbers, weight.stored_layout)
    return (like.T if weight.is_transposed else like).to(weight.device)


def layout_for(
    in_features: int, out_features: int, layout: Any, block_size: int, argument: str = "layout"
) -> Layout:
    """The given layout, checked against the features; the dense one for None."""
    sizes = integer("in_features", in_features), integer("out_features", out_features)
    size = check_block_size(block_size)
    rows, columns = grid = tuple(-(-n // size) for n in sizes)
    kept = np.ones(grid, dtype=bool) if layout is None else layout
    layout = as_layout(kept, argument).to_host()
    if layout.shape != grid:
        raise ValueError(
            f"{argument} takes {rows} x {columns} blocks for {in_features} x {out_features} "
            f"features in blocks of {block_size}, got {layout.shape[0]} x {layout.shape[1]}"
        )
    return layout


def is_list_of_layouts(layout: Any) -> bool:
    """Whether it is a list of layouts, and not a pattern written as one."""
    return isinstance(layout, list | tuple) and any(
        item is None or isinstance(item, Layout) or np.ndim(item) == 2 for item in layout
    )
