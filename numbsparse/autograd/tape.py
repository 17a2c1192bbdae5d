"""The tape: operations record themselves, and gradients go back along what they recorded."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd.contexts import AT_WORK, NOTED, RECORDING, Vjp, recording, set_recording
from numbsparse.autograd.tensor import Tensor, as_tensor, tensors_of
from numbsparse.autograd.watch import fingerprints, function_of
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import check_kind
from numbsparse.ops.operands import check_form
from numbsparse.patterns.checks import flag


def grad(
    output: Tensor,
    inputs: Sequence[Tensor],
    *,
    grad_output: Any = None,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """The gradients of `output` with respect to each of `inputs`; None where it does not depend.

    Nothing is added to `.grad`.

    Parameters
    ----------
    output : Tensor
    inputs : sequence of Tensor, of any shapes; each gradient has that of its input
    grad_output : array or Tensor, in the shape, dtype and place of output, optional
        The gradient that output itself has; needed unless output is one number.
    create_graph : bool
        Whether the gradients can be differentiated again.

    Raises TypeError where one of them is no Tensor, ValueError where grad_output is missing or does
    not fit, RuntimeError where nothing that led to output requires a gradient.

    >>> import numbsparse as ns
    >>> x = ns.Tensor(3.0, requires_grad=True)
    >>> (first,) = ns.grad(x * x * x, [x], create_graph=True)
    >>> (second,) = ns.grad(first, [x])
    >>> first.item(), second.item()
    (27.0, 18.0)
    """
    check_kind("output", output, Tensor, "a Tensor")
    inputs = tensors_of("inputs", inputs)
    seed = seed_of(output, grad_output, "grad_output")
    again = flag("create_graph", create_graph)
    return _found(inputs, gradients_of(output, seed, again))


def _found(
    inputs: Sequence[Tensor], gradients: Iterable[tuple[Tensor, Tensor]]
) -> list[Tensor | None]:
    """Of the gradients of tensors those of the inputs, in their order."""
    wanted = {id(tensor) for tensor in inputs}
    found = {id(tensor): gradient for tensor, gradient in gradients if id(tensor) in wanted}
    return [found.get(id(tensor)) for tensor in inputs]


def differentiable_grads(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], others: Sequence[Tensor] = ()
) -> list[Tensor | None]:
    """`grad` of function(*inputs, *others), one value, by the inputs, differentiable again.

    What any of them was computed from is not gone through now, only when that is done: a gradient
    of a result, besides the inputs, may come from a graph that leads back to them.
    """
    given = (*inputs, *others)
    leaves = [Tensor(a.data, requires_grad=a.requires_grad) for a in given]
    gradients = grad(function(*leaves), leaves[: len(inputs)], create_graph=True)
    for leaf, a in zip(leaves, given, strict=True):
        leaf._edges = ((a, lambda dy, y: dy),) if a.requires_grad else ()
    return gradients


def record(
    data: Any,
    *edges: tuple[Tensor, Vjp],
    held: Sequence[Tensor] = (),
    reads: Sequence[Tensor] | None = None,
) -> Tensor:
    """The Tensor of a result, with the way back to each input that requires a gradient.

    `held` are further tensors that a vjp reads. It reads all by `.data`, which refuses what was
    changed since; `unread` gives what they hold for its layout only. To notice what NumPy writes
    takes a microsecond each: where vjps read fewer than the result, inputs and `held`, `reads` are
    those.
    """
    result = Tensor(data)
    if RECORDING.get():
        result._edges = way = tuple([edge for edge in edges if edge[0].requires_grad])
        if way:
            result.requires_grad = True
            if reads is None:
                reads = (result, *[edge[0] for edge in edges], *held)
            result._prints = fingerprints(*reads) if reads else None
    elif (noted := NOTED.get()) is not None:
        noted.update((id(tensor), tensor) for tensor, _ in edges if tensor.requires_grad)
    return result


def also_from(result: Tensor, tensor: Tensor, vjp: Vjp) -> Tensor:
    """A result that nobody has read yet, into whose memory something of another tensor was added.

    Its way back leads to that one too; the ways that it has read none of its values.
    """
    if not tensor.requires_grad:
        return result
    if RECORDING.get():
        result._edges += ((tensor, vjp),)
        result.requires_grad = True
    elif (noted := NOTED.get()) is not None:
        noted[id(tensor)] = tensor
    return result


def fused(vjp: Callable[..., Any], again: Vjp) -> Vjp:
    """A vjp of arrays, `vjp(dy, y)`, in one kernel; where it is recorded `again`, of Tensors."""

    def on_tensors(dy: Tensor, y: Tensor) -> Tensor:
        return again(dy, y) if RECORDING.get() else Tensor(vjp(dy.data, y.data))

    on_tensors.__qualname__ = vjp.__qualname__
    return on_tensors


def refuse_again() -> None:
    """For a vjp that works only on arrays, at its start."""
    if RECORDING.get():
        at_work = AT_WORK.get()
        name = "this function" if at_work is None else function_of(at_work[1])
        raise NotImplementedError(
            f"the gradient of {name} cannot be differentiated again (create_graph=True)"
        )


def grads_at(
    outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor], create_graph: bool
) -> list[Tensor | None]:
    """The gradients of `inputs` from (output, its gradient) pairs, and of nothing behind them."""
    with recording():
        joined = record(np.zeros(()), *((y, lambda _, z, dy=dy: dy) for y, dy in outputs))  # type: ignore[misc]
    ends = {id(tensor) for tensor in inputs}
    return _found(inputs, gradients_of(joined, Tensor(np.ones(())), create_graph, ends))


def seed_of(output: Tensor, gradient: Any, argument: str = "grad") -> Tensor:
    """The gradient to start from, which errors call by `argument`."""
    if not output.requires_grad:
        raise RuntimeError("backward: nothing that led to this tensor requires a gradient")
    if gradient is None:
        if output.size != 1:
            raise ValueError(
                f"backward of a tensor of shape {output.shape} takes {argument}, of the same shape"
            )
        return Tensor(ops.full(output.shape, 1.0, output.dtype, output.device))
    given = as_tensor(gradient, argument)
    # A new Tensor: it may have been changed after the forward pass, which never saw it.
    gradient = record(given.data, (given, lambda dy, y: dy))
    check_form(argument, gradient, output.shape, output.dtype)
    if gradient.device != output.device:
        raise ValueError(f"{argument} takes the device {output.device}, got {gradient.device}")
    sparse = isinstance(output.data, BlockSparse)
    if isinstance(gradient.data, BlockSparse) != sparse:
        words = ("a BlockSparse", "an array")[:: 1 if sparse else -1]
        raise ValueError(f"{argument} takes {words[0]} here, got {words[1]}")
    if sparse and gradient.data.stored_as(output.data, argument) is not gradient.data:
        raise ValueError(
            f"{argument} takes blocks stored as this tensor's, got a transposed view's"
        )
    return gradient


def gradients_of(
    output: Tensor, seed: Tensor, create_graph: bool, ends: Collection[int] = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every tensor behind `output` with its gradient, from the output back.

    A leaf comes as soon as its gradient is complete. `ends` are the ids of tensors that nothing is
    looked for behind.
    """
    gradients = {id(output): seed}
    order, uses = _from_output_back(output, ends)
    with set_recording(create_graph):
        for tensor in order:
            dy = gradients.pop(id(tensor), None)
            if dy is None:  # a leaf that was complete before
                continue
            yield tensor, dy
            for parent, vjp in () if id(tensor) in ends else tensor._edges:
                token = AT_WORK.set((tensor, vjp))
                try:
                    gradient = vjp(dy, tensor)
                finally:
                    AT_WORK.reset(token)
                key = id(parent)
                known = gradients.get(key)
                gradients[key] = gradient = gradient if known is None else known + gradient
                uses[key] -= 1
                if not uses[key] and not parent._edges:
                    yield parent, gradients.pop(key)


def _from_output_back(output: Tensor, ends: Collection[int]) -> tuple[list[Tensor], dict[int, int]]:
    """The tensors behind `output`, each before all that it was computed from; how often each is
    an operand, by its id."""
    order: list[Tensor] = []
    uses: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[tuple[Tensor, bool]] = [(output, False)]
    while stack:
        tensor, parents_done = stack.pop()
        if parents_done:
            order.append(tensor)
        elif (key := id(tensor)) not in seen:
            seen.add(key)
            stack.append((tensor, True))
            for parent, _ in () if key in ends else tensor._edges:
                uses[id(parent)] = uses.get(id(parent), 0) + 1
                stack.append((parent, False))
    order.reverse()
    return order, uses
