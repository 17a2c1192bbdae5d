"""What was changed in place, when and by what: so that no gradient is made of changed values.

Tensors and edits are numbered in the order in which they came to be. What an operation keeps for
its gradient was changed since if an edit of its memory has a higher number than its result.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

SAMPLES = 128  # values of an array that its fingerprint is made of

serial: Callable[[], int] = count(1).__next__


class Edit(NamedTuple):
    serial: int
    by: str


Note = tuple[Callable[[], Any], str]

_edits: dict[int, tuple[Any, Edit]] = {}  # by the id of the owner of the memory, while it lives
_notes: ContextVar[list[Note] | None] = ContextVar("numbsparse_notes", default=None)


def note(array: Any, by: str) -> None:
    """The array, or all memory that it is a view of, was written by `by`.

    >>> a = np.zeros((2, 3))
    >>> note(a[0], "a test")
    >>> last_of(a.T).by
    'a test'
    """
    owner = _owner(array)
    try:
        known = ref(owner, _forget(id(owner)))
    except TypeError:  # what another library lends may take no weak reference
        return
    _edits[id(owner)] = known, Edit(serial(), by)
    if (notes := _notes.get()) is not None:
        notes.append((known, by))


def last_of(array: Any) -> Edit | None:
    """The last edit of the array's memory that was noted."""
    owner = _owner(array)
    known = _edits.get(id(owner))
    return known[1] if known is not None and known[0]() is owner else None


@contextmanager
def collected() -> Iterator[list[Note]]:
    """Within this context what is noted is gathered too: for captured work, to `repeat` it."""
    notes: list[Note] = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def repeat(notes: Iterable[Note]) -> None:
    """The same was written once more."""
    for known, by in notes:
        if (owner := known()) is not None:
            _edits[id(owner)] = known, Edit(serial(), by)


def fingerprint(array: np.ndarray) -> int:
    """A number that differs where any of some values differs: of all values of a small array."""
    if array.size > SAMPLES:
        array = array.flat[:: array.size // SAMPLES | 1]  # odd: not the same column each time
    return hash(array.tobytes())


def _owner(array: Any) -> Any:
    """The object that the memory belongs to."""
    if isinstance(array, np.ndarray):
        while isinstance(array.base, np.ndarray):
            array = array.base
        return array
    owner = getattr(array, "owner", None)  # of a DeviceArray; other libraries' arrays lend memory
    return array if owner is None else owner


def _forget(key: int) -> Callable[[Any], None]:
    def forget(known: Any) -> None:
        if _edits.get(key, (None,))[0] is known:
            del _edits[key]

    return forget
