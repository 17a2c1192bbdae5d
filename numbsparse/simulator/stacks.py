"""What simulated threads run on: greenlets, of which one runs.

`a.switch()` hands over to `a`, and returns when that hands back: a call, and no work for the
system's scheduler.
"""

import threading
from types import SimpleNamespace
from typing import Any

import greenlet
from numba.cuda.simulator import kernelapi
from numba.cuda.simulator.kernel import BlockThread

current = greenlet.getcurrent
"""The simulated thread that runs."""
resume = greenlet.greenlet.switch
"""`switch` to one that has begun."""


class Own(threading.local):
    """A greenlet serves the thread of Python's that it was made in."""

    launcher: "Launcher"

    def __init__(self) -> None:
        self.stacks: list[Any] = []  # for later


_own = Own()


class Stack(greenlet.greenlet):  # type: ignore[misc]
    """It rests until `switch` returns.

    It is begun by the launcher: a greenlet starts at the call depth of its switcher.
    """

    syncthreads_count = BlockThread.syncthreads_count
    syncthreads_and = BlockThread.syncthreads_and
    syncthreads_or = BlockThread.syncthreads_or

    def __init__(self) -> None:
        super().__init__(parent=_own.launcher.home)

    def switch(self) -> None:
        if self:  # has begun
            resume(self)
        else:
            _own.launcher.following = self
            _own.launcher.home.switch()


class Launcher:
    """The launching thread; it has the turn again when they have ended."""

    def __init__(self) -> None:
        self.home = greenlet.getcurrent()
        self.following: Any = self
        _own.launcher = self

    def switch(self) -> None:
        self.following = self
        self.home.switch()

    def rest(self) -> None:
        while (following := self.following) is not self:
            self.following = self
            resume(following)


def keep(stack: Any) -> None:
    """For later."""
    _own.stacks.append(stack)


def kept() -> Any:
    """One of those that were kept, or None."""
    return _own.stacks.pop() if _own.stacks else None


kernelapi.threading = SimpleNamespace(current_thread=current, Lock=threading.Lock)
