"""What becomes of leaves' gradients: added up, or reduced while `backward` still goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol
from weakref import ref

from numbsparse.autograd.contexts import set_recording
from numbsparse.block_sparse import BlockSparse

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


@contextmanager
def adding(create_graph: bool) -> Iterator[Callable[[Tensor, Tensor], None]]:
    """Within this context a function takes gradients of leaves; at its end all are in `.grad`.

    The leaves' reducers get them at once, as what `.grad` is with them.
    """
    at_work: dict[int, Reducer] = {}
    found: list[tuple[Tensor, Tensor]] = []
    totals: list[tuple[Tensor, Tensor]] = []

    def add(leaf: Tensor, gradient: Tensor) -> None:
        if isinstance(gradient._data, BlockSparse) and leaf.grad is not None:
            leaf.grad.matrix.stored_as(gradient._data, "grad")  # or it is refused
        reducer = reducers.get(leaf) if reducers else None
        if reducer is None:
            found.append((leaf, gradient))
            return
        if create_graph:
            raise NotImplementedError(
                "backward(create_graph=True) gives no gradients of gradients through DataParallel: "
                "use numbsparse.grad for those"
            )
        at_work[id(reducer)] = reducer
        totals.append((leaf, reducer.ready(leaf, _with_own(leaf, gradient))))

    try:
        yield add
    except BaseException:
        for reducer in at_work.values():
            reducer.give_up()
        raise
    for reducer in at_work.values():
        reducer.finish()
    with _adding, set_recording(create_graph):
        while found:  # a gradient is freed as soon as it is added
            leaf, gradient = found.pop()
            totals.append((leaf, _with_own(leaf, gradient)))
        for leaf, total in totals:
            leaf.grad = total


def _with_own(leaf: Tensor, gradient: Tensor) -> Tensor:
    return gradient if leaf.grad is None else leaf.grad + gradient


_adding = Lock()  # what one thread reads in `.grad` another may have added to before it writes

if hasattr(os, "register_at_fork"):  # a thread that held it does not release it in the child
    os.register_at_fork(after_in_child=_adding._at_fork_reinit)  # type: ignore[attr-defined]
