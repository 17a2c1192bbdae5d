"""An LSTM over a whole sequence, and its gradient: two products and one kernel a step.

What depends on no earlier step is done for all steps at once: the products of the inputs before,
the gradients of weights and inputs after. Where kernels stream the recurrent weight, all steps are
one launch, too, and multiply inputs that have few blocks along the way.
"""

from typing import Any, NamedTuple

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray
from numbsparse.kernels.lstm import GATES
from numbsparse.ops.create import empty_beside, zeros
from numbsparse.ops.edge import inside
from numbsparse.ops.elementwise import cast, copy, gapless, write
from numbsparse.ops.lstm_streamed import home, streamed
from numbsparse.ops.matmul import matmul
from numbsparse.ops.operands import check_beside, on_gpu, place_of, state_dtype
from numbsparse.ops.precision import checked_precision
from numbsparse.ops.reduce import sum as sum_over
from numbsparse.patterns.checks import number

KERNELS = {"cpu": "on_cpu", "cuda": "on_gpu"}
NORMED = KERNELS | {"cuda": "normed"}


class LSTMCells(NamedTuple):
    """What computes a sequence, as `numbsparse.nn.functional.lstm` takes it.

    With an `exchange`, see `numbsparse.distributed.split`, weights, bias and c are this rank's part
    of the units, and h that of all.
    """

    weight_hh: BlockSparse
    bias: Any
    weight_ih: Any = None  # where inputs are to be multiplied
    gain: Any = None
    eps: float = 1e-5
    kept: Any = None
    precision: str | None = None
    exchange: Any = None


class LSTMTrace(NamedTuple):
    """What the forward pass leaves for the gradient; y is h[1:].

    Attributes
    ----------
    gates : (time, batch, 4 * width), i, f, g, o of each step, or what layer norm made of them
    h, c : (time + 1, batch, units), of all steps, the first state before them
    inverse_std : (time, batch, 4) with layer norm
    """

    gates: Any
    h: Any
    c: Any
    inverse_std: Any = None


class LSTMGrads(NamedTuple):
    """Gradients: of z (time, batch, 4 * width), the first c, the bias, the gain."""

    gates: Any
    c: Any
    bias: Any
    gain: Any = None


def lstm(x: Any, cells: LSTMCells, h: Any, c: Any) -> LSTMTrace:
    """See `numbsparse.nn.functional.lstm`, which differentiates it."""
    check(x, cells, h, c)
    (steps, batch, _), units, bias = x.shape, h.shape[1], cells.bias
    hs = empty_beside((steps + 1, batch, units), x)
    cs = empty_beside((steps + 1, *c.shape), c)
    write(hs[0], h)
    write(cs[0], c)
    gates = empty_beside((steps, batch, *bias.shape), x)
    scales = None if cells.gain is None else empty_beside((steps, batch, GATES), c)
    trace = LSTMTrace(gates, hs, cs, scales)
    _run(trace, cells, (x, cells.weight_ih))
    return trace


def _run(trace: LSTMTrace, cells: LSTMCells, inputs: Any) -> None:
    """All gates, h and c of a trace that has the first h and c."""
    weight_hh, eps, exchange = cells.weight_hh, cells.eps, cells.exchange
    bias, gain, kept = map(gapless, (cells.bias, cells.gain, cells.kept))
    gates, hs, cs, scales = trace
    steps, B = gates.shape[0], weight_hh.block_size
    precision = checked_precision(cells.precision)
    by_steps = gain is not None or exchange is not None
    streams = None if by_steps else streamed(weight_hh, hs, precision)
    if streams is None or not streams.takes(*inputs):
        matmul(*inputs, out=gates, precision=precision)
        inputs = None
    if streams is not None:
        streams.forward(gates, bias, kept, hs, cs, inputs=inputs)
        return
    each_z, each_h, each_c, each_kept = _each(gates), _each(hs), _each(cs), _each(kept, steps)
    kernels, made = _kernels(gates, gain), each_h
    if exchange is not None:  # of this rank's units, before they are with the others'
        own = empty_beside(cs.shape[1:], hs)
        made = [own] * (steps + 1)
    recurrent = empty_beside(gates.shape[1:], gates)
    for t in range(steps):
        matmul(each_h[t], weight_hh, out=recurrent, precision=precision)
        norm = () if scales is None else (gain, eps, scales[t])
        states = each_c[t], each_c[t + 1], made[t + 1]
        kernels.forward(each_z[t], recurrent, bias, each_kept[t], *states, B, *norm)
        if exchange is not None:
            exchange.gather(made[t + 1], each_h[t + 1])


def _kernels(gates: Any, gain: Any) -> Any:
    return home((KERNELS if gain is None else NORMED)[place_of(gates)])


def lstm_grad(
    trace: LSTMTrace, cells: LSTMCells, dy: Any, dh: Any, dc: Any, *, in_place: bool = True
) -> LSTMGrads:
    """The gradients of what `lstm` computed, but for those that are products of the gates'.

    These are of the inputs and both weights, of all steps at once, and of the first h, of the first
    step alone.

    Parameters
    ----------
    trace : LSTMTrace, with the cells that `lstm` took
        Without layer norm, and `in_place`, it serves once: its gates become their gradients.
    dy, dh, dc : the gradients of y, of the last h and of the last c; each may be None
        With an `exchange` the first two are those of all units, equal on all ranks.
    """
    weight_hh, exchange = without_padding(cells.weight_hh, trace.c.shape[2]), cells.exchange
    precision = checked_precision(cells.precision)
    bias, gain, kept = map(gapless, (cells.bias, cells.gain, cells.kept))
    gates, hs, cs, scales = trace
    place = place_of(gates)
    kernels = _kernels(gates, gain)
    (steps, *_), (_, batch, units), B = gates.shape, cs.shape, weight_hh.block_size
    if exchange is not None:
        dy, dh = (None if d is None else exchange.part(d) for d in (dy, dh))
    dy = zeros((steps, batch, units), hs.dtype, place) if dy is None else gapless(dy)
    dh = zeros((batch, units), hs.dtype, place) if dh is None else copy(dh)
    dc = zeros((batch, units), cs.dtype, place) if dc is None else copy(dc)
    apart = gain is not None or not in_place  # on the CPU kernels change gates where they are
    dgates = gates
    if apart:
        dgates = copy(gates) if place == "cpu" else empty_beside(gates.shape, gates)
    by_steps = gain is not None or exchange is not None
    streams = None if by_steps else streamed(weight_hh, hs, precision)
    parts = kernels.parts(batch, units), *bias.shape
    if streams is not None:
        parts = max(parts[0], streams.parts), *bias.shape
    dbias = zeros(parts, cs.dtype, place)
    dgain = None if gain is None else zeros(parts, cs.dtype, place)
    each_c, each_kept = _each(cs), _each(kept, steps)
    each_z, each_dz, each_dy = _each(gates), _each(dgates), _each(dy)

    def through_gates(t: int) -> None:
        states = each_c[t], each_c[t + 1]
        step = each_z[t], bias, each_kept[t], *states, each_dy[t], dh, dc, each_dz[t]
        norm = () if scales is None else (gain, scales[t], dgain)
        kernels.backward(*step, dbias, B, *norm)

    through_gates(steps - 1)
    if streams is not None and steps > 1:
        streams.backward(gates, kept, cs, dy, dgates, dc, dbias)
    elif streams is None:
        for t in reversed(range(1, steps)):
            if exchange is None:
                matmul(each_dz[t], weight_hh.T, out=dh, precision=precision)
            else:
                exchange.collect(matmul(each_dz[t], weight_hh.T, precision=precision), dh)
            through_gates(t - 1)
    dbias = _summed(dbias, bias.dtype)
    return LSTMGrads(dgates, dc, dbias, None if dgain is None else _summed(dgain, bias.dtype))


def without_padding(w: BlockSparse, units: int) -> BlockSparse:
    """With zeros for gates beyond the last unit: their gradients are 0, and NaN * 0 is NaN."""
    return w.with_values(inside(w, units=units)) if units % w.block_size else w


def check(x: Any, cells: LSTMCells, h: Any, c: Any) -> None:
    """Refuse what does not fit together, by name."""
    number("eps", cells.eps)
    checked_precision(cells.precision)
    weight_hh, weight_ih, gain, kept = cells.weight_hh, cells.weight_ih, cells.gain, cells.kept
    place = "cuda" if on_gpu(x, "x") else "cpu"
    for name, w in (("weight_ih", weight_ih), ("weight_hh", weight_hh)):
        if not isinstance(w, BlockSparse):
            raise TypeError(f"{name} takes a BlockSparse, got {type(w).__name__}")
        if w.place != place:
            raise ValueError(f"{name} takes the device of x, {place}, got {w.place}")
        if w.dtype != x.dtype:
            raise TypeError(f"{name} takes the dtype of x, {x.dtype}, got {w.dtype}")
    B, (rows, columns) = weight_hh.block_size, weight_hh.shape
    units = rows if cells.exchange is None else rows // cells.exchange.size
    if columns != GATES * -(-units // B) * B:
        raise ValueError(
            f"weight_hh takes four gates of whole blocks of {B} for {units} units, "
            f"got {columns} columns"
        )
    check_steps(x, weight_ih.shape[0])
    if weight_ih.shape[1] != columns or weight_ih.block_size != B:
        raise ValueError(
            f"weight_ih takes {columns} columns in blocks of {B}, as weight_hh has, "
            f"got {weight_ih.shape[1]} in blocks of {weight_ih.block_size}"
        )
    state = (x.shape[1], units)
    wanted = [("bias", cells.bias, (columns,), x.dtype), ("h", h, (x.shape[1], rows), x.dtype)]
    wanted += [("c", c, state, state_dtype(x.dtype))]
    wanted += [] if gain is None else [("gain", gain, (columns,), x.dtype)]
    wanted += [] if kept is None else [("kept", kept, (*x.shape[:2], units), x.dtype)]
    for name, a, shape, dtype in wanted:
        check_beside(name, a, shape, dtype, "x", x)


def check_steps(x: Any, features: int) -> None:
    """Refuse an x that has other axes than (time, batch, features), or no step."""
    if x.ndim != 3 or x.shape[2] != features or x.shape[0] == 0:
        raise ValueError(
            f"x takes the shape (time, batch, {features}), of one step at least, got {x.shape}"
        )


def _each(array: Any, steps: int = 0) -> list[Any]:
    """array[0], array[1], ... of a C-contiguous array; `steps` times None for None."""
    if array is None:
        return [None] * steps
    if isinstance(array, np.ndarray):
        return list(array)
    stride, rest = array.strides[0], array.shape[1:]
    return [
        DeviceArray(array.address + t * stride, rest, array.dtype, None, array.owner)
        for t in range(array.shape[0])
    ]


def _summed(parts: Any, dtype: np.dtype) -> Any:
    total = sum_over(parts, 0)
    return total if total.dtype == dtype else cast(total, dtype)
