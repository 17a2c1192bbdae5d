"""Races: two threads touch the same bytes, one of them writes, and nothing orders them.

A race need not show: the simulator and most GPUs run threads in an order that is often right. So
results are not looked at, but addresses, and what orders the accesses to them: barriers of a block,
of a warp and of a cluster, mbarriers, counters, and waiting for a copy. A copy that a thread begins
lasts until it has waited for it, and `wgmma` and the copy engine see what threads store only behind
a fence. NVIDIA's `compute-sanitizer --tool racecheck` looks for the same on a GPU.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from typing import Any, NamedTuple

from numbsparse.simulator.accesses import Access, Launch, Recording, Site, line_of, record
from numbsparse.simulator.clocks import APART, COPY, COPY_ENGINE, WGMMA

_WHO = {
    "": "thread {}",
    COPY: "the copy that thread {} began",
    COPY_ENGINE: "the copy engine, started by thread {},",
    WGMMA: "wgmma of the warp of thread {}",
}


class Race(NamedTuple):
    """Two places of a kernel's text that race. `str` says it in a sentence."""

    kernel: str
    space: str  # "global" or "shared"
    writer: int  # the number of a thread in its block
    written_at: str  # file:line
    other: int
    others_at: str
    others_write: bool
    of_another_block: bool  # the other thread
    pairs: int  # of threads for which it was found
    units: tuple[str, str] = ("", "")  # who wrote, who else: "", the thread, or what it started

    def __str__(self) -> str:
        writer, other = (
            _WHO.get(unit, _WHO[""]).format(thread)
            for unit, thread in zip(self.units, (self.writer, self.other), strict=True)
        )
        does = "writes" if self.others_write else "reads"
        block = " of another block" if self.of_another_block else ""
        lacks = "no barrier stands between" if self.units == ("", "") else "neither waits"
        return (
            f"{self.kernel}: {writer} writes to {self.space} memory ({self.written_at}) what "
            f"{other}{block} {does} ({self.others_at}), and {lacks}; "
            f"{self.pairs} such pair{'s' * (self.pairs > 1)}"
        )


class _Touch(NamedTuple):
    """An access, and the thread that made it or had it made."""

    block: tuple[int, ...]
    thread: int
    access: Access


_touch = partial(tuple.__new__, _Touch)  # in half of the time


def races(call: Callable[[], Any] | Recording) -> list[Race]:
    """Run `call` in the simulator and find the races of the kernels that it launches.

    It sees what these operands make the threads touch; other operands may race where these do not.
    Two threads that write the same value race too, unless both do so by `cuda.atomic`.

    Parameters
    ----------
    call : function of no arguments, or what `record` gave

    Returns
    -------
    list of Race
        One for each pair of places in the code; empty if all accesses are ordered.

    Raises
    ------
    RuntimeError
        Outside the simulator.

    Examples
    --------
    >>> from numba import cuda, float32
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.device.launch import launch
    >>> @cuda.jit
    ... def shift_kernel(x, y):
    ...     t, tile = cuda.threadIdx.x, cuda.shared.array(4, float32)
    ...     tile[t] = x[t]
    ...     cuda.syncthreads()
    ...     y[t] = tile[(t + 1) % 4]
    >>> x, y = ns.to_device(np.arange(4, dtype=np.float32)), ns.to_device(np.zeros(4, np.float32))
    >>> ns.testing.races(lambda: launch(shift_kernel, 1, 4, x, y)) if ns.device.SIMULATED else []
    []
    """
    return [race for launch in record(call) for race in _of_launch(launch)]


def _of_launch(launch: Launch) -> Iterator[Race]:
    name = getattr(launch.kernel, "__name__", "kernel")
    found: dict[Any, dict[Any, None]] = defaultdict(dict)
    for touches in _by_bytes(launch):
        for one in touches:
            for other in touches if one.access.writes else ():
                if _unordered(one.access, other.access):
                    places = (
                        (one.access.site, one.access.unit),
                        (other.access.site, other.access.unit),
                    )
                    key = one.access.space, *places, other.access.writes
                    found[key][one[:2], other[:2]] = None
    for (space, written, others, others_write), pairs in found.items():
        if (
            others_write
            and (space, others, written, True) in found
            and _in_text(others) < _in_text(written)
        ):
            continue  # two places that both write are found from both sides
        (home, writer), (_, other) = pair = next(iter(pairs))
        where = line_of(written[0]), other, line_of(others[0]), others_write
        units = written[1], others[1]
        yield Race(name, space, writer, *where, pair[1][0] != home, len(pairs), units)


def _by_bytes(launch: Launch) -> Iterator[list[_Touch]]:
    """Those who touch the same bytes, each once at a time and a place: all such lists."""
    homes: dict[Any, list[_Touch]] = defaultdict(list)
    for thread in sorted(launch.threads, key=lambda thread: (thread.block, thread.number)):
        for access in thread.accesses:
            homes[access.home].append(_touch((thread.block, thread.number, access)))
    numbers: dict[Any, int] = {}  # of what is done at a time and a place in the text
    seen = set()
    for of_home in homes.values():
        grain = gcd(*{a.address for _, _, a in of_home}, *{a.nbytes for _, _, a in of_home})
        written: set[int] = set()
        for _, _, access in of_home:
            if access.writes:
                written.update(range(access.address, access.address + access.nbytes, grain))
        touches: dict[int, dict[int, _Touch]] = defaultdict(dict)
        for touch in of_home:
            site, atomic, _, writes, address, nbytes, _, unit, moment = touch[2]
            places = (address,) if nbytes == grain else range(address, address + nbytes, grain)
            if written.isdisjoint(places):  # what nobody writes
                continue
            number = numbers.setdefault((id(moment), site, unit, writes, atomic), len(numbers))
            for place in places:
                touches[place].setdefault(number, touch)
        for each in touches.values():
            if (those := tuple(each)) not in seen:
                seen.add(those)
                yield [*each.values()]


def _in_text(place: tuple[Site, str]) -> str:
    site, unit = place
    return repr((site.code, site.position, unit))


def _unordered(one: Access, other: Access) -> bool:
    if one.moment is other.moment or (one.atomic and other.atomic):
        return False
    return not (_before(one, other) or _before(other, one))


def _before(one: Access, other: Access) -> bool:
    fenced = one.writes and one.unit not in APART and other.unit in APART and not other.writes
    return one.moment.before(other.moment, fenced)
