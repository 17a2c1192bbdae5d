"""Launches that come again on the same memory: recorded the second time, then only started.

A product of few rows takes the GPU less time than the host needs to check its operands, to choose a
kernel and to work out its arguments. All that follows from where the operands are and from their
shapes, and training goes over the same memory step after step.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from numbsparse.device import memory, runtime, streams
from numbsparse.device.array import DeviceArray, owners_of
from numbsparse.device.torch_tensors import place as tensor_place
from numbsparse.device.torch_tensors import stream_handle

REMEMBERED = 4096  # of a layout, and of what it was asked for once

Key = tuple[Any, ...]


class Replay:
    """Launches of one stretch of work, to be started again on the same operands and stream.

    Attributes
    ----------
    starts : functions that start them; each gives a tuple of the driver's error
    held : memory that they use beside that of the operands
    is_whole : whether they are all that the work did on the GPU: not if it took memory, or copied
    """

    __slots__ = ("held", "is_whole", "starts", "thread")

    def __init__(self) -> None:
        self.starts: list[Callable[[], tuple[Any, ...]]] = []
        self.held: list[Any] = []
        self.is_whole, self.thread = True, get_ident()

    def add(self, start: Callable[[], tuple[Any, ...]]) -> None:
        if self.thread == get_ident():
            self.starts.append(start)

    def hold(self, args: tuple[Any, ...]) -> None:
        """Keep what a kernel uses: of ours, because plans are; the rest belongs to operands."""
        if self.thread == get_ident():
            self.held += (block for block in owners_of(args) if isinstance(block, memory.Block))

    def start(self, operands: tuple[Any, ...], stream: streams.Stream) -> None:
        if streams.several:
            memory.note((*owners_of(operands), *self.held), stream)
        for start in self.starts:
            (error,) = start()
            if error:
                raise RuntimeError(f"a kernel was not launched: {error.name}")


def key_of(what: Key, operands: tuple[Any, ...]) -> tuple[Key, streams.Stream] | None:
    """What its launches depend on, `what` beside the operands, and the stream that they go to.

    Operands are arrays of ours or tensors of torch. None where nothing is to be remembered.
    """
    stream = _stream_of(operands[0])
    if stream is None:
        return None
    places = tuple([x.place if type(x) is DeviceArray else tensor_place(x) for x in operands])
    return None if None in places else ((what, stream.handle, places), stream)


def run(
    known: dict[Key, Any], key: Key, work: Callable[[], None], operands: tuple[Any, ...]
) -> None:
    """Do the work, and remember that it was done: when it comes again, its launches."""
    if runtime.recording is not None or known.get(key) is False:
        work()
    elif key not in known:
        if len(known) >= REMEMBERED:
            known.clear()
        work()
        known[key] = None
    else:
        known[key] = _recorded(work, operands) or False


def _recorded(work: Callable[[], None], operands: tuple[Any, ...]) -> Replay | None:
    replay = runtime.recording = Replay()
    try:
        work()
    finally:
        runtime.recording = None
    own = set(map(id, owners_of(operands)))
    replay.held = [block for block in replay.held if id(block) not in own]
    return replay if replay.is_whole and replay.starts else None


def _stream_of(x: Any) -> streams.Stream | None:
    """The stream that a product of x goes to; None while it is captured, or another is in use."""
    stream = streams.current()
    if runtime.capture is not None:
        return None
    if type(x) is not DeviceArray and (handle := stream_handle(x)) != stream.handle:
        if not handle or stream is not streams.DEFAULT:
            return None
        stream = streams.at(handle)
    return None if streams.several and stream.is_captured else stream
