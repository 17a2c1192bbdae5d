"""What orders the accesses of a simulated kernel, as vector clocks.

A thread's clock advances wherever it signals others or waits for them, and with each copy that it
begins or waits for. Of two accesses one happens before the other where the other's thread knew of
the time at which the first was over. So an order is found in whatever order the threads ran.
"""

from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

Times = dict[int, int]  # by the number of a line of times: a thread's, or a post's

COPY = "cp.async"
COPY_ENGINE = "the copy engine"
WGMMA = "wgmma"
MBARRIER = "mbarrier"
APART = (COPY_ENGINE, WGMMA)
"""Units that see what a thread stored only after its fence, `ptx.fence_proxy_async`."""

_lines = count()


class Clock(NamedTuple):
    """Up to which of its times each line is known; empty dicts know nothing."""

    seen: Times
    fenced: Times  # the same for `APART`: a fence followed


NOTHING = Clock({}, {})


class Event(NamedTuple):
    """A thread signals or waits, after so many of its accesses."""

    after: int
    post: "Post | None"  # where
    time: int  # of the post: when its signal is seen, or what it waits for
    waits: bool
    copies: "tuple[Moment, ...]" = ()  # without a post: it waits for these


class Moment:
    """When accesses are made between which nothing happens.

    Attributes
    ----------
    line, time : whose, and when it begins
    clock : what is over by then
    end : what knows this time of this line happens after it; None, nothing does
    unit : what makes the accesses: "", the thread itself, or a unit that it started
    """

    __slots__ = ("clock", "end", "line", "time", "unit")

    def __init__(
        self, line: int, time: int, clock: Clock, end: tuple[int, int] | None, unit: str = ""
    ) -> None:
        self.line, self.time, self.clock, self.end, self.unit = line, time, clock, end, unit

    def before(self, other: "Moment", fenced: bool) -> bool:
        """Whether it is over when `other` begins; with `fenced`, for the units in `APART` too."""
        if self.end is None:
            return False
        line, time = self.end
        if line == other.line and not fenced:
            return time <= other.time
        return (other.clock.fenced if fenced else other.clock.seen).get(line, 0) >= time


class Thread:
    """What a simulated thread did, in its order."""

    def __init__(self, block: tuple[int, ...], number: int) -> None:
        self.block, self.number = block, number  # its number in the block
        self.accesses: list[Any] = []
        self.events: list[Event] = []
        self.barriers = 0  # `syncthreads` that it passed
        self.local_arrays: dict[Any, int] = {}  # bytes of each, by its place in the text
        self.line, self.time = next(_lines), 0
        self.go_on(NOTHING)

    def go_on(self, clock: Clock) -> None:
        self.time += 1
        self.clock = clock
        self.moment = Moment(self.line, self.time, clock, (self.line, self.time))

    def begin(self, unit: str) -> Moment:
        """Have another unit access memory from now on."""
        begun = Moment(self.line, self.time, self.clock, None, unit)
        self.go_on(self.clock)
        return begun

    def waited_for(self, those: Iterable[Moment | None]) -> None:
        """What `begin` gave is over."""
        self.go_on(self.clock)
        copies = tuple(moment for moment in those if moment is not None)
        for moment in copies:
            moment.end = self.line, self.time
        self.events.append(Event(len(self.accesses), None, 0, True, copies))

    def fence(self) -> None:
        """What this thread did, and what it knows of, is seen by all units."""
        seen, fenced = self.clock
        self.go_on(Clock(seen, _latest(fenced, seen, {self.line: self.time})))


class Post:
    """Where threads signal others: a barrier, a phase of an mbarrier, a counter."""

    def __init__(self, phased: bool = False) -> None:
        self.line, self.time = next(_lines), 0
        self.phased = phased  # an mbarrier's
        self.word = NOTHING
        self._left: list[tuple[Clock, Times]] = []
        self._read: dict[Any, Any] = {}  # what readers of a clock know then, for many share one

    def leave(self, thread: Thread) -> None:
        self._left.append((thread.clock, {thread.line: thread.time}))
        thread.events.append(Event(len(thread.accesses), self, self.time + 1, False))
        thread.go_on(thread.clock)

    def close(self) -> list[tuple[int, int, Moment]]:
        """What has been left can be read from now on; (address, nbytes, moment) of what it read."""
        self.time += 1
        clocks = [self.word, *(clock for clock, _ in self._left)]
        own = [{self.line: self.time}, *(times for _, times in self._left)]
        self.word = Clock(
            _latest(*(clock.seen for clock in clocks), *own),
            _latest(*(clock.fenced for clock in clocks)),
        )
        self._left, self._read = [], {}
        return []

    def read(self, thread: Thread, word: Clock | None = None) -> None:
        """Learn what was signalled here, up to the last time or up to an earlier `word`."""
        word = word or self.word
        time = word.seen.get(self.line, 0)
        thread.events.append(Event(len(thread.accesses), self, time, True))
        if word.seen.get(thread.line) == thread.time - 1:  # it knows what it left, no more
            thread.go_on(word)
            return
        both = (thread.clock, word)
        known = self._read.get((id(thread.clock), id(word)))
        if known is None:
            known = both, Clock(*(_latest(*times) for times in zip(*both, strict=True)))
            self._read[id(thread.clock), id(word)] = known
        thread.go_on(known[1])


class Products(Post):
    """A warp in `wgmma`: its lanes learn that what it reads has been read, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._clocks: list[Clock] = []
        self.reads: list[tuple[int, int]] = []  # address and bytes of the operands

    def leave(self, thread: Thread) -> None:
        self._clocks.append(thread.clock)

    def close(self) -> list[tuple[int, int, Moment]]:
        """The reads happen after all that the lanes know of."""
        clock = Clock(
            _common(clock.seen for clock in self._clocks),
            _common(clock.fenced for clock in self._clocks),
        )
        self.time += 1
        moment = Moment(self.line, self.time - 1, clock, (self.line, self.time), WGMMA)
        read = [(*piece, moment) for piece in self.reads]
        self.word = Clock({self.line: self.time}, {})
        self._clocks, self._read, self.reads = [], {}, []
        return read


def _distinct(parts: Iterable[Times]) -> list[Times]:
    return [*{id(part): part for part in parts}.values()]


def _latest(*parts: Times) -> Times:
    """What any of them knows."""
    first, *rest = sorted(_distinct(part for part in parts if part), key=len, reverse=True) or [{}]
    if not rest:
        return first
    latest = dict(first)
    for part in rest:
        for line, time in part.items():
            if latest.get(line, 0) < time:
                latest[line] = time
    return latest


def _common(parts: Iterable[Times]) -> Times:
    """What all of them know."""
    first, *rest = sorted(_distinct(parts), key=len)
    if not rest:
        return first
    return {line: min(time, *(part.get(line, 0) for part in rest)) for line, time in first.items()}
