"""What a simulated kernel reads and writes: every access, by thread and by place in the text.

Under a `Watcher` the arrays of kernels note what is asked of them. Local arrays are registers, and
are not watched; of the copy engine and of `wgmma` it is noted that they were at work, no more.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

watcher: Watcher | None = None
"""Who watches, if anybody."""

_INSIDE = ("numba.", "numbsparse.device.", "numbsparse.kernels.ptx.")
"""Modules between the text of a kernel and this one."""


class Access(NamedTuple):
    """One thread reads or writes neighbouring bytes."""

    site: Any  # the code, and the place in it
    space: str  # "global" or "shared"
    writes: bool
    address: int
    nbytes: int


class Thread(NamedTuple):
    """What a simulated thread did, in its order."""

    block: tuple[int, ...]
    number: int  # in its block
    accesses: list[Access]
    barriers: list[int]  # of each `syncthreads`, how many accesses came before it
    meetings: list[int]  # the same of each `ptx.sync_warp`


class Launch(NamedTuple):
    """A kernel that ran under a watcher."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    threads: list[Thread]
    unseen: set[str]  # what moved or read bytes that no thread asked for


class Watcher:
    """Collects launches, and what their threads do."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    @contextmanager
    def watching(self) -> Iterator[Watcher]:
        """While this lasts, in the simulator, kernels of every thread are watched."""
        global watcher
        if watcher is not None:
            raise RuntimeError("somebody watches already")
        watcher = self
        try:
            yield self
        finally:
            watcher = None

    def note_barrier(self, thread: Any) -> None:
        """That thread is at a barrier of its block."""
        noted = self._thread(thread)
        noted.barriers.append(len(noted.accesses))

    def note(self, space: str, writes: bool, address: int, nbytes: int) -> None:
        """An access by the running thread; the host's own are none."""
        thread: Any = threading.current_thread()
        if hasattr(thread, "own"):
            access = Access(_site(), space, writes, address, nbytes)
            self._thread(thread).accesses.append(access)

    def _thread(self, thread: Any) -> Thread:
        known: Thread | None = thread.own.get(Watcher)
        if known is None:
            known = Thread(tuple(thread.blockIdx), thread.thread_id, [], [], [])
            thread.own[Watcher] = known
            self.launches[-1].threads.append(known)
        return known


class Shared(np.ndarray):  # type: ignore[type-arg]
    """An array in shared memory that is watched."""

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if not isinstance(found, np.ndarray):
            _note(self, "shared", False, place)
        return found

    def __setitem__(self, place: Any, value: Any) -> None:
        _note(self, "shared", True, place)
        super().__setitem__(place, value)


def in_global_memory(array: np.ndarray) -> Any:
    """What the simulator's kernels take; watched, if anybody watches."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    if watcher is None:
        return FakeCUDAArray(array)

    class Global(FakeCUDAArray):  # type: ignore[misc]
        """An array in global memory that is watched."""

        def __getitem__(self, place: Any) -> Any:
            found = self._ary[place]
            if isinstance(found, np.ndarray):
                return Global(found)
            _note(self._ary, "global", False, place)
            return found

        def __setitem__(self, place: Any, value: Any) -> None:
            _note(self._ary, "global", True, place)
            self._ary[place] = value

    return Global(array)


def note_piece(array: Any, writes: bool, piece: np.ndarray) -> None:
    """An access to neighbouring bytes of an array at once, by an instruction of `kernels.ptx`."""
    if watcher is not None and piece.nbytes and type(array) is not np.ndarray:
        space = "shared" if isinstance(array, Shared) else "global"
        watcher.note(space, writes, piece.ctypes.data, piece.nbytes)


def note_meeting() -> None:
    """The running thread is at a barrier of its warp."""
    if watcher is not None:
        noted = watcher._thread(threading.current_thread())
        noted.meetings.append(len(noted.accesses))


def note_unseen(what: str) -> None:
    """The running kernel uses a unit of the GPU whose accesses are not counted."""
    if watcher is not None:
        watcher.launches[-1].unseen.add(what)


def _note(array: np.ndarray, space: str, writes: bool, place: Any) -> None:
    """An access to one value, or to those of a slice, one after the other."""
    if watcher is None:
        return
    named = np.asarray(array)[place]
    if isinstance(named, np.ndarray):
        array = named
        every: Iterable[tuple[Any, ...]] = np.ndindex(named.shape)
    else:
        every = [place if isinstance(place, tuple) else (place,)]
    for places in every:
        axes = zip(places, array.shape, array.strides, strict=True)
        offset = sum(int(i) % length * stride for i, length, stride in axes)  # -1 is the last
        watcher.note(space, writes, array.ctypes.data + offset, array.itemsize)


def _site() -> Any:
    """Where in a kernel's text, or that of a device function, the running access stands."""
    frame: Any = sys._getframe(2)
    while frame.f_globals["__name__"].startswith(_INSIDE):
        frame = frame.f_back
    return frame.f_code, _position(frame.f_code, frame.f_lasti)


@cache
def _position(code: Any, instruction: int) -> Any:
    """Line and columns, where Python knows them: it numbers an instruction anew once it is warm."""
    if hasattr(code, "co_positions"):
        return next(islice(code.co_positions(), instruction // 2, None))
    return instruction
