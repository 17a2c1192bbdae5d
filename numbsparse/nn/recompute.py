"""Activations computed twice instead of kept: memory for time."""

from collections.abc import Callable
from typing import Any

from numbsparse import ops
from numbsparse.autograd import (
    Tensor,
    as_tensor,
    grads_at,
    is_recording,
    noting,
    record,
    recording,
    unchanged,
    unwatched,
)
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import NO_NUMBERS, check_kind
from numbsparse.nn.functional.joint import jointly, results_of
from numbsparse.ops.operands import ARRAYS
from numbsparse.trees import mapped


def recompute(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Call a function without keeping its activations: they are computed again for the gradient.

    The tape remembers only the inputs. `backward` runs the function once more, with a tape, goes
    back through that, and forgets it. Of a chain cut in k such segments of n activations, k + n are
    kept at a time, not k * n, for one more forward pass. Gradients are the same bit for bit; only
    of a weight that several segments share may the order of the sum be another.

    Parameters
    ----------
    function : callable, such as a Module
        Of the same inputs it must compute the same: it runs twice, both times in the mode, `train`
        or `eval`, of then. Dropout repeats its masks and counts one call; the running statistics of
        BatchNorm follow a batch twice. Parameters, and other tensors that it takes from around it,
        get gradients.
    inputs, named : Tensors, and tuples, lists and dicts of them, or anything else
        Not to be changed in place before `backward`; of Tensors, arrays and parameters that is
        refused.

    Returns
    -------
    what `function` returns: a Tensor, or tuples, lists and dicts of them

    Raises
    ------
    RuntimeError
        In `backward`, if the function does something else the second time.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> layers = [ns.nn.Linear(8, 8, block_size=4, seed=i) for i in range(3)]
    >>> y = np.ones((2, 8), np.float32)
    >>> for layer in layers:
    ...     y = ns.nn.recompute(lambda x, layer=layer: ns.nn.functional.gelu(layer(x)), y)
    >>> y.sum().backward()
    >>> layers[0].weight.grad.shape
    (8, 8)

    T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016.
    """
    check_kind("function", function, Callable, "what can be called")
    if not is_recording():
        return function(*inputs, **named)
    with noting() as used, ops.draws_noted() as draws:
        results = function(*inputs, **named)
    outputs = _tensors(results)
    used.update((id(y), y) for y in outputs if y.requires_grad)  # an input that is returned
    leaves = list(used.values())
    if not leaves or not outputs:
        return results

    kinds, precision = [(y.shape, y.dtype) for y in outputs], ops.checked_precision(None)

    def gradients(pieces: Any, y: Tensor) -> list[Any]:
        unchanged(*leaves, *given)
        deeper = is_recording()  # then all that is computed again is kept
        with recording(), unwatched(), ops.draws_repeated(draws), ops.set_precision(precision):
            again = _tensors(function(*inputs, **named))
        if [(y.shape, y.dtype) for y in again] != kinds:
            raise RuntimeError("function gives results of other shapes or dtypes the second time")
        found = grads_at([(again[i], dy) for i, dy in pieces.items()], leaves, deeper)
        return [_zeros(a) if da is None else da for a, da in zip(leaves, found, strict=True)]

    given = _tensors((inputs, named), (Tensor, *ARRAYS, BlockSparse))
    hidden = record(outputs[0].data, *jointly(gradients, *leaves, again=gradients), held=given)
    on_tape = iter(results_of(hidden, [y.data for y in outputs], "recompute"))
    return mapped(results, lambda y: next(on_tape) if isinstance(y, Tensor) else y)


def _tensors(value: Any, kinds: Any = Tensor) -> list[Tensor]:
    """Those in a result, in order; of other kinds, as Tensors, where they hold numbers."""
    found: list[Any] = []
    mapped(value, found.append)
    found = [item for item in found if isinstance(item, kinds)]
    return [as_tensor(item) for item in found if item.dtype.kind not in NO_NUMBERS]


def _zeros(a: Tensor) -> Tensor:
    zeros = ops.zeros_like(a.values)
    return Tensor(a.data.with_values(zeros) if isinstance(a.data, BlockSparse) else zeros)
