"""The gates of an LSTM's units, in one operation."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, differentiable_grads, record, unchanged
from numbsparse.nn.functional.activations import sigmoid, tanh
from numbsparse.nn.functional.arithmetic import add, cast, data_of, multiply
from numbsparse.nn.functional.joint import jointly, results_of
from numbsparse.nn.functional.layers import inner_product
from numbsparse.nn.functional.repeated import Places
from numbsparse.nn.functional.shape import unbind


def cell_of_gates(
    gates: list[Tensor], c: Tensor, kept: Any, dtype: np.dtype
) -> tuple[Tensor, Tensor]:
    """(h, c after) of i, f, g and o (batch, units), of other functions, h of this dtype."""
    i, f, g, o = (cast(gate, c.dtype) for gate in gates)
    update = multiply(sigmoid(i), tanh(g))
    if kept is not None:
        update = multiply(update, ops.cast(data_of(kept), c.dtype))
    c = add(multiply(sigmoid(f), c), update)
    return cast(multiply(sigmoid(o), tanh(c)), dtype), c


def repeated_cell(*, calls: int = 1) -> Callable[..., tuple[Tensor, Tensor]]:
    """The gates of an LSTM for a loop: a function (z, c, kept=None) -> (h, c after).

    c after = sigmoid(z_f) * c + sigmoid(z_i) * tanh(z_g) * kept;  h = sigmoid(z_o) * tanh(c after)

    Parameters
    ----------
    calls : int
        How many to expect, as in `repeated_product`.

    Returns
    -------
    function of Tensors
        z (batch, 4, units): i, f, g, o in torch's order; c (batch, units), float32 with a z of
        16-bit floats; kept (batch, units) gets no gradient.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> cell = F.repeated_cell()
    >>> h, c = cell(ns.Tensor(np.zeros((1, 4, 2))), ns.Tensor(np.ones((1, 2))))
    >>> h, c
    (Tensor([[0.23105858, 0.23105858]]), Tensor([[0.5, 0.5]]))
    """
    of_h, of_dz = Places(calls), Places(calls)

    def cell(z: Any, c: Any, kept: Any = None) -> tuple[Tensor, Tensor]:
        z, c = as_tensor(z, "z"), as_tensor(c, "c")
        factor, at = data_of(kept), of_dz.next()
        h, after = ops.cell(z.data, c.data, factor, of_h.next())
        read = [Tensor(after), *([] if factor is None else [Tensor(factor)])]

        def gradients(pieces: Any, y: Tensor) -> list[Any]:
            unchanged(y, *read)
            dh, dc = (
                pieces[i].data if i in pieces else ops.zeros_like(like)
                for i, like in enumerate((h, after))
            )
            return [Tensor(d) for d in ops.cell_grad(z.data, c.data, factor, after, dh, dc, at)]

        def again(pieces: Any, y: Tensor) -> list[Any]:
            unchanged(*read)

            def weighted(z: Tensor, c: Tensor, *dys: Tensor) -> Tensor:
                results = cell_of_gates(unbind(z, 1), c, kept, y.dtype)
                return inner_product([results[i] for i in pieces], dys)

            return differentiable_grads(weighted, [z, c], list(pieces.values()))

        hidden = record(h, *jointly(gradients, z, c, again=again), held=read)
        new_h, new_c = results_of(hidden, (h, after), "repeated_cell")
        return new_h, new_c

    return cell
