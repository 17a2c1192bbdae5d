"""The LSTM as one function of a whole sequence, and step by step as the textbooks have it."""

from typing import Any

from numbsparse import ops
from numbsparse.autograd import (
    Tensor,
    as_tensor,
    differentiable_grads,
    record,
    refuse_again,
    unchanged,
)
from numbsparse.autograd.reducers import reducers
from numbsparse.nn.functional.arithmetic import add, data_of
from numbsparse.nn.functional.cell import cell_of_gates
from numbsparse.nn.functional.joint import jointly, results_of
from numbsparse.nn.functional.layers import inner_product, layer_norm
from numbsparse.nn.functional.products import matmul
from numbsparse.nn.functional.shape import reshape, stack, unbind

Sequence = tuple[Tensor, Tensor, Tensor]
# Of a gradient that ranks sum while it is computed: a small part at last, as less hides that.
SHARES = (0.5, 0.3, 0.2)


def lstm(
    x: Any,
    weight_ih: Any,
    weight_hh: Any,
    bias: Any,
    h: Any,
    c: Any,
    *,
    gain: Any = None,
    eps: float = 1e-5,
    kept: Any = None,
    precision: str | None = None,
    exchange: Any = None,
) -> Sequence:
    """One layer of LSTM cells over a sequence::

        i, f, g, o = the gates of z_t = x_t @ weight_ih + h_(t-1) @ weight_hh + bias
        c_t = sigmoid(f) * c_(t-1) + sigmoid(i) * tanh(g) * kept_t
        h_t = sigmoid(o) * tanh(c_t)

    One operation, forward and backward: the products of the inputs, and the gradients of weights
    and inputs, are each one product for all steps; in between, a step is one product and one
    kernel. The columns of both weights, bias and gain are (blocks, 4, B) in C order, with i, f, g
    and o of the B units of a block along the second axis.

    Without layer norm the gradients of the gates overwrite the gates. So a second `backward` over
    the same results repeats the forward pass; inputs and weights must not be changed before it.

    A NaN or infinity stays within its sequence. On Hopper, where blocks of 8 and 16 run all steps
    in one kernel, a step takes it to more units than blocks say, as 0 times NaN is NaN: with a
    twentieth of the blocks of 8 kept to 0.33 of the units, in float32 0.18.

    Parameters
    ----------
    x : Tensor or array, (time, batch, input_size), of one step at least
        float32 or float64 on the CPU; float16, bfloat16 or float32 on a GPU. All others are there
        too and have its dtype, but for c.
    weight_ih, weight_hh : Tensor of a BlockSparse, (input_size, 4 * width), (units, 4 * width)
        `width` is the units up to a whole number of blocks.
    bias : Tensor or array, (4 * width,)
    h, c : Tensor or array, (batch, units)
        The state before the first step. c and its gradient are float32 for 16-bit floats.
    gain : Tensor or array, (4 * width,), optional
        Layer norm of the gates: z_t = n_t * gain + bias, where n_t is the sum of both products,
        normalised over the units of each gate by itself.
    eps : float, of layer norm
    kept : array, (time, batch, units), optional
        Factors of the update, as `dropout_mask` gives them.
    precision : str, optional, as in `matmul`
    exchange : optional
        What `numbsparse.distributed.SplitLSTM` computes a part of the units with.

    Returns
    -------
    y : Tensor, (time, batch, units), h_t of each step
    h, c : Tensor, (batch, units), the state after the last step

    Raises
    ------
    TypeError, ValueError
        Where shapes, dtypes or places do not fit; by name, before anything runs.

    Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; layer norm after Ba, Kiros and
    Hinton, "Layer Normalization", 2016; dropout of the update after Semeniuta, Severyn and Barth,
    "Recurrent Dropout without Memory Loss", 2016.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> weight = ns.BlockSparse(np.zeros((4, 4, 4), np.float32), np.ones((1, 4)))  # of 4 units
    >>> x, state = np.ones((3, 2, 4), np.float32), np.ones((2, 4), np.float32)
    >>> bias = np.zeros(16, np.float32)
    >>> y, h, c = ns.nn.functional.lstm(x, weight, weight, bias, state, state)
    >>> y.shape, c.numpy()[0]  # half of c is forgotten in each of three steps
    ((3, 2, 4), array([0.125, 0.125, 0.125, 0.125], dtype=float32))
    """
    inputs = _as_tensors(x, weight_ih, weight_hh, bias, h, c, gain)
    how: Any = {"eps": eps, "kept": data_of(kept), "precision": ops.checked_precision(precision)}
    backward = _LSTM(inputs, how, exchange)
    (trace,) = backward.unused
    y, *last = trace.h[1:], ops.copy(trace.h[-1]), ops.copy(trace.c[-1])
    in_order = [inputs[i] for i in backward.order]
    hidden = record(y, *jointly(backward.once, *in_order, again=backward.again), held=backward.kept)
    y, h, c = results_of(hidden, (y, *last), "lstm")
    return y, h, c


def lstm_step_by_step(
    x: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias: Tensor,
    h: Tensor,
    c: Tensor,
    gain: Tensor | None = None,
    *,
    eps: float = 1e-5,
    kept: Any = None,
    precision: str | None = None,
) -> Sequence:
    """`lstm` made of other functions, a step after the other: its arguments and results.

    It is slow, and can be differentiated again: what `lstm` is compared with, and what it becomes
    with create_graph. Raises TypeError and ValueError as `lstm` does.
    """
    inputs = _as_tensors(x, weight_ih, weight_hh, bias, h, c, gain)
    cells = _cells(inputs, eps=eps, kept=data_of(kept), precision=ops.checked_precision(precision))
    x, weight_ih, weight_hh, bias, h, c = inputs[:6]
    ops.check_lstm(x.data, cells, h.data, c.data)
    outputs, B = [], weight_hh.matrix.block_size
    weight_ih, weight_hh = (_without_padding(w, h.shape[1]) for w in (weight_ih, weight_hh))
    from_inputs = matmul(x, weight_ih, precision=precision)
    for t, x_part in enumerate(unbind(from_inputs)):
        z = add(x_part, matmul(h, weight_hh, precision=precision))
        gates = _gates(z if gain is not None else add(z, bias), B, h.shape[1])
        if gain is not None:
            gains, biases = (_gates(a, B, h.shape[1]) for a in (gain, bias))
            gates = [layer_norm(*of_one, eps) for of_one in zip(gates, gains, biases, strict=True)]
        h, c = cell_of_gates(gates, c, None if kept is None else kept[t], h.dtype)
        outputs.append(h)
    return stack(outputs), h, c


def _as_tensors(*operands: Any) -> list[Tensor]:
    """Those of `lstm`, the gain only where there is one."""
    names = ("x", "weight_ih", "weight_hh", "bias", "h", "c", "gain")
    given = zip(names, operands, strict=True)
    return [as_tensor(a, name) for name, a in given if name != "gain" or a is not None]


def _cells(inputs: list[Tensor], **how: Any) -> Any:
    """What they compute with, as `ops.lstm` takes it."""
    _, ih, hh, bias, _, _, *gain = (a.data for a in inputs)
    return ops.LSTMCells(hh, bias, ih, gain=gain[0] if gain else None, **how)  # type: ignore[arg-type]


def _without_padding(w: Tensor, units: int) -> Tensor:
    inside = ops.without_padding(w.matrix, units)
    return record(inside, (w, lambda dv, v: _without_padding(dv, units)), reads=())


def _gates(z: Tensor, block_size: int, units: int) -> list[Tensor]:
    """(..., 4 * width) as four gates (..., units)."""
    *rows, columns = z.shape
    blocks = reshape(z, (*rows, columns // (ops.GATES * block_size), ops.GATES, block_size))
    parts = [reshape(gate, (*rows, columns // ops.GATES)) for gate in unbind(blocks, -2)]
    return [gate if gate.shape[-1] == units else gate[..., :units] for gate in parts]


class _LSTM:
    """The way back from the three results to each input, of which the time loop runs once."""

    def __init__(self, inputs: list[Tensor], how: Any, exchange: Any):
        self.inputs, self.how, self.exchange = inputs, how, exchange
        self.kept = [] if how["kept"] is None else [Tensor(how["kept"])]
        # The gradient of weight_hh, the largest, is the first: to reduce it over several cards
        # takes the longest. Those that are there by then follow, and at last what is still a
        # product.
        self.order = [i for i in (2, 3, 5, 6, 0, 1, 4) if i < len(inputs)]
        self.unused = [self.forward()]  # of which one backward, and one thread, takes what is there

    def cells(self) -> Any:
        """As they are now."""
        return _cells(self.inputs, exchange=self.exchange, **self.how)

    def forward(self) -> Any:
        x, h, c = (self.inputs[i].data for i in (0, 4, 5))
        return ops.lstm(x, self.cells(), h, c)

    def once(self, pieces: Any, y: Tensor) -> list[Any]:
        """The fused gradients, each a function that gives it."""
        unchanged(y, *self.kept)  # the trace shares its memory
        cells, precision = self.cells(), self.how["precision"]
        x: Any = self.inputs[0].data
        weight_ih, weight_hh = cells.weight_ih, cells.weight_hh
        try:
            trace = self.unused.pop()
        except IndexError:  # a backward before this one has used it up
            trace = self.forward()
        dys = (pieces[i].data if i in pieces else None for i in range(3))
        grads = ops.lstm_grad(trace, cells, *dys)
        if grads.gates is not trace.gates:  # in memory of their own
            self.unused.append(trace)
        dz = ops.reshape(grads.gates, (-1, weight_hh.shape[1]))

        def product(of: Any, weight: Any) -> Any:
            rows = ops.reshape(of, (dz.shape[0], weight.shape[0]))
            return ops.sddmm(rows.T, dz, weight, precision=precision)

        def recurrent(h: Any) -> Any:
            """The gradient of weight_hh, the largest: in parts, where ranks sum it meanwhile."""
            reducer = reducers.get(self.inputs[2])
            done = None if reducer is None else reducer.parts(self.inputs[2])
            if done is None:
                return product(h, weight_hh)
            rows = ops.reshape(h, (dz.shape[0], weight_hh.shape[0]))
            return ops.sddmm_in_parts(rows.T, dz, weight_hh, SHARES, done, precision)

        def back(dz: Any, weight: Any) -> Any:
            w = ops.without_padding(weight, trace.c.shape[2])
            return ops.matmul(dz, w.T, precision=precision)

        makers = [
            lambda: back(grads.gates, weight_ih),
            lambda: product(x, weight_ih),
            lambda: recurrent(trace.h[:-1]),
            lambda: grads.bias,
            lambda: back(grads.gates[0], weight_hh),
            lambda: grads.c,
            lambda: grads.gain,
        ]
        return [lambda make=makers[i]: Tensor(make()) for i in self.order]  # type: ignore[misc]

    def again(self, pieces: Any, y: Tensor) -> list[Any]:
        """Gradients that are differentiable again, through the steps one by one."""
        unchanged(y, *self.kept)
        if self.exchange is not None:
            refuse_again()
        n = len(self.inputs)

        def weighted(*given: Tensor) -> Tensor:
            results = lstm_step_by_step(*given[:n], **self.how)
            return inner_product([results[i] for i in pieces], given[n:])

        gradients = differentiable_grads(weighted, self.inputs, list(pieces.values()))
        return [gradients[i] for i in self.order]
