"""LSTM layers."""

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import float_dtype
from numbsparse.layout import Layout, as_layout
from numbsparse.nn import functional as F
from numbsparse.nn import init, recurrent
from numbsparse.nn.dropout import Dropout
from numbsparse.nn.linear import is_list_of_layouts, layout_for
from numbsparse.nn.module import MatrixParameter, Module, Parameter
from numbsparse.nn.recurrent import State, checked_state, checked_steps, layout_of_each, zeros
from numbsparse.patterns.checks import any_generator, flag, integer


class LSTM(Module):
    """Long short-term memory over a sequence, with block-sparse recurrent weights::

        i, f, g, o = the gates of x_t @ weight_ih + h_(t-1) @ weight_hh + bias
        c_t = sigmoid(f) * c_(t-1) + sigmoid(i) * tanh(g)
        h_t = sigmoid(o) * tanh(c_t)

    A layer is one operation over the sequence, `nn.functional.lstm`; its h is the x of the next.

    Parameters
    ----------
    input_size, hidden_size, num_layers : int
    layout : Layout or pattern, (hidden_blocks, hidden_blocks), optional
        Kept blocks of the recurrent weights, the same for the four gates; None keeps all. A list
        of them, one for each layer, where there are several layers.
    input_layout : Layout or pattern, (input_blocks, hidden_blocks), optional
        Kept blocks of the first layer's input weights, in the same way. A list gives those of the
        layers above too, which by default are those of their recurrent weights.
    block_size : int
    layer_norm : bool
        Whether the gates are normalised, each over the units, before gain and bias.
    update_dropout : float
        In training, the share of updates sigmoid(i) * tanh(g) that are left out of c, drawn
        again in each step; the others are scaled up.
    forget_bias : float
        First value of the forget gate's bias.
    dtype : float32 or float64 (float16 or bfloat16 on a GPU, with a float32 c)
    precision : "highest" or "high", optional
        Of its products, in training too: see `numbsparse.set_precision`.
    seed : int or numpy.random.Generator, optional

    Attributes
    ----------
    layers : list of LSTMLayer
        With Parameters weight_ih, weight_hh, bias, and gain with layer norm.

    Raises
    ------
    ValueError
        If a layout does not fit, or an x or state; a state of another dtype is a TypeError.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> lstm = ns.nn.LSTM(32, 256, layout=ns.patterns.watts_strogatz(8, 1, 0.2, seed=0), seed=0)
    >>> y, (h, c) = lstm(np.zeros((10, 4, 32), np.float32))
    >>> y.shape, h.shape
    ((10, 4, 256), (1, 4, 256))

    Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; the forget bias from Gers,
    Schmidhuber and Cummins, "Learning to Forget", 2000; layer norm and dropout of the update as in
    S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        layout: Any = None,
        input_layout: Any = None,
        block_size: int = 32,
        layer_norm: bool = False,
        update_dropout: float = 0.0,
        forget_bias: float = 1.0,
        dtype: Any = np.float32,
        precision: str | None = None,
        seed: Any = None,
    ):
        super().__init__()
        integer("num_layers", num_layers)
        recurrent.check(input_size, hidden_size, forget_bias, update_dropout=update_dropout)
        rng = any_generator(seed)
        takes = f"takes a layout for each of {num_layers} layers"
        between = layout_of_each(layout, num_layers, f"layout {takes}")
        if is_list_of_layouts(input_layout):
            inputs = layout_of_each(input_layout, num_layers, f"input_layout {takes}")
        else:
            inputs = [input_layout, *between[1:]]
        self.hidden_size = hidden_size
        how: Any = {"block_size": block_size, "forget_bias": forget_bias}
        how |= {"dtype": float_dtype(dtype), "precision": precision, "rng": rng}
        how["layer_norm"] = flag("layer_norm", layer_norm)
        self.layers = [
            LSTMLayer(
                hidden_size if i else input_size, hidden_size, layout=own, input_layout=below, **how
            )
            for i, (own, below) in enumerate(zip(between, inputs, strict=True))
        ]
        for layer in self.layers if update_dropout else ():
            layer.update_dropout = Dropout(update_dropout, seed=int(rng.integers(2**31)))

    def forward(self, x: Any, state: tuple[Any, Any] | None = None) -> tuple[Tensor, State]:
        """x (time, batch, input_size), state (h, c) -> y (time, batch, hidden_size), (h, c).

        `h` and `c` are (num_layers, batch, hidden_size), c float32 for 16-bit floats; without a
        state they begin as zeros. Truncated back-propagation continues from the detached state.
        """
        weight = self.layers[0].weight_ih
        x = checked_steps(x, weight.shape[0])
        state = self.zero_state(x.shape[1]) if state is None else state
        h, c = checked_state(x, state, (len(self.layers), x.shape[1], self.hidden_size), weight)
        if len(self.layers) == 1:  # a sixth of the time of a step of one row is in the general case
            x, *end = self.layers[0](x, *(F.reshape(a, a.shape[1:]) for a in (h, c)))
            h, c = (F.reshape(a, (1, *a.shape)) for a in end)
            return x, (h, c)
        last = []
        for layer, *begin in zip(self.layers, F.unbind(h), F.unbind(c), strict=True):
            x, *end = layer(x, *begin)
            last.append(end)
        h, c = (F.stack(parts) for parts in zip(*last, strict=True))
        return x, (h, c)

    def zero_state(self, batch: int) -> State:
        """(h, c) of zeros, where the weights are."""
        return zeros((len(self.layers), batch, self.hidden_size), self.layers[0].weight_hh)


class LSTMLayer(Module):
    """One layer of an LSTM.

    Attributes
    ----------
    weight_ih : Parameter of a BlockSparse, (input_size, 4 * width)
    weight_hh : Parameter of a BlockSparse, (hidden_size, 4 * width)
    bias : Parameter, (4 * width,)
    gain : Parameter, (4 * width,), or None without layer norm
        `width` is hidden_size up to a whole number of blocks. The columns are (blocks, 4, B): of
        each block of units B columns of the input gate, then of forget gate, candidate and output
        gate.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        layout: Any,
        input_layout: Any,
        block_size: int,
        layer_norm: bool,
        forget_bias: float,
        dtype: np.dtype,
        precision: str | None,
        rng: np.random.Generator,
    ):
        super().__init__()
        self.precision = ops.own_precision(precision)
        recurrent = layout_for(hidden_size, hidden_size, layout, block_size)
        inputs = layout_for(input_size, hidden_size, input_layout, block_size, "input_layout")
        blocks = recurrent.shape[1]

        def weight(features: int, one_gate: Layout) -> MatrixParameter:
            four_gates = as_layout(np.repeat(one_gate.pattern, ops.GATES, axis=1))
            shape = (features, blocks * ops.GATES * block_size)
            return MatrixParameter(
                init.uniform(four_gates, block_size, shape=shape, dtype=dtype, seed=rng)
            )

        self.weight_ih = weight(input_size, inputs)
        self.weight_hh = weight(hidden_size, recurrent)
        bias = np.zeros((blocks, ops.GATES, block_size), dtype)
        bias[:, 1] = forget_bias
        self.bias = Parameter(bias.reshape(-1))
        self.gain = Parameter(np.ones(bias.size, dtype)) if layer_norm else None
        self.update_dropout: Dropout | None = None

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (time, batch, input_size), h and c (batch, hidden_size) -> y, the last h and c."""
        dropout, shape = self.update_dropout, (*x.shape[:2], h.shape[1])
        kept = None if dropout is None else dropout.mask(shape, x)
        weights = self.weight_ih, self.weight_hh, self.bias
        how: Any = {"gain": self.gain, "kept": kept, "precision": self.precision}
        return F.lstm(x, *weights, h, c, **how)

    def _trained(self, parameter: Parameter) -> int:
        data, (units, columns) = parameter.data, self.weight_hh.shape
        of_columns = init.fan_in(data) if isinstance(data, BlockSparse) else np.ones(columns, int)
        gates = of_columns.reshape(-1, ops.GATES, self.weight_hh.data.block_size)
        return int(gates.swapaxes(0, 1).reshape(ops.GATES, -1)[:, :units].sum())

    def describe(self) -> str:
        return f"{self.weight_ih.shape[0]}, recurrent {self.weight_hh.data!r}"
