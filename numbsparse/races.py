"""Races: two threads touch the same bytes, one of them writes, and nothing orders them.

A race need not show: the simulator and most GPUs run threads in an order that is often right. So
results are not looked at, but addresses: the accesses of a block between two `cuda.syncthreads()`,
and those of a lane between two `ptx.sync_warp()`. NVIDIA's `compute-sanitizer --tool racecheck`
does the same on a GPU.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from numbsparse.device import SIMULATED
from numbsparse.device.accesses import Access, Launch, Thread, Watcher

WARP = 32


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

    def __str__(self) -> str:
        does = "writes" if self.others_write else "reads"
        block = " of another block" if self.of_another_block else ""
        return (
            f"{self.kernel}: thread {self.writer} writes to {self.space} memory ({self.written_at})"
            f" what thread {self.other}{block} {does} ({self.others_at}), and no barrier stands "
            f"between; {self.pairs} such pair{'s' * (self.pairs > 1)}"
        )


class _Touch(NamedTuple):
    """An access, and when it was: between which barriers of its block, and of its warp."""

    block: tuple[int, ...]
    thread: int
    barriers: int
    meetings: int
    access: Access


def races(call: Callable[[], Any]) -> list[Race]:
    """Run `call` in the simulator and find the races of the kernels that it launches.

    It sees what these operands make the threads touch; other operands may race where these do not.
    Two threads that write the same value race too.

    Parameters
    ----------
    call : takes nothing; its kernels wait at `cuda.syncthreads()` and `ptx.sync_warp()` alone

    Returns
    -------
    list of Race
        One for each pair of places in the text; empty where all accesses are ordered.

    Raises
    ------
    RuntimeError
        Outside the simulator, and for kernels with the copy engine or `wgmma`, whose threads wait
        for barriers in memory.

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
    if not SIMULATED:
        raise RuntimeError(
            "races are found in the simulator: set NUMBA_ENABLE_CUDASIM=1 before "
            "import; on a GPU use compute-sanitizer --tool racecheck"
        )
    with Watcher().watching() as watcher:
        call()
    return [race for launch in watcher.launches for race in _of_launch(launch)]


def _of_launch(launch: Launch) -> Iterator[Race]:
    name = getattr(launch.kernel, "__name__", "kernel")
    if launch.unseen:
        raise RuntimeError(f"{name} orders its threads by {' and '.join(sorted(launch.unseen))}")
    found: dict[Any, dict[Any, None]] = defaultdict(dict)
    for touches in _by_byte(launch).values():
        writes = [touch for touch in touches if touch.access.writes]
        for one in writes:
            for other in touches:
                if _unordered(one, other):
                    key = one.access.space, one.access.site, other.access.site, other.access.writes
                    found[key][one[:2], other[:2]] = None
    for (space, written, others, others_write), pairs in found.items():
        if (
            others_write
            and (space, others, written, True) in found
            and repr(others) < repr(written)
        ):
            continue  # two places that both write are found from both sides
        (home, writer), (_, other) = pair = next(iter(pairs))
        where = _place(written), other, _place(others), others_write
        yield Race(name, space, writer, *where, pair[1][0] != home, len(pairs))


def _by_byte(launch: Launch) -> dict[Any, list[_Touch]]:
    """Who touches each byte: of shared memory, by block; each thread once in an interval."""
    touches: dict[Any, dict[Any, _Touch]] = defaultdict(dict)
    for thread in sorted(launch.threads, key=lambda thread: (thread.block, thread.number)):
        for touch in _touches(thread):
            access = touch.access
            home = thread.block if access.space == "shared" else None
            for byte in range(access.address, access.address + access.nbytes):
                touches[home, byte].setdefault((*touch[:4], access.site, access.writes), touch)
    return {byte: list(of_byte.values()) for byte, of_byte in touches.items()}


def _touches(thread: Thread) -> Iterator[_Touch]:
    for i, access in enumerate(thread.accesses):
        barriers, meetings = bisect_right(thread.barriers, i), bisect_right(thread.meetings, i)
        yield _Touch(thread.block, thread.number, barriers, meetings, access)


def _unordered(one: _Touch, other: _Touch) -> bool:
    if one.block != other.block:
        return True
    if one.thread == other.thread or one.barriers != other.barriers:
        return False
    return one.thread // WARP != other.thread // WARP or one.meetings == other.meetings


def _place(site: Any) -> str:
    """file:line of a place in the text."""
    code, position = site
    if isinstance(position, tuple):
        line = position[0]
    else:  # the number of an instruction
        line = next(at for start, end, at in code.co_lines() if start <= position < end)
    return f"{Path(code.co_filename).name}:{line}"
