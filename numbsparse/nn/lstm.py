"""LSTM, written with the functions of this room."""

from __future__ import annotations

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.dtypes import as_dtype
from numbsparse.layout import Layout, as_layout
from numbsparse.nn import functional as F
from numbsparse.nn import init
from numbsparse.nn.linear import layout_for
from numbsparse.nn.module import Module, Parameter

GATES = 4  # input, forget, candidate, output: torch's order


class LSTM(Module):
    """Long short-term memory over a sequence, with block-sparse recurrent weights.

    i, f, g, o = split(x_t @ weight_ih + h_(t-1) @ weight_hh + bias)
    c_t = sigmoid(f) * c_(t-1) + sigmoid(i) * tanh(g)
    h_t = sigmoid(o) * tanh(c_t)

    Parameters
    ----------
    input_size, hidden_size : int
    layout : Layout or pattern, (hidden_blocks, hidden_blocks), optional
        Kept blocks of the recurrent weights, the same for the four gates; None keeps all.
    input_layout : Layout or pattern, (input_blocks, hidden_blocks), optional
        Kept blocks of the input weights, likewise.
    block_size : int
    forget_bias : float
        First value of the forget gate's bias.
    dtype : float32 or float64 (float16 or bfloat16 on a GPU)
    precision : "highest" or "high", optional
        Of its products, in training too: see `numbsparse.set_precision`.
    seed : int or numpy.random.Generator, optional

    Attributes
    ----------
    weight_ih : Parameter of a BlockSparse, (input_size, 4 * width)
    weight_hh : Parameter of a BlockSparse, (hidden_size, 4 * width)
    bias : Parameter, (4 * width,)
        `width` is hidden_size up to a whole number of blocks, so that each gate begins a block.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> lstm = ns.nn.LSTM(32, 256, layout=ns.patterns.watts_strogatz(8, 1, 0.2, seed=0), seed=0)
    >>> y, (h, c) = lstm(np.zeros((10, 4, 32), np.float32))
    >>> y.shape, h.shape
    ((10, 4, 256), (4, 256))

    Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; the forget bias from Gers,
    Schmidhuber and Cummins, "Learning to Forget", 2000.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        layout: Any = None,
        input_layout: Any = None,
        block_size: int = 32,
        forget_bias: float = 1.0,
        dtype: Any = np.float32,
        precision: str | None = None,
        seed: Any = None,
    ):
        super().__init__()
        rng, dtype = np.random.default_rng(seed), as_dtype(dtype)
        self.hidden_size = hidden_size
        self.precision = precision
        recurrent = layout_for(hidden_size, hidden_size, layout, block_size)
        inputs = layout_for(input_size, hidden_size, input_layout, block_size)
        width = recurrent.shape[1] * block_size

        def weight(features: int, one_gate: Layout) -> Parameter:
            four_gates = as_layout(np.tile(one_gate.pattern, (1, GATES)))
            shape = (features, GATES * width)
            return Parameter(
                init.uniform(four_gates, block_size, shape=shape, dtype=dtype, seed=rng)
            )

        self.weight_ih = weight(input_size, inputs)
        self.weight_hh = weight(hidden_size, recurrent)
        bias = np.zeros((GATES, width), dtype)
        bias[1] = forget_bias
        self.bias = Parameter(bias.reshape(-1))

    def forward(
        self, x: Any, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x (time, batch, input_size), state (h, c) -> y (time, batch, hidden_size), (h, c).

        `h` and `c` are (batch, hidden_size); without a state they begin as zeros.
        """
        x = x if isinstance(x, Tensor) else Tensor(x)
        if x.ndim != 3 or x.shape[2] != self.weight_ih.shape[0] or x.shape[0] == 0:
            raise ValueError(
                f"x takes the shape (time, batch, {self.weight_ih.shape[0]}), got {x.shape}"
            )
        h, c = self.zero_state(x.shape[1]) if state is None else state
        outputs = []
        from_inputs = F.linear(x, self.weight_ih, self.bias, precision=self.precision)
        for x_gates in F.unbind(from_inputs):
            h, c = self._step(x_gates, h, c)
            outputs.append(h)
        return F.stack(outputs), (h, c)

    def zero_state(self, batch: int) -> tuple[Tensor, Tensor]:
        """(h, c) of zeros, where the weights are."""
        shape, weight = (batch, self.hidden_size), self.weight_hh
        zeros = [Tensor(ops.zeros(shape, weight.dtype, weight.place)) for _ in "hc"]
        return zeros[0], zeros[1]

    def _step(self, x_gates: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        # gates (batch, 4 * width)
        gates = x_gates + F.matmul(h, self.weight_hh, precision=self.precision)
        i, f, g, o = (self._cut(gate) for gate in F.split(gates, GATES))
        c = F.sigmoid(f) * c + F.sigmoid(i) * F.tanh(g)
        return F.sigmoid(o) * F.tanh(c), c

    def _cut(self, gate: Tensor) -> Tensor:
        """A gate without the columns that fill its last block."""
        return gate if gate.shape[1] == self.hidden_size else gate[:, : self.hidden_size]

    def describe(self) -> str:
        return f"{self.weight_ih.shape[0]}, {self.hidden_size}, recurrent {self.weight_hh.data!r}"
