"""What a simulated kernel reads and writes: every access, by thread and by place in the text.

Under a `Watcher` the arrays of kernels (`arrays`) note their accesses, and the instructions of
`kernels.ptx` what they read and write and what orders it (`clocks`).
"""

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from numbsparse.simulator import SIMULATED
from numbsparse.simulator.clocks import WGMMA, Moment, Post, Products, Thread

watcher: "Watcher | None" = None
"""The active one, if any."""

running: Callable[[], Any] = lambda: None  # noqa: E731
"""The simulated thread that runs; set by `threads`, which only the simulator imports."""

_OWN = ("accesses", "arrays", "launch", "threads")
_INSIDE = (
    *(f"numbsparse.simulator.{name}" for name in _OWN),
    "numbsparse.kernels.ptx.",
    "numba.",
    "contextlib",
)
"""Modules between the text of a kernel and this one."""

_ATOMIC = ("numba.cuda.simulator.kernelapi", "numbsparse.kernels.ptx.grid_simulated")
"""Those whose accesses to arrays are atomic."""

_NOTHING = nullcontext()


class Site:
    """A place in a kernel's text, or that of a device function: one object for each.

    It is told apart as such, for a code's hash is that of all that is in it.
    """

    def __init__(self, code: Any, position: Any) -> None:
        self.code, self.position = code, position


class Access(NamedTuple):
    """Neighbouring bytes are read or written. `noted_as` makes one in half of the time."""

    site: Site
    atomic: bool
    space: str  # "global" or "shared"
    writes: bool
    address: int
    nbytes: int
    home: tuple[int, ...] | None  # the block whose shared memory it is
    unit: str  # "", the thread itself, or what does it for the thread
    moment: Moment


noted_as = partial(tuple.__new__, Access)


class Launch(NamedTuple):
    """A kernel that ran under a watcher."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    threads: list[Thread]
    unseen: set[str]  # what moved or read bytes that no thread requested


class Recording(list[Launch]):
    """What the threads did of the kernels that a call launched."""


class Watcher:
    """Collects launches, and what their threads do."""

    def __init__(self) -> None:
        self.launches = Recording()
        self._posts: dict[Any, Post] = {}

    @contextmanager
    def watching(self) -> "Iterator[Watcher]":
        """While this lasts, in the simulator, kernels of every thread are watched."""
        global watcher
        if watcher is not None:
            raise RuntimeError("accesses are already being recorded")
        watcher = self
        try:
            yield self
        finally:
            watcher = None

    def thread(self, worker: Any) -> Thread:
        """What that simulated thread does."""
        if Watcher not in worker.own:
            worker.own[Watcher] = Thread(tuple(worker.blockIdx), worker.thread_id)
            self.launches[-1].threads.append(worker.own[Watcher])
        return worker.own[Watcher]

    def post(self, place: Any, kind: type[Post] = Post) -> Any:
        """What orders the threads that synchronize at this place."""
        if place not in self._posts:
            self._posts[place] = kind()
        return self._posts[place]


def record(call: Callable[[], Any] | Recording) -> Recording:
    """Run `call` in the simulator, once for `count`, `races` and `trace`.

    Parameters
    ----------
    call : function of no arguments

    Returns
    -------
    Recording
        Each of the three takes it instead of a function.

    Raises
    ------
    RuntimeError
        Outside the simulator: set NUMBA_ENABLE_CUDASIM=1 before numba is imported.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.nn.init.uniform(ns.Layout([[1, 0], [1, 1]]), 8, seed=0)
    >>> x = np.ones((4, 16), np.float32)
    >>> if ns.device.SIMULATED:
    ...     recording = ns.testing.record(lambda: ns.matmul(x, w.to("cuda"), kernel="k1_naive"))
    ...     print(ns.testing.races(recording), ns.testing.count(recording)[0].kernel)
    ... else:
    ...     print("[] kernel")
    [] kernel
    """
    if isinstance(call, Recording):
        return call
    if not callable(call):
        raise TypeError(f"call takes a function of no arguments, got {call!r}")
    if not SIMULATED:
        raise RuntimeError(
            "recording needs the simulator: set NUMBA_ENABLE_CUDASIM=1 before import; "
            "on a GPU use compute-sanitizer --tool racecheck, ncu or nsys"
        )
    with Watcher().watching() as watcher:
        call()
    return watcher.launches


def begin_launch(kernel: Any, grid: Any, block: Any) -> None:
    """That kernel is launched next."""
    if watcher is not None:
        watcher.launches.append(Launch(kernel, grid, block, [], set()))
        watcher._posts.clear()


def noted() -> Thread | None:
    """What the running thread did, if there is a watcher; None on the host."""
    if watcher is None:
        return None
    worker = running()
    own = getattr(worker, "own", None)
    return None if own is None else own.get(Watcher) or watcher.thread(worker)


def note(
    space: str,
    writes: bool,
    address: int,
    nbytes: int,
    moment: Moment | None = None,
    home: tuple[int, ...] | None = None,
    unit: str = "",
) -> None:
    """An access by the running thread, or by a unit that it started; to its own block's memory."""
    if (thread := noted()) is not None:
        site, atomic = _site()
        home = (home or thread.block) if space == "shared" else None
        moment = moment or thread.moment
        unit = unit or moment.unit
        access = site, atomic, space, writes, address, nbytes, home, unit, moment
        thread.accesses.append(noted_as(access))


def note_local(nbytes: int) -> None:
    """The running thread has a local array, the same one whenever it comes to this place."""
    if (thread := noted()) is not None:
        thread.local_arrays[_site()] = nbytes


def note_unseen(what: str) -> None:
    """The running kernel uses a unit of the GPU whose accesses are not counted."""
    if watcher is not None:
        watcher.launches[-1].unseen.add(what)


def synchronizing(*place: Any) -> AbstractContextManager[None]:
    """The running thread waits for all that come to that place, and then knows what they did."""
    return _NOTHING if watcher is None else _waiting(place, Post)


def multiplying(*place: Any) -> AbstractContextManager[None]:
    """A warp takes part in `wgmma` meanwhile; its lanes are ordered after its end only."""
    return _NOTHING if watcher is None else _waiting((WGMMA, *place), Products)


@contextmanager
def _waiting(place: Any, kind: type[Post]) -> Iterator[None]:
    thread = noted()
    if watcher is None or thread is None:
        yield
        return
    post = watcher.post(place, kind)
    post.leave(thread)
    turn = post.time + 1
    yield
    if post.time < turn:  # the first to go on
        for address, nbytes, moment in post.close():
            note("shared", False, address, nbytes, moment)
    post.read(thread)


def note_operand(pieces: Iterable[tuple[int, int]], *place: Any) -> None:
    """Of the products that run at that place: (address, nbytes) of what they read."""
    if watcher is not None:
        watcher.post((WGMMA, *place), Products).reads += pieces


def leave(*place: Any) -> None:
    """The running thread signals at that place, and does not wait."""
    thread = noted()
    if watcher is not None and thread is not None:
        watcher.post(place).leave(thread)


def signal(*place: Any) -> None:
    """It signals, and that can be seen at once."""
    leave(*place)
    if watcher is not None:
        watcher.post(place).close()


def observe(*place: Any) -> None:
    """It sees what was signalled at that place."""
    thread = noted()
    if watcher is not None and thread is not None:
        watcher.post(place).read(thread)


def begin(unit: str) -> Moment | None:
    """The running thread has another unit access memory from now on."""
    thread = noted()
    return None if thread is None else thread.begin(unit)


def waited_for(those: Iterable[Moment | None]) -> None:
    """The running thread knows that what `begin` gave is over."""
    if (thread := noted()) is not None:
        thread.waited_for(those)


def _site() -> tuple[Site, bool]:
    """Where in a kernel's text, or that of a device function, the running access is; atomic?"""
    frame: Any = sys._getframe(3)  # who notes it is one of those inside
    atomic = False
    while _inside[name := frame.f_globals["__name__"]]:
        atomic = atomic or name in _ATOMIC
        frame = frame.f_back
    return site_of(frame), atomic


def site_of(frame: Any) -> Site:
    """Where in its text a frame is."""
    code, instruction = frame.f_code, frame.f_lasti
    known = _sites.get((id(code), instruction))
    if known is None or known[0] is not code:
        known = code, _site_at(code, _place(code, instruction))
        _sites[id(code), instruction] = known
    return known[1]


_sites: dict[tuple[int, int], tuple[Any, Site]] = {}  # and the code, which stays alive


@cache
def _site_at(code: Any, position: Any) -> Site:
    return Site(code, position)


class _Inside(dict[str, bool]):
    """Whether a module is one of those, found once."""

    def __missing__(self, module: str) -> bool:
        self[module] = module.startswith(_INSIDE)
        return self[module]


_inside = _Inside()


def _place(code: Any, instruction: int) -> Any:
    """Lines and columns, where Python knows them: it renumbers an instruction once it is warm.

    Else the number of the instruction, caches that follow it left out.
    """
    if hasattr(code, "co_positions"):
        position = next(islice(code.co_positions(), instruction // 2, None))
        if position[2] is not None:
            return position
    starts = (each.offset for each in dis.get_instructions(code))
    return max(start for start in starts if start <= instruction)


def line_of(site: Site) -> str:
    """file:line of a place in the text."""
    code, position = site.code, site.position
    if isinstance(position, tuple):
        line = position[0]
    else:  # the number of an instruction
        line = next(at for start, end, at in code.co_lines() if start <= position < end)
    return f"{file_of(code)}:{line}"


def file_of(code: Any) -> str:
    """Its name; of a package's own file that of the folder too."""
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
