"""Operations with several results, and gradients that are computed all at once.

A hidden tensor stands for all results of one operation: its gradient is theirs, by number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

from numbsparse.autograd import Tensor, is_recording, record


class Pieces(dict[int, Tensor]):
    """The gradients of some results, by number; their sum is the gradients of more."""

    def __add__(self, other: Pieces) -> Pieces:
        for i, gradient in other.items():
            self[i] = self[i] + gradient if i in self else gradient
        return self


def results_of(hidden: Tensor, datas: Iterable[Any], function: str) -> list[Tensor]:
    """What a function gives, for which a hidden tensor stands: its gradient is their `Pieces`."""

    def way_back(i: int) -> Any:
        vjp = lambda dy, y: Pieces({i: dy})  # noqa: E731
        vjp.__qualname__ = function  # errors say it
        return vjp

    return [record(data, (hidden, way_back(i))) for i, data in enumerate(datas)]


def jointly(
    vjp: Callable[[Any, Tensor], list[Any]],
    *inputs: Tensor,
    again: Callable[[Any, Tensor], list[Any]],
) -> list[Any]:
    """Edges to inputs whose gradients `vjp(dy, y)` gives all at once, in order.

    One that is a function is called when that input's turn comes. `again` gives gradients that can
    be differentiated again.
    """
    wanted = sum(tensor.requires_grad for tensor in inputs)
    found: dict[int, tuple[Any, list[Any], int]] = {}  # by thread

    def part(i: int) -> Callable[[Any, Tensor], Any]:
        def on_tensors(dy: Any, y: Tensor) -> Any:
            of, gradients, left = found.get(here := get_ident(), (None, [], 0))
            if of is not dy:  # what an error broke off is not gone on with
                compute = again if is_recording() else vjp
                gradients, left = compute(dy, y), wanted
            found[here] = dy, gradients, left - 1
            if left == 1:  # nothing of it is kept until the tape goes
                del found[here]
            gradient = gradients[i]
            return gradient() if callable(gradient) else gradient

        on_tensors.__qualname__ = vjp.__qualname__
        return on_tensors

    return [(tensor, part(i)) for i, tensor in enumerate(inputs)]
