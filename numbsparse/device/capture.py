"""Capture: the launches of a stretch of Python, kept in a CUDA graph instead of run.

While a capture is under way in a thread, `launch` records into its stream, memory comes from an
arena that belongs to the graph, and copies between host and device are refused. The graph can then
be launched any number of times: the same kernels on the same addresses, for the price of one.

In the simulator nothing is recorded: the work runs at once, and the refusals are the same.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from sys import getrefcount
from threading import get_ident
from typing import Any

import numpy as np

from numbsparse.device import memory, runtime, streams
from numbsparse.device.array import DeviceArray, empty, owners_of

Numbers = Callable[[], np.ndarray]

_generations = count(1)
_generation = 0
_switch: tuple[Any, ...] = ()  # the last one: the generation after it, its opposite, that before


def generation() -> int:
    """Another number whenever an array that captured work may use was replaced by another."""
    return _generation


def forget_captures() -> None:
    """An array that captured work may use was replaced: what was captured so far is stale."""
    global _generation
    _generation = next(_generations)


def switched(setting: Any, opposite: Any) -> None:
    """A setting that captured work follows was made: what was captured so far is stale.

    Where it only takes back the last one, its `opposite`, what was captured before that is not.
    """
    global _generation, _switch
    before = _generation
    if _switch[:2] == (before, setting):
        _generation = _switch[2]
    else:
        forget_captures()
    _switch = _generation, opposite, before


def live(numbers: Numbers, size: int, dtype: Any) -> DeviceArray:
    """`size` numbers of the host, as an array on the GPU that follows them from replay to replay.

    Without a capture `numbers` is called and copied now. Within one it is called before each launch
    of the graph, and not before; so it may count, and an error in the capture loses no count.
    """
    capture = runtime.capturing()
    if capture is None:
        return _filled(empty((size,), dtype), numbers)
    with outside_capture():  # no array of the arena, where others would share its memory
        array = empty((size,), dtype)
        if runtime.SIMULATED:  # where what is captured runs at once
            _filled(array, numbers)
    capture.lives.append((array, numbers))
    return array


def working_stream() -> int:
    """The handle of the stream that launches go to now: within a capture it is the capture's."""
    capture = runtime.capturing()
    return streams.current().handle if capture is None else capture.stream_handle


def in_use(*arrays: DeviceArray) -> None:
    """What launches do about the memory of their arguments, for work that another library starts.

    A capture keeps it; elsewhere it is put in order between streams.
    """
    capture = runtime.capturing()
    if capture is not None:
        capture.hold(arrays)
    elif streams.several:
        memory.note(owners_of(arrays))


@contextmanager
def outside_capture() -> Iterator[None]:
    """Within this context, inside a capture, work runs once and now, and memory is its own.

    For what a step makes when it first needs it and keeps: the state of an optimizer, a plan.
    """
    capture = runtime.capturing()
    if capture is None:
        with streams.aside():
            yield
        return
    runtime.capture = None
    try:
        yield
    finally:
        runtime.capture = capture


def _filled(array: DeviceArray, numbers: Numbers) -> DeviceArray:
    memory.copy_in(array.address, np.ascontiguousarray(numbers(), array.dtype))
    return array


class Arena:
    """The memory of one graph: its addresses stay, and what is let go of serves again within it.

    `nbytes` is all that it took.
    """

    def __init__(self) -> None:
        self._shelves: dict[int, memory.Shelf] = {}
        self._buffers: list[Any] = []
        self._made: dict[Any, Any] = {}
        self.nbytes = 0

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._buffers and not ending():
            with streams.relaxed():  # while another library captures, too
                self._shelves.clear()
                self._buffers.clear()

    def once(self, what: Any, make: Callable[[], Any]) -> Any:
        """What was made for this at first; it stays as long as the arena."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]

    def allocate(self, nbytes: int) -> memory.Block:
        size = memory.rounded(nbytes)
        if runtime.SIMULATED:
            fresh = memory.simulated(nbytes)
            self.nbytes += size
            return ArenaBlock(fresh.address, fresh.buffer)
        shelf = self._shelves.setdefault(size, [])
        if shelf:
            return ArenaBlock(*shelf.pop(), shelf=shelf)
        with streams.aside():
            buffer = memory.take(size)
        self._buffers.append(buffer)
        self.nbytes += size
        return ArenaBlock(int(buffer.handle), buffer, shelf=shelf)

    def has(self, block: memory.Block) -> bool:
        """Whether a block of some arena is one of this; of the simulator's nobody knows."""
        return block.shelf is None or any(block.shelf is own for own in self._shelves.values())


class ArenaBlock(memory.Unordered):
    """A block of an arena. It counts for nothing among the blocks kept outside."""

    __slots__ = ()
    stays = not runtime.SIMULATED  # there it is the host's, and Python keeps it


def _references(owners: dict[int, Any]) -> list[int]:
    """How often each block from outside of the graph is held, as Python counts it."""
    return [getrefcount(owner) for owner in owners.values() if isinstance(owner, memory.Block)]


_ALONE = _references({0: memory.Block(0, None)})[0]


def is_of_a_graph(array: DeviceArray) -> bool:
    """Whether launches of a graph write where this array is."""
    return isinstance(array.owner, ArenaBlock)


def is_own(array: DeviceArray) -> bool:
    """Whether the array is in memory that no other library has, or was lent."""
    return isinstance(array.owner, memory.Block) and not array.owner.is_lent


class Capture:
    """Work under capture; then the graph of it, which holds all memory that it uses.

    Attributes
    ----------
    device : the number of the GPU that all of it is on
    arena : where arrays that are made within come from
    used : the owners of the memory from outside that kernels were given, by id
    lives : arrays to fill before each launch, and what with
    """

    def __init__(self) -> None:
        self.thread = get_ident()
        self.device = runtime.current_id()
        self.arena = Arena()
        self.used: dict[int, Any] = {}
        self._of_plans: dict[int, Any] = {}  # in the arena where a layout's plans were recorded
        self.lives: list[tuple[DeviceArray, Numbers]] = []
        self.stream: Any = None
        self.stream_handle = 0
        self._graph: Any = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Within this context the work of this thread is captured, and nothing runs.

        After an error the work so far is dropped, and everything goes on as before.
        """
        if runtime.capture is not None:
            raise RuntimeError("another capture is under way: one at a time")
        with streams.current().context():
            yield from self._recorded()

    def _recorded(self) -> Iterator[None]:
        if not runtime.SIMULATED:
            # A stream of its own that does not wait for the legacy one, which cannot be captured;
            # relaxed, so that memory can be taken and kernels loaded meanwhile.
            self.stream = runtime.current_device().create_stream().create_graph_builder()
            self.stream.begin_building("relaxed")
            self.stream_handle = int(self.stream.stream.handle)
        runtime.capture = self
        try:
            yield
            runtime.capture = None
            if self.stream is not None:
                self._graph = self.stream.end_building().complete()
        finally:
            runtime.capture = None
            if self.stream is not None:
                with suppress(Exception):  # the first error is the one to see
                    if self.stream.is_building:
                        self.stream.end_building()
                self.stream.close()
                self.stream = None

    def hold(self, args: tuple[Any, ...]) -> None:
        """Keep the memory behind a kernel's arguments for as long as this capture."""
        for owner in owners_of(args):
            if type(owner) is not ArenaBlock:
                self.used[id(owner)] = owner
            elif not self.arena.has(owner):  # what is in its own stays there, and may serve again
                self._of_plans[id(owner)] = owner

    def has_lost_memory(self) -> bool:
        """Whether only this capture holds some memory from outside that it uses.

        Then what stood there has been replaced, and the captured work would not see by what.
        """
        return any(held <= _ALONE for held in _references(self.used))

    def launch(self) -> None:
        """Start the captured work, after all earlier work of the current stream."""
        for array, numbers in self.lives:
            _filled(array, numbers)
        if streams.several:
            memory.note(self.used.values())
        stream = streams.current()
        with stream.context():
            self._graph.launch(stream.core)
