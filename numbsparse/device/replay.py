"""Launches that come again on the same memory: recorded the second time, then only started.

A product of few rows takes the GPU less time than the host needs to check its operands, to choose a
kernel and to work out its arguments. All that follows from where the operands are and from their
shapes, and training goes over the same memory step after step.
"""

from collections.abc import Callable
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

from numbsparse.device import memory, runtime, streams
from numbsparse.device.array import DeviceArray, owners_of
from numbsparse.device.capture import Arena
from numbsparse.device.torch_tensors import identity as identity_of_tensor
from numbsparse.device.torch_tensors import stream_handle

REMEMBERED = 4096  # of a layout, and of what it was asked for once
TRIES = 3  # recordings: the first on memory of its own may copy plans for it, which stay
MOST_BYTES = 1 << 26  # of a piece of memory; what works on more takes the GPU longer than the host

Key = tuple[Any, ...]

# What work takes for itself while it is recorded: all replays of a thread on a stream use it, one
# after another.
_arenas: WeakValueDictionary[tuple[int, int], Arena] = WeakValueDictionary()


class Replay:
    """Launches of one stretch of work, to be started again on the same operands and stream.

    Attributes
    ----------
    starts : functions that start them; each gives a tuple of the driver's error
    held : memory of the GPU that they use beside that of the operands
    used : of the host
    is_whole : whether they are all that the work did on the GPU: not if it copied
    tries : how often the same work was recorded
    thread : the one that may start them, where they use memory that it took; None: all may
    """

    __slots__ = ("held", "is_whole", "starts", "thread", "tries", "used")

    def __init__(self) -> None:
        self.thread: int | None = None
        self.starts: list[Callable[[], tuple[Any, ...]]] = []
        self.held: list[Any] = []
        self.used: list[Any] = []
        self.is_whole, self.tries = True, 1

    def add(self, start: Callable[[], tuple[Any, ...]], used: Any = None) -> None:
        """Start this too, which uses some memory of the host."""
        self.starts.append(start)
        self.used.append(used)

    def hold(self, args: tuple[Any, ...]) -> None:
        """Keep what a kernel uses: of ours, because plans are; the rest belongs to operands."""
        blocks = (block for block in owners_of(args) if isinstance(block, memory.Block))
        self.held += (block for block in blocks if not block.stays)

    def takes(self, nbytes: int) -> bool:
        """Whether so much memory may be held for work that comes again; else it is not recorded."""
        if nbytes > MOST_BYTES:
            self.is_whole, self.tries = False, TRIES
        return nbytes <= MOST_BYTES

    def allocate(self, nbytes: int, stream: streams.Stream) -> memory.Block:
        """Memory for this work alone, which leaves nothing there; of few sizes, which all share."""
        self.thread = get_ident()
        arena = _arenas.setdefault((self.thread, stream.handle), Arena())
        self.held.append(arena)
        return arena.allocate(1 << (nbytes - 1).bit_length())

    @property
    def is_elsewhere(self) -> bool:
        """Whether only another thread may start them."""
        return self.thread is not None and self.thread != get_ident()

    def start(self, operands: tuple[Any, ...], stream: streams.Stream) -> None:
        if streams.several and operands:  # what is held was noted as it was recorded
            memory.note(owners_of(operands), stream)
        for start in self.starts:
            (error,) = start()
            if error and (error := stream.retried(start)):
                raise RuntimeError(f"a kernel was not launched: {error.name}")


SEEN = Replay()  # of work that came once
SEEN.is_whole, SEEN.tries = False, 0


def replayed(
    known: dict[Key, Replay], what: Key, operands: tuple[Any, ...], work: Callable[[], Any]
) -> None:
    """Do the work on operands, arrays of ours or tensors of torch; or only start its launches.

    They are recorded when it comes for the second time, or again if that copies. They depend on
    `what`, on the stream, and on the operands' addresses and strides.
    """
    stream = _stream_of(operands[0])
    if stream is None or runtime.recording() is not None:
        work()
        return
    identities = tuple(
        [x.identity if type(x) is DeviceArray else identity_of_tensor(x) for x in operands]
    )
    if None in identities:
        work()
    else:
        repeated(known, (what, stream.handle, identities), operands, stream, work)


def repeated(
    known: dict[Key, Replay], key: Key, operands: Any, stream: Any, work: Callable[[], Any]
) -> None:
    """`replayed` of work that depends on the key alone."""
    replay = known.get(key)
    if replay is None:
        work()
        if len(known) >= REMEMBERED:
            known.clear()
        known[key] = SEEN
    elif replay.is_whole and not replay.is_elsewhere:
        replay.start(operands, stream)
    elif replay.is_whole or replay.tries >= TRIES:
        work()
    else:
        known[key] = _recorded(work, operands, replay.tries + 1)


def apart(work: Callable[[], Any]) -> tuple[Any, Replay]:
    """(what the work gives, its launches); whoever records meanwhile does not have these."""
    replay = Replay()
    token = runtime.replay.set(replay)
    try:
        return work(), replay
    finally:
        runtime.replay.reset(token)


def _recorded(work: Callable[[], None], operands: tuple[Any, ...], tries: int) -> Replay:
    _, replay = apart(work)
    replay.tries = max(replay.tries, tries)
    own = set(map(id, owners_of(operands)))
    replay.held = [block for block in replay.held if id(block) not in own]
    if not (replay.is_whole and replay.starts):
        replay.is_whole, replay.starts, replay.used = False, [], []
        kept = Arena if replay.tries < TRIES else ()  # whose addresses the next one finds again
        replay.held = [block for block in replay.held if isinstance(block, kept)]
    return replay


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
