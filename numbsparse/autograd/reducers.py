"""Who is told of a leaf's gradient as soon as it is complete, while `backward` still goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

if TYPE_CHECKING:
    from numbsparse.autograd.tensor import Tensor


class Reducer(Protocol):
    """What makes one gradient of those that several processes found."""

    def ready(self, leaf: Tensor, total: Tensor) -> Tensor:
        """The gradient that takes the place of this one; its values may come before `finish`."""

    def parts(self, leaf: Tensor) -> Callable[[Any, int, int], None] | None:
        """What takes the leaf's gradient in parts before `ready`, where that is of use.

        It is called with all values, of which those from the first number to the last are there.
        """

    def finish(self) -> None:
        """Called at the end of a `backward` that reached leaves of this reducer."""

    def give_up(self) -> None:
        """Called in its place where the `backward` ended by an error."""


class OfLeaves:
    """The reducer of each leaf, for as long as that lives; by identity, as == compares values."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, Reducer]] = {}

    def __setitem__(self, leaf: Tensor, reducer: Reducer) -> None:
        number, found = id(leaf), self._found
        found[number] = ref(leaf, lambda _: found.pop(number, None)), reducer

    def get(self, leaf: Tensor) -> Reducer | None:
        _, reducer = self._found.get(id(leaf), (None, None))
        return reducer

    def __len__(self) -> int:
        return len(self._found)


reducers = OfLeaves()
"""Of the leaves that have one: see `numbsparse.distributed.DataParallel`."""


def with_own(leaf: Tensor, gradient: Tensor) -> Tensor:
    """What a leaf's `.grad` becomes by a gradient."""
    return gradient if leaf.grad is None else leaf.grad + gradient


@contextmanager
def reducing(create_graph: bool) -> Iterator[Callable[[Tensor, Tensor], Tensor | None]]:
    """Within this context a function gives a leaf's `.grad` and another gradient to its reducer.

    It gives what becomes of both, or None for a leaf without a reducer.
    """
    at_work: dict[int, Reducer] = {}

    def reduced(leaf: Tensor, gradient: Tensor) -> Tensor | None:
        reducer = reducers.get(leaf) if reducers else None
        if reducer is None:
            return None
        if create_graph:
            raise NotImplementedError(
                "backward(create_graph=True) gives no gradients of gradients through DataParallel: "
                "use numbsparse.grad for those"
            )
        at_work[id(reducer)] = reducer
        return reducer.ready(leaf, with_own(leaf, gradient))

    try:
        yield reduced
    except BaseException:
        for reducer in at_work.values():
            reducer.give_up()
        raise
    for reducer in at_work.values():
        reducer.finish()
