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
_settled: ContextVar["Settled | None"] = ContextVar("numbsparse_settled", default=None)


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


class Settled:
    """Arrays whose values captured work takes as known, while nothing writes to them.

    Whoever captures work under `taking` asks before each replay whether one of them `has_changed`.
    What changes sooner than LEAST replays after a capture is not taken as known any more.
    """

    LEAST = 32

    def __init__(self) -> None:
        self._taken: list[tuple[Callable[[], Any], Edit | None]] = []
        self._restless: list[Callable[[], Any]] = []
        self._kept: list[Any] = []
        self._replays = 0

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Within this context `is_settled` asks here."""
        self._taken, self._kept, self._replays = [], [], 0
        token = _settled.set(self)
        try:
            yield
        finally:
            _settled.reset(token)

    def take(self, owner: Any) -> bool:
        if any(known() is owner for known in self._restless):
            return False
        self._taken.append((ref(owner), last_of(owner)))
        return True

    def keep(self, made: Any) -> None:
        """What was made of the values, as long as they are taken as known."""
        self._kept.append(made)

    def has_changed(self) -> bool:
        """Whether something was written, lent or let go of since; to be asked once a replay."""
        changed = [known for known, edit in self._taken if not _is_as_it_was(known(), edit)]
        if changed and self._replays < self.LEAST:
            self._restless += changed
        self._replays += 1
        return bool(changed)


def _is_as_it_was(owner: Any, edit: Edit | None) -> bool:
    lent = getattr(owner, "is_lent", False)  # of a block of GPU memory
    return owner is not None and not lent and last_of(owner) == edit


def settled(array: Any) -> Settled | None:
    """Where captured work may take the array's values as known; None if it may not."""
    taking = _settled.get()
    return taking if taking is not None and taking.take(_owner(array)) else None


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
