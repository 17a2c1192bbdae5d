"""What the warps of a simulated kernel did, and when.

The simulator runs one thread after another; here they are put side by side. Time is counted in
steps. What a warp does begins as early as possible: after what it did before, and what it waits
for. It takes one step; a copy, `wgmma` and a load that is new to the warp take LATENCY. So this
shows what waits for what, and not the time that a GPU takes.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from typing import Any

from numbsparse.simulator.accesses import Access, Launch
from numbsparse.simulator.clocks import COPY, COPY_ENGINE, MBARRIER, WGMMA, Event, Thread
from numbsparse.simulator.counting import WARP, sectors_of

LATENCY = 8
STEPS = {"wait": 0, "multiply": LATENCY}
LATE = ("load", "copy", "copy out")  # over after LATENCY, though the warp goes on
OF_DATA = ("store", "write", "copy")  # they take what was loaded: a value, or an address
KINDS = {
    ("global", False): "load",
    ("global", True): "write",
    ("shared", False): "read",
    ("shared", True): "store",
}

Warp = tuple[tuple[int, ...], int]  # its block, and its number there


class Action:
    """What the lanes of a warp do together.

    Attributes
    ----------
    event, accesses : a signal or a wait, or else the accesses of all lanes
    lanes : whose each access is
    copies : the moments of those that it waits for
    begin, start, end, over : when the warp comes to it, has waited, goes on; what it began is over
    """

    def __init__(self, event: Event | None) -> None:
        self.event = event
        self.accesses: list[Access] = []
        self.lanes: list[int] = []
        self.copies: list[Any] = []
        self.begin = self.start = self.end = self.over = 0

    @cached_property
    def kind(self) -> str:
        """ "wait", "signal", "multiply", "copy", "copy out", or one of KINDS."""
        if self.event is not None:
            return "wait" if self.event.waits else "signal"
        first = self.accesses[0]
        if first.unit == WGMMA:
            return "multiply"
        if first.unit in (COPY, COPY_ENGINE):
            return "copy" if (first.space == "shared") == first.writes else "copy out"
        return KINDS[first.space, first.writes]

    @cached_property
    def awaits(self) -> set[Hashable]:
        """What must be over before: a phase of a post, or copies."""
        if self.event is None or not self.event.waits:
            return set()
        post = self.event.post
        return {(post.line, self.event.time)} if post else {id(copy) for copy in self.copies}

    @cached_property
    def ends(self) -> set[Hashable]:
        """What cannot be over before this is."""
        if self.event is None:
            moments = [access.moment for access in self.accesses if access.moment.unit]
            return {id(moment) for moment in moments} | {moment.end for moment in moments}
        post = self.event.post
        return set() if self.event.waits or post is None else {(post.line, self.event.time)}


def actions_of(launch: Launch) -> dict[Warp, list[Action]]:
    """What each warp did, in its order."""
    threads = sorted(launch.threads, key=attrgetter("block", "number"))
    of_warp = groupby(threads, key=lambda thread: (thread.block, thread.number // WARP))
    warps = {place: _together([*lanes]) for place, lanes in of_warp}
    _set_times([*warps.values()])
    return warps


def _together(lanes: list[Thread]) -> list[Action]:
    """What each lane did, put together where lanes did the same for the same time."""
    queues = [deque(_own(lane)) for lane in lanes]
    missing = Counter(step[0] for queue in queues for step in queue)
    actions = []
    while waiting := [queue for queue in queues if queue]:
        heads: dict[Any, list[Any]] = defaultdict(list)
        for queue in waiting:
            heads[queue[0][0]].append(queue)
        name = next((n for n, those in heads.items() if len(those) == missing[n]), waiting[0][0][0])
        missing[name] -= len(heads[name])
        action = Action(heads[name][0][0][2])
        for queue in heads[name]:
            _, accesses, event, lane = queue.popleft()
            action.accesses += accesses
            action.lanes += [lane] * len(accesses)
            action.copies += event.copies if event else ()
        actions.append(action)
    return actions


def _own(thread: Thread) -> Iterator[tuple[Any, list[Access], Event | None, int]]:
    """What a thread did: a name that other lanes have for it, accesses or an event, its lane."""
    times: Counter[Any] = Counter()
    lane, at = thread.number % WARP, 0
    for event in [*thread.events, None]:
        until = len(thread.accesses) if event is None else event.after
        for accesses in _instructions(thread.accesses[at:until]):
            if accesses:
                first = accesses[0]
                name: Any = first.site, first.space, first.writes, first.unit
                if first.unit == WGMMA:  # noted by whichever lane comes first
                    name = first.moment.line, first.moment.time
                times[name] += 1
                yield (name, times[name]), accesses, None, lane
        at = until
        if event is not None:
            name = event.waits, event.post and event.post.line, event.time
            times[name] += 1
            yield (name, times[name]), [], event, lane


def _instructions(accesses: list[Access]) -> Iterator[list[Access]]:
    """Each access by itself, or all that another unit makes for the thread at a time."""
    for moment, run in groupby(accesses, key=attrgetter("moment")):
        if moment.unit:
            yield [access for access in run if access.unit != MBARRIER]
        else:
            yield from ([access] for access in run if access.unit != MBARRIER)


class _Clock:
    """How far a warp is."""

    def __init__(self, actions: list[Action]) -> None:
        self.left = deque(actions)
        self.now = self.loaded = 0  # loaded: when its loads are over
        self.near: set[int] = set()  # sectors that it has loaded

    def run(self, over: dict[Hashable, int]) -> Action:
        """The next action; `over` knows when what it awaits is, and then when what it ends is."""
        action = self.left.popleft()
        action.begin, kind = self.now, action.kind
        ready = [over[key] for key in action.awaits]
        if kind in OF_DATA:
            ready.append(self.loaded)
        action.start = max([self.now, *ready])
        whole_block = kind == "signal" and not action.event.post.phased  # type: ignore[union-attr]
        self.now = action.end = action.start + (0 if whole_block else STEPS.get(kind, 1))
        action.over = action.start + LATENCY if kind in LATE else action.end
        if kind == "load":
            sectors = {sector for access in action.accesses for sector in sectors_of(access)}
            if not sectors <= self.near:
                self.loaded = max(self.loaded, action.over)
                self.near |= sectors
        for key in action.ends:
            over[key] = max(over[key], action.over)
        return action


def _set_times(warps: list[list[Action]]) -> None:
    """All as early as possible."""
    missing = Counter(key for actions in warps for action in actions for key in action.ends)
    over: dict[Hashable, int] = defaultdict(int)
    clocks = [_Clock(actions) for actions in warps]
    while waiting := [clock for clock in clocks if clock.left]:
        ready = [clock for clock in waiting if not any(missing[k] for k in clock.left[0].awaits)]
        for clock in ready or waiting[:1]:  # lanes of one warp may wait for each other
            missing.subtract(clock.run(over).ends)
