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
_settling: ContextVar["Settled | None"] = ContextVar("numbsparse_settling", default=None)


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

    Whoever captures work under `taking` asks before each replay whether it is to be captured anew:
    it is if one of them has changed. An array that did so sooner than LEAST replays after a capture
    is not taken as known, until as many have found it as it was: it costs an H200's host about 14
    ms for a layer to capture anew, and a mask that is known gains 25 to 150 us a replay.
    """

    LEAST = 256

    def __init__(self) -> None:
        self._taken: list[_Memory] = []
        self._awaited: list[_Memory] = []
        self._kept: list[Any] = []
        self._replays = 0

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Within this context `settling` is this."""
        self._taken, self._kept, self._replays = [], [], 0
        for memory in self._awaited:
            memory.since = 0
        token = _settling.set(self)
        try:
            yield
        finally:
            _settling.reset(token)

    def take(self, array: Any) -> bool:
        """Whether the values of an array that the host knows may be taken as known."""
        owner = _owner(array)
        if any(memory.owner() is owner for memory in self._awaited):
            return False
        self._taken.append(_Memory(owner))
        return True

    def wait_for(self, array: Any) -> None:
        """The host does not know the array's values: if they stay, it is worth a look."""
        owner = _owner(array)
        if not any(memory.owner() is owner for memory in self._awaited):
            self._awaited.append(_Memory(owner))

    def keep(self, made: Any) -> None:
        """What was made of the values, as long as they are taken as known."""
        self._kept.append(made)

    def is_stale(self) -> bool:
        """Whether an array was written, lent or let go of, or stays by now: to be asked once a
        replay."""
        changed = [memory for memory in self._taken if memory.has_changed(self._replays)]
        if self._replays < self.LEAST:
            self._awaited += changed
        self._replays += 1
        ready = [m for m in self._awaited if m.stayed(self._replays) > self.LEAST]
        self._awaited = [m for m in self._awaited if m not in ready and m.owner() is not None]
        return bool(changed or ready)


class _Memory:
    """What belongs to an owner, how it was edited last, and since which replay it is so."""

    def __init__(self, owner: Any):
        self.owner, self.edit, self.since = ref(owner), last_of(owner), 0

    def has_changed(self, replays: int) -> bool:
        owner = self.owner()
        before, self.edit = self.edit, None if owner is None else last_of(owner)
        lent = getattr(owner, "is_lent", False)  # of a block of GPU memory
        changed = owner is None or lent or self.edit != before
        self.since = replays if changed else self.since
        return changed

    def stayed(self, replays: int) -> int:
        """How many replays found it as it was."""
        self.has_changed(replays)
        return replays - self.since


def settling() -> Settled | None:
    """Where captured work may take values as known, if it may."""
    return _settling.get()


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
