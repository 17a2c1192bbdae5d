"""MultiplicativeLSTM: a small-world cell with several internal steps."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import check_kind, float_dtype
from numbsparse.layout import Layout, as_layout
from numbsparse.nn import functional as F
from numbsparse.nn import init, recurrent
from numbsparse.nn.dropout import Dropout
from numbsparse.nn.linear import layout_for
from numbsparse.nn.module import MatrixParameter, Module, Parameter
from numbsparse.nn.recurrent import State, checked_state, checked_steps, layout_of_each, zeros
from numbsparse.patterns.checks import any_generator, check_block_size, integer, number


class MultiplicativeLSTM(Module):
    """A multiplicative LSTM whose state goes through several block-sparse layers in each time step.

    With N a layer normalization (gain and bias of its own) and W_j kept by layouts of their own::

        m, a = N(x_t @ W_m), N(x_t @ W_a)                    for all t at once
        s_0 = N(h_(t-1) @ W_0) * m
        s_1 = relu(N(s_0 @ W_1) + a)
        s_j = relu(N(s_(j-1) @ W_j))                         for 2 <= j < internal_steps
        i, f, g, o = N(s @ W_i), N(s @ W_f), N(s @ W_g), N(s @ W_o)
        c_t = sigmoid(f) * c_(t-1) + sigmoid(i) * dropout(tanh(g))
        h_t = sigmoid(o) * tanh(c_t)

    With small-world layouts, a few internal steps connect every unit with every other before the
    gates: see `ns.patterns.mixing_steps`. The paper needs two, and gains little after four.

    Parameters
    ----------
    input_size, hidden_size : int
    internal_steps : int, at least 2
    layout : optional
        Of the weights W_0, W_1, ... and, last, of the gates, which share one: a list of
        internal_steps + 1 layouts or patterns, (hidden_blocks, hidden_blocks); or a function that
        gives the pattern of step 0, 1, ..., internal_steps; or one for all. None keeps all blocks.
    input_layout : Layout or pattern, (input_blocks, hidden_blocks), optional
        Of W_m and W_a.
    block_size : int
    dropout : float, from 0 to below 1
        In training, how many of the updates tanh(g) are left out, drawn again in each time step.
    forget_bias : float
        First value of the bias of f.
    eps : float
        Of the normalizations.
    dtype : float32 or float64 (float16 or bfloat16 on a GPU, with a float32 c)
    precision : "highest" or "high", optional
    seed : int or numpy.random.Generator, optional

    Attributes
    ----------
    multiplier, addend : NormalizedProduct, (input_size, hidden_size), drawn uniformly
    internal : list of NormalizedProduct, (hidden_size, hidden_size)
    gates : NormalizedProduct, (hidden_size, 4 * width)
        `width` is hidden_size up to a whole number of blocks. The recurrent weights begin as the
        identity, where their layouts keep the diagonal.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> small_world = lambda step: ns.patterns.watts_strogatz(8, 1, 0.2, seed=step)
    >>> cell = ns.nn.MultiplicativeLSTM(32, 256, internal_steps=3, layout=small_world, seed=0)
    >>> y, (h, c) = cell(np.ones((10, 4, 32), np.float32))
    >>> y.shape, h.shape, len(cell.internal)
    ((10, 4, 256), (4, 256), 3)

    S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017, algorithm 1;
    after Krause, Lu, Murray and Renals, "Multiplicative LSTM for sequence modelling", 2016.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        internal_steps: int = 5,
        layout: Any = None,
        input_layout: Any = None,
        block_size: int = 32,
        dropout: float = 0.0,
        forget_bias: float = 1.0,
        eps: float = 1e-5,
        dtype: Any = np.float32,
        precision: str | None = None,
        seed: Any = None,
    ):
        super().__init__()
        integer("internal_steps", internal_steps, least=2)
        recurrent.check(input_size, hidden_size, forget_bias, dropout=dropout)
        rng, dtype = any_generator(seed), float_dtype(dtype)
        n = internal_steps + 1
        takes = f"layout takes {n} layouts, one for each internal step and one for the gates"
        made = [layout(i) for i in range(n)] if callable(layout) else layout
        *internal, gates = (
            layout_for(hidden_size, hidden_size, each, block_size)
            for each in layout_of_each(made, n, takes)
        )
        inputs = layout_for(input_size, hidden_size, input_layout, block_size, "input_layout")
        self.input_size, self.hidden_size = input_size, hidden_size
        how: Any = {"eps": eps, "precision": precision}

        def from_inputs() -> NormalizedProduct:
            size: Any = {"shape": (input_size, hidden_size), "dtype": dtype}
            return NormalizedProduct(init.uniform(inputs, block_size, **size, seed=rng), **how)

        def from_state(kept: Layout, out_features: int, **more: Any) -> NormalizedProduct:
            size: Any = {"shape": (hidden_size, out_features), "dtype": dtype}
            w = init.identity(kept, block_size, **size)
            return NormalizedProduct(w, **more, **how)

        self.multiplier, self.addend = from_inputs(), from_inputs()
        self.internal = [from_state(kept, hidden_size) for kept in internal]
        four = as_layout(np.tile(gates.pattern, (1, ops.GATES)))
        width = four.shape[1] * block_size
        self.gates = from_state(four, width, features=hidden_size, groups=ops.GATES)
        self.gates.bias.values[1] = forget_bias
        self.dropout = Dropout(dropout, seed=int(rng.integers(2**31)))

    def forward(self, x: Any, state: tuple[Any, Any] | None = None) -> tuple[Tensor, State]:
        """x (time, batch, input_size), state (h, c) -> y (time, batch, hidden_size), (h, c).

        `h` and `c` are (batch, hidden_size); without a state they begin as zeros.

        Raises ValueError for other shapes and places, TypeError for other dtypes.
        """
        x, gain = checked_steps(x, self.input_size), self.gates.gain
        state = self.zero_state(x.shape[1]) if state is None else state
        h, c = checked_state(x, state, (x.shape[1], self.hidden_size), gain)
        rows = F.reshape(x, (-1, self.input_size))
        of_inputs = (
            F.unbind(F.reshape(side.in_a_loop()(rows), (*x.shape[:2], self.hidden_size)))
            for side in (self.multiplier, self.addend)
        )
        kept = self.dropout.mask((*x.shape[:2], self.hidden_size), x)
        *internal, gates = (part.in_a_loop(len(x)) for part in (*self.internal, self.gates))
        cell = F.repeated_cell(calls=len(x))
        outputs = []
        for t, (m, a) in enumerate(zip(*of_inputs, strict=True)):
            h = internal[0](h, "times", m)
            h = internal[1](h, "plus_relu", a)
            for step in internal[2:]:
                h = step(h, "relu")
            h, c = cell(gates(h), c, None if kept is None else kept[t])
            outputs.append(h)
        return F.stack(outputs), (h, c)

    def zero_state(self, batch: int) -> State:
        """(h, c) of zeros, where the weights are."""
        return zeros((batch, self.hidden_size), self.gates.gain)

    def describe(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, internal_steps={len(self.internal)}"


class NormalizedProduct(Module):
    """N(x @ weight): a block-sparse product, normalised over the features of each of its groups.

    (z - mean) / sqrt(variance + eps) * gain + bias, where z is x @ weight, (batch, features) or
    (batch, groups, features).

    Parameters
    ----------
    weight : BlockSparse, (in_features, features), or (in_features, groups * width)
    features : int, optional
        Of each group: `width` is that up to a whole number of blocks. Default: of `weight`.
    groups : int
    eps : float
    precision : "highest" or "high", optional

    Attributes
    ----------
    weight : Parameter of a BlockSparse
    gain, bias : Parameter, (features,) or (groups, features), of ones and of zeros

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> product = ns.nn.NormalizedProduct(ns.nn.init.uniform([[1, 0], [1, 1]], 4, seed=0))
    >>> z = product(ns.Tensor(np.arange(8, dtype=np.float32)[None]))
    >>> z.shape, abs(float(z.numpy().mean())) < 1e-6
    ((1, 8), True)
    """

    def __init__(
        self,
        weight: BlockSparse,
        *,
        features: int | None = None,
        groups: int = 1,
        eps: float = 1e-5,
        precision: str | None = None,
    ):
        super().__init__()
        eps = number("eps", eps)
        check_kind("weight", weight, BlockSparse, "a BlockSparse")
        self.weight = MatrixParameter(weight)
        check_block_size(weight.block_size)
        features = weight.shape[1] if features is None else integer("features", features)
        shape = (features,) if integer("groups", groups) == 1 else (groups, features)
        self.eps, self.precision = eps, ops.own_precision(precision)
        self.gain = Parameter(np.ones(shape, weight.dtype))
        self.bias = Parameter(np.zeros(shape, weight.dtype))

    def forward(self, x: Any) -> Tensor:
        return self.in_a_loop()(as_tensor(x))

    def in_a_loop(self, calls: int = 1) -> Callable[..., Tensor]:
        """This layer as a function for the steps of a loop: gradients are summed once, at its end.

        `calls` says how many steps to expect. The function takes (x, kind, other), the last two as
        that of `functional.repeated_norm` does.
        """
        product = F.repeated_product(self.weight, precision=self.precision, calls=calls)
        norm = F.repeated_norm(self.gain, self.bias, self.eps, calls=calls)
        width = self.weight.shape[1] // (self.gain.shape[0] if self.gain.ndim == 2 else 1)

        def layer(x: Tensor, *how: Any) -> Tensor:
            z = product(x)
            if self.gain.ndim == 2:
                z = F.reshape(z, (x.shape[0], self.gain.shape[0], width))
                if width != self.gain.shape[1]:
                    z = z[:, :, : self.gain.shape[1]]
            return norm(z, *how)

        return layer

    def _trained(self, parameter: Parameter) -> int:
        if not isinstance(parameter.data, BlockSparse):
            return parameter.size
        groups = self.gain.shape[0] if self.gain.ndim == 2 else 1
        of_columns = init.fan_in(parameter.data).reshape(groups, -1)
        return int(of_columns[:, : self.gain.shape[-1]].sum())

    def describe(self) -> str:
        return f"{self.weight.data!r}"
