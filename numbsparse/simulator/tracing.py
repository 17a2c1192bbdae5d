"""What a kernel did in the simulator, as a picture shows it: warps, stages, sectors and banks."""

import linecache
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numbsparse.simulator.accesses import Access, Launch, Recording, Site, file_of, line_of, record
from numbsparse.simulator.actions import Action, actions_of
from numbsparse.simulator.clocks import COPY, COPY_ENGINE
from numbsparse.simulator.counting import OWN, units_of

GRAIN = 16  # bytes of shared memory whose history is kept together
LEAST = 128  # bytes of a stage


class Span(NamedTuple):
    """What a warp does for some steps, or what happens to a stage."""

    begin: int
    end: int
    what: str  # of WHAT for a warp; "filled", "full" or "read" for a stage
    number: int | None = None  # the stage that a warp uses; which filling of the stage it is


class Stage(NamedTuple):
    """Shared memory that is always filled together; small parts are left out."""

    nbytes: int
    spans: list[Span]


class Request(NamedTuple):
    """What the lanes of a warp access together, or the copy engine at once: a place's costliest.

    For global memory `units` are sectors of 32 bytes, for shared memory wavefronts.
    """

    place: str  # file:line
    text: str  # the code
    writes: bool
    accesses: list[Access]
    lanes: list[int]
    units: int
    least: int
    times: int  # requests at this place


@dataclass(frozen=True)
class Trace:
    """The first block of threads of one launch. A notebook shows it as a picture.

    Attributes
    ----------
    kernel, grid, threads : its name, its blocks and the threads of each
    warps : for each warp what it does, as spans of steps
    stages : what happens to each part of shared memory
    sectors, banks : requests to global and to shared memory, one for each place in the code
    """

    kernel: str
    grid: tuple[int, ...]
    threads: int
    warps: list[list[Span]]
    stages: list[Stage]
    sectors: list[Request]
    banks: list[Request]

    def svg(self) -> str:
        """The picture, as the text of an SVG file."""
        from numbsparse.simulator.pictures import picture

        return picture(self)

    def save(self, path: str | Path) -> None:
        """Write the picture to a file whose name ends in .svg."""
        if Path(path).suffix != ".svg":
            raise ValueError(f"path takes a name that ends in .svg, got {path}")
        Path(path).write_text(self.svg(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg()


def trace(call: Callable[[], Any] | Recording) -> list[Trace]:
    """Run `call` in the simulator and trace the kernels that it launches.

    A trace shows four things of the first block of threads: when its warps fetch, wait, read and
    release; when each stage of shared memory is filled and read; which sectors of global memory a
    warp's request touches; and which banks of shared memory its lanes use.

    Parameters
    ----------
    call : function of no arguments, or what `record` gave

    Returns
    -------
    list of Trace, one for each launch, in order
        `save("trace.svg")` writes a picture; a notebook shows it.

    Raises
    ------
    RuntimeError
        Outside the simulator: set NUMBA_ENABLE_CUDASIM=1 before numba is imported.

    Notes
    -----
    Time is counted in steps, not in a GPU's cycles: whatever a warp does takes a step, and begins
    as early as what it did before and what it waits for allow; a load from global memory that is
    new to the warp, a copy and `wgmma` take eight. So the picture shows who waits for whom.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.nn.init.uniform(ns.Layout([[1, 0], [1, 1]]), 8, seed=0)
    >>> x = np.ones((4, 16), np.float32)
    >>> if ns.device.SIMULATED:
    ...     (traced,) = ns.testing.trace(lambda: ns.matmul(x, w.to("cuda"), kernel="k3_registers"))
    ...     print(len(traced.stages))
    ... else:
    ...     print(1)
    1
    """
    return [_of_launch(launch) for launch in record(call)]


def _of_launch(launch: Launch) -> Trace:
    warps, code = actions_of(launch), launch.kernel.fn.__code__
    block = min((place for place, _ in warps), default=())
    memory = _Memory(block, [*warps.values()])
    own = [actions for (place, _), actions in warps.items() if place == block]
    requests = [*_requests(own)]
    return Trace(
        f"{code.co_name} of {file_of(code)}",
        launch.grid if isinstance(launch.grid, tuple) else (launch.grid,),
        sum(thread.block == block for thread in launch.threads),
        [[*_spans(actions, memory)] for actions in own],
        memory.stages,
        [request for space, request in requests if space == "global"],
        [request for space, request in requests if space == "shared"],
    )


class _Memory:
    """The shared memory of a block: what was filled together, and when it was read."""

    def __init__(self, block: Any, warps: list[list[Action]]) -> None:
        history: dict[int, list[int]] = defaultdict(list)  # the fillings of each GRAIN of bytes
        writes: dict[int, list[Action]] = defaultdict(list)  # by the number of a filling
        reads: list[tuple[Action, int]] = []
        numbers: dict[Any, int] = {}
        kinds: dict[int, tuple[Any, Any]] = {}  # a filling's name, or the phase that it ends with
        named = [pair for actions in warps for pair in _fillings(actions)]
        for name, action in sorted(named, key=lambda pair: pair[1].start):
            for access in action.accesses:
                grains = range(
                    access.address // GRAIN, (access.address - 1 + access.nbytes) // GRAIN + 1
                )
                if access.home == block and not access.writes:
                    reads += [(action, grain) for grain in {grains[0], grains[-1]}]
                elif access.home == block:
                    end = access.moment.end
                    number = numbers.setdefault(name or end, len(numbers))
                    kinds[number] = name, end
                    writes[number].append(action)
                    for grain in grains:
                        if history[grain][-1:] != [number]:
                            history[grain].append(number)
        # Copies that end at one mbarrier fill one stage, even if not all fill all of it.
        where = {n: end[:1] if name is None else n for n, (name, end) in kinds.items()}
        parts: dict[Any, list[int]] = defaultdict(list)
        for grain, filled in history.items():
            parts[tuple(dict.fromkeys(where[n] for n in filled))].append(grain)
        large = [
            (sorted({n for grain in grains for n in history[grain]}), grains)
            for grains in parts.values()
            if len(grains) * GRAIN >= LEAST
        ]
        large.sort(key=lambda part: (part[0][0], min(part[1])))
        self._stages = {grain: i for i, (_, grains) in enumerate(large) for grain in grains}
        self._posts: dict[int, int] = {}  # the stage that an mbarrier is for
        for actions in warps:
            self._name_posts(actions)
        readers: dict[int | None, list[Action]] = defaultdict(list)
        for action, grain in reads:
            readers[self._stages.get(grain)].append(action)
        self.stages = [
            Stage(len(grains) * GRAIN, [*_of_stage([writes[n] for n in filled], readers[i])])
            for i, (filled, grains) in enumerate(large)
        ]

    def stage(self, action: Action) -> int | None:
        """The one that an action uses or waits for, if any."""
        if action.event is not None:
            return self._posts.get(action.event.post.line) if action.event.post else None
        grains = (a.address // GRAIN for a in action.accesses if a.space == "shared")
        return next((self._stages[grain] for grain in grains if grain in self._stages), None)

    def _name_posts(self, actions: list[Action]) -> None:
        """Copies end at a stage's barrier; who has read the stage signals at its other one."""
        last: int | None = None
        for action in actions:
            stage = self.stage(action)
            if action.event is None and stage is not None:
                last = stage
                ends = (a.moment.end for a in action.accesses if a.unit == COPY_ENGINE and a.writes)
                self._posts |= {end[0]: stage for end in ends if end}
            elif action.kind == "signal" and action.event.post.phased and last is not None:  # type: ignore[union-attr]
                self._posts.setdefault(action.event.post.line, last)  # type: ignore[union-attr]


def _fillings(actions: list[Action]) -> Iterator[tuple[Any, Action]]:
    """Actions, and what all warps call the filling that each is part of.

    `cp.async` is named by the wait that it is over at, a store by the waits before it; a copy of
    the engine has no name here: it ends with a phase of an mbarrier.
    """
    over: dict[int, int] = {}
    for number, action in enumerate(a for a in actions if a.event and not a.event.post):
        over |= {id(copy): number for copy in action.copies}
    waits = 0
    for action in actions:
        waits += action.kind == "wait"
        if action.event is None:
            first = action.accesses[0]
            name = (
                ("copies", over.get(id(first.moment))) if first.unit == COPY else ("stores", waits)
            )
            yield None if first.unit == COPY_ENGINE else name, action


def _of_stage(fillings: list[list[Action]], reads: list[Action]) -> Iterator[Span]:
    """What happens to a stage: it is filled, is full until somebody reads it, and is read."""
    starts = [min(action.start for action in those) for those in fillings]
    for number, (those, until) in enumerate(zip(fillings, [*starts[1:], None], strict=True)):
        full = max(action.over for action in those)
        yield Span(starts[number], full, "filled", number)
        read = [a for a in reads if full <= a.start and (until is None or a.start < until)]
        if read:
            first, last = min(a.start for a in read), max(a.end for a in read)
            if first > full:
                yield Span(full, first, "full", number)
            yield Span(first, last, "read", number)


def _spans(actions: Iterable[Action], memory: _Memory) -> Iterator[Span]:
    """What a warp does, neighbours that are alike in one."""
    last: Span | None = None
    for action in actions:
        stage = memory.stage(action)
        waited = Span(action.begin, action.start, "wait", stage if action.event else None)
        for span in (waited, Span(action.start, action.end, action.kind, stage)):
            if span.end == span.begin:
                continue
            if last and (last.what, last.number, last.end) == (span.what, span.number, span.begin):
                span = last._replace(end=span.end)
            elif last:
                yield last
            last = span
    if last:
        yield last


def _requests(warps: Iterable[list[Action]]) -> Iterator[tuple[str, Request]]:
    """For each place in the code the costliest request, in the order of the text."""
    found: dict[Any, list[list[Any]]] = defaultdict(list)
    for actions in warps:
        for action in actions:
            kinds: dict[Any, list[Any]] = defaultdict(list)
            for access, lane in zip(action.accesses, action.lanes, strict=True):
                if access.unit in OWN or (access.unit, access.space) == (COPY_ENGINE, "global"):
                    kinds[access.site, access.space, access.writes].append((access, lane))
            for kind, pairs in kinds.items():
                found[kind].append(pairs)
    for (site, space, writes), requests in sorted(found.items(), key=_in_text):
        costs = [units_of(space, [access for access, _ in pairs]) for pairs in requests]
        i = max(range(len(costs)), key=lambda i: costs[i][0] - costs[i][1])
        accesses, lanes = ([*each] for each in zip(*requests[i], strict=True))
        what = line_of(site), _text(site), writes, accesses, lanes
        yield space, Request(*what, *costs[i], len(requests))


def _in_text(item: Any) -> Any:
    site = item[0][0]
    return site.code.co_filename, str(type(site.position)), site.position


def _text(site: Site) -> str:
    """The code of an access, where Python knows it."""
    code, position = site.code, site.position
    if not isinstance(position, tuple):
        return ""
    line, last_line, begin, end = position
    lines = [linecache.getline(code.co_filename, n) for n in range(line, last_line + 1)]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return " ".join(text.strip() for text in lines)
