"""LSTM: torch.nn.LSTM with layouts, and the operators that it is made of."""

from math import prod
from typing import Any

import numpy as np
import torch
from torch.fx import Proxy

from numbsparse import ops
from numbsparse.dtypes import check_kind
from numbsparse.layout import Layout, as_layout
from numbsparse.nn.linear import layout_for
from numbsparse.nn.recurrent import layout_of_each
from numbsparse.patterns.checks import flag, integer, number
from numbsparse.torch import operators
from numbsparse.torch.dispatch import counted, is_odd, is_plain, operator
from numbsparse.torch.handles import layout_of
from numbsparse.torch.layer import SparseModule, beside_sharded, draw_
from numbsparse.torch.operators import array_of, check_dense, given_back, matrix

State = tuple[torch.Tensor, torch.Tensor]


def _forward(
    x: Any, weight_ih: Any, weight_hh: Any, bias: Any, h: Any, c: Any, *words: str
) -> tuple[torch.Tensor, ...]:
    layout_ih, layout_hh, precision = words
    columns = bias.shape[0]
    ih = matrix(weight_ih, layout_ih, x.shape[2], columns)
    hh = matrix(weight_hh, layout_hh, h.shape[1], columns)
    of = {"x": x, "bias": bias, "h": h, "c": c}
    x_, bias_, h_, c_ = (array_of(a, name) for name, a in of.items())
    trace = ops.lstm(x_, ops.LSTMCells(hh, bias_, ih, precision=precision), h_, c_)
    hs, cs, gates = (given_back(a, x) for a in (trace.h, trace.c, trace.gates))
    return hs[1:], cs[-1].clone(), hs, cs, gates


def _forward_apart(x: Any, *others: Any) -> tuple[torch.Tensor, ...]:
    y, *trace = _forward(x, *others)
    return y.clone(), *trace  # torch takes the results of its operators for memory of their own


def _forward_fake(
    x: Any, weight_ih: Any, weight_hh: Any, bias: Any, h: Any, c: Any, *words: str
) -> tuple[torch.Tensor, ...]:
    steps, (batch, units) = x.shape[0], h.shape
    return (
        x.new_empty(steps, batch, units),
        c.new_empty(batch, units),
        x.new_empty(steps + 1, batch, units),
        c.new_empty(steps + 1, batch, units),
        x.new_empty(steps, batch, bias.shape[0]),
    )


def _forward_save(ctx: Any, tensors: Any, words: Any, output: Any) -> None:
    x, weight_ih, weight_hh, bias, *_ = tensors
    _, _, *trace = output
    ctx.save_for_backward(x, weight_ih, weight_hh, bias, *trace)
    ctx.mark_non_differentiable(*trace)
    ctx.set_materialize_grads(False)  # of the trace, which is long
    ctx.words, ctx.layouts = words, (layout_of(words[0]), layout_of(words[1]))


def _forward_backward(ctx: Any, dy: Any, dc: Any, *of_trace: Any) -> tuple[Any, ...]:
    x, weight_ih, weight_hh, bias, hs, cs, gates = ctx.saved_tensors
    layout_ih, layout_hh, precision = ctx.words
    dy = torch.zeros_like(hs[1:]) if dy is None else dy
    dc = torch.zeros_like(cs[0]) if dc is None else dc
    of = gates, hs, cs, weight_hh, bias, dy, dc, x, weight_ih
    dgates, dc0, dbias = lstm_grad(of, (layout_hh, precision))
    columns, size, needs = bias.shape[0], weight_hh.shape[1], ctx.needs_input_grad
    of_ih = (layout_ih, x.shape[2], columns, size, precision)
    of_hh = (layout_hh, hs.shape[2], columns, size, precision)
    dx = _back(dgates, weight_ih, of_ih, hs.shape[2]) if needs[0] else None
    dhh = operators.sddmm((hs[:-1], dgates), of_hh) if needs[2] else None
    dih = _later(ctx, weight_ih, lambda: operators.sddmm((x, dgates), of_ih)) if needs[1] else None
    dh = _back(dgates[0], weight_hh, of_hh, hs.shape[2]) if needs[4] else None
    return dx, dih, dhh, dbias, dh, dc0, None


def _back(dgates: Any, w: Any, how: Any, units: int) -> Any:
    """dgates @ w.T; what w holds beyond the last unit does not count, be it NaN."""
    w = without_padding((w,), (*how[:3], units)) if units % how[3] else w
    return operators.transposed((dgates, w), how)


class _Later(torch.autograd.Function):
    """w; its gradient is computed when torch comes to it, after gradients of others were ready.

    So DDP sums that of weight_hh, the largest, while that of weight_ih is computed.
    """

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        ctx.compute = None
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, dw: torch.Tensor) -> torch.Tensor:
        compute, ctx.compute = ctx.compute, None
        return compute() if compute else dw


def _later(ctx: Any, w: torch.Tensor, compute: Any) -> torch.Tensor:
    """The gradient of w, input 1, or what stands for it where w came by `_Later`."""
    (node, _) = getattr(ctx, "next_functions", [(None, 0)] * 2)[1]
    if getattr(node, "_forward_cls", None) is not _Later:
        return compute()
    node.compute = compute
    return w.new_zeros(()).expand_as(w)  # numbers, as torch.autograd.detect_anomaly looks at them


def _grad(
    gates: Any, hs: Any, cs: Any, weight_hh: Any, bias: Any, dy: Any, dc: Any, *others: Any
) -> tuple[torch.Tensor, ...]:
    _, _, layout_hh, precision = others  # torch's tape alone asks for what gates are made of
    w = matrix(weight_hh, layout_hh, hs.shape[2], bias.shape[0])
    of = gates, hs, cs, bias, dy.contiguous(), dc
    *trace, bias, dy, dc = (array_of(a, "dy") for a in of)
    cells = ops.LSTMCells(w, bias, precision=precision)
    # torch may ask for the gradient once more.
    grads = ops.lstm_grad(ops.LSTMTrace(*trace), cells, dy, None, dc, in_place=False)
    return tuple(given_back(a, gates) for a in (grads.gates, grads.c, grads.bias))


def _grad_backward(ctx: Any, *of: Any) -> Any:
    raise RuntimeError("the gradient of an LSTM is not differentiable again")


lstm = operator(
    "lstm(Tensor x, Tensor weight_ih, Tensor weight_hh, Tensor bias, Tensor h, Tensor c, "
    "str layout_ih, str layout_hh, str precision) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    registered=_forward_apart,
    save=_forward_save,
    backward=_forward_backward,
    tensors=6,
    wide=(5,),
    half_on_cpu=False,
)
lstm_grad = operator(
    "lstm_grad(Tensor gates, Tensor hs, Tensor cs, Tensor weight_hh, Tensor bias, Tensor dy, "
    "Tensor dc, Tensor x, Tensor weight_ih, str layout_hh, str precision) -> "
    "(Tensor, Tensor, Tensor)",
    _grad,
    lambda gates, hs, cs, w, bias, dy, dc, *_: tuple(map(torch.empty_like, (gates, dc, bias))),
    save=lambda ctx, *of: None,
    backward=_grad_backward,
    tensors=9,
    wide=(2, 6),
    half_on_cpu=False,
)


without_padding = operator(
    "lstm_without_padding(Tensor w, str layout, int rows, int columns, int units) -> Tensor",
    lambda w, *how: given_back(ops.without_padding(matrix(w, *how[:3]), how[3]).values, w),
    lambda w, *_: torch.empty_like(w),
    save=lambda ctx, *of: None,
    backward=_grad_backward,
    tensors=1,
    half_on_cpu=False,
)


def _operations(rows: tuple[int, ...], *weights: tuple[int, ...]) -> int:
    return 2 * prod(rows[:2]) * sum(map(prod, weights))


counted("lstm", lambda x, ih, hh, *of, out_shape: _operations(x, ih, hh))
counted("lstm_grad", lambda gates, hs, cs, hh, *of, out_shape: _operations(gates, hh))


class LSTM(SparseModule):
    """torch.nn.LSTM with block-sparse weights; one operator over the whole sequence.

    i, f, g, o = the gates of x_t @ weight_ih + h_(t-1) @ weight_hh + bias
    c_t = sigmoid(f) * c_(t-1) + sigmoid(i) * tanh(g)
    h_t = sigmoid(o) * tanh(c_t)

    Parameters
    ----------
    input_size, hidden_size, num_layers, batch_first, dropout, device, dtype : as in torch.nn.LSTM
    bias : only True; bidirectional : only False; proj_size : only 0
    layout : Layout or pattern, (hidden_blocks, hidden_blocks), optional
        Kept blocks of the recurrent weights, the same for the four gates; None keeps all. A list of
        them, one for each layer, where there are several layers.
    input_layout : Layout or pattern, (input_blocks, hidden_blocks), optional
        Kept blocks of the first layer's input weights, likewise; layers above have their recurrent
        weights' layout.
    block_size : int
    precision : "highest" or "high", optional

    Attributes
    ----------
    weight_ih_l0, weight_hh_l0, ... : Parameters, (n_blocks, B, B)
    bias_l0, ... : Parameters, (4 * width,)
        Of `width`, the units up to a whole number of blocks, columns are (blocks, 4, B): of each
        block of units B columns of the gates i, f, g and o. torch's two biases are one.

    Raises TypeError or ValueError that names the argument. Its gradient is not differentiable
    again. On the CPU it computes in float32 or float64, under autocast too.

    Examples
    --------
    >>> import torch, numbsparse as ns, numbsparse.torch as nst
    >>> lstm = nst.LSTM(32, 256, layout=ns.patterns.watts_strogatz(8, 1, 0.2, seed=0))
    >>> y, (h, c) = lstm(torch.zeros(10, 4, 32))
    >>> y.shape, h.shape
    (torch.Size([10, 4, 256]), torch.Size([1, 4, 256]))

    Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
        *,
        layout: Any = None,
        input_layout: Any = None,
        block_size: int = 32,
        precision: str | None = None,
    ) -> None:
        super().__init__(block_size, precision)
        for name, got, takes in (
            ("bias", flag("bias", bias), True),
            ("bidirectional", flag("bidirectional", bidirectional), False),
            ("proj_size", integer("proj_size", proj_size, least=0), 0),
        ):
            if got != takes:
                raise ValueError(f"{name} takes only {takes}, got {got}")
        number("dropout", dropout, most=1)
        self.input_size = integer("input_size", input_size)
        self.hidden_size = integer("hidden_size", hidden_size)
        self.num_layers = integer("num_layers", num_layers)
        self.batch_first, self.dropout = flag("batch_first", batch_first), dropout
        fitting = f"layout takes one for each of {num_layers} layers"
        for i, recurrent in enumerate(layout_of_each(layout, num_layers, fitting)):
            inputs, of_inputs = (hidden_size, recurrent) if i else (input_size, input_layout)
            for name, rows, kept in (("ih", inputs, of_inputs), ("hh", hidden_size, recurrent)):
                called = "layout" if kept is recurrent else "input_layout"
                one_gate = layout_for(rows, hidden_size, kept, block_size, called)
                four_gates = as_layout(np.repeat(one_gate.pattern, ops.GATES, axis=1))
                self.hold(f"weight_{name}_l{i}", four_gates, device, dtype)
            width = four_gates.shape[1] * block_size
            bias_of = torch.nn.Parameter(torch.empty(width, device=device, dtype=dtype))
            setattr(self, f"bias_l{i}", bias_of)
        self.reset_parameters()

    def shape_of(self, name: str) -> tuple[int, int]:
        rows = self.input_size if name == "weight_ih_l0" else self.hidden_size
        return rows, self.handles[name].layout.shape[1] * self.block_size

    def reset_parameters(self) -> None:
        """Draw weights anew, uniformly within 1 / sqrt(fan-in); biases are 0, the forget gate's 1.

        The forget bias is that of Gers, Schmidhuber and Cummins, "Learning to Forget", 2000.
        """
        for i in range(self.num_layers):
            rows = {"ih": self.hidden_size if i else self.input_size, "hh": self.hidden_size}
            for name, features in rows.items():
                of = f"weight_{name}_l{i}"
                layout: Layout = self.handles[of].layout
                draw_(getattr(self, of), None, layout, (features, 0))
            bias = getattr(self, f"bias_l{i}")
            with torch.no_grad(), beside_sharded(bias):
                places = torch.arange(bias.shape[0], device=bias.device)
                bias.copy_(places // self.block_size % ops.GATES == 1)

    def forward(self, x: torch.Tensor, state: State | None = None) -> tuple[torch.Tensor, State]:
        """x (time, batch, input_size), or (batch, time, input_size) with batch_first, and state
        (h, c) (num_layers, batch, hidden_size) -> y (time, batch, hidden_size), (h, c).
        """
        if isinstance(x, Proxy):
            return self.in_graph(x, state)  # type: ignore[no-any-return]
        check_dense("x", x)
        if x.dim() != 3 or x.shape[-1] != self.input_size:
            axes = "batch, time" if self.batch_first else "time, batch"
            raise ValueError(f"x takes the shape ({axes}, {self.input_size}), got {tuple(x.shape)}")
        x = x.transpose(0, 1) if self.batch_first else x
        if state is None:
            zeros = x.new_zeros(self.num_layers, x.shape[1], self.hidden_size)
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            state = zeros, zeros.to(wide)
        check_kind("state", state, tuple | list, "(h, c)")
        for name, part in zip("hc", state, strict=False):
            check_dense(name, part)
        takes = (self.num_layers, x.shape[1], self.hidden_size)
        if (got := [tuple(getattr(a, "shape", ())) for a in state]) != [takes, takes]:
            raise ValueError(f"state takes h and c of the shape {takes}, got {got}")
        precision, ends = ops.checked_precision(self.precision), []
        for i in range(self.num_layers):
            names = f"weight_ih_l{i}", f"weight_hh_l{i}"
            weights = [getattr(self, name) for name in (*names, f"bias_l{i}")]
            if torch.is_grad_enabled() and not is_odd() and is_plain(weights):
                weights[0] = _Later.apply(weights[0])
            how = (*(self.handles[name].word for name in names), precision)
            x, c, *_ = lstm((x.contiguous(), *weights, state[0][i], state[1][i]), how)
            ends.append((x[-1], c))
            if self.dropout and i + 1 < self.num_layers:
                x = torch.nn.functional.dropout(x, self.dropout, self.training)
        h, c = (torch.stack(parts) for parts in zip(*ends, strict=True))
        return x.transpose(0, 1) if self.batch_first else x, (h, c)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}, " + ", ".join(
            f"{name}={handle.layout}" for name, handle in self.handles.items()
        )
