"""What simulated threads run on: greenlets where that package is installed, else Python's threads.

One of them runs: `a.switch()` hands over to `a`, and returns when that hands back. Python's threads
do so by locks and the system's scheduler; greenlets by a call, some twenty times as fast.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from numba.cuda.simulator import kernelapi
from numba.cuda.simulator.kernel import BlockThread

try:
    import greenlet
except ImportError:
    greenlet = None

OF_ONE_THREAD = greenlet is not None
"""Whether all of them are parts of one thread of the system's."""

MOST_KEPT = 256
"""Python threads that are kept for later: some systems allow only a few thousand."""


class PythonsThread(BlockThread):  # type: ignore[misc]
    def __init__(self) -> None:
        threading.Thread.__init__(self, daemon=True)
        self.turn = threading.Lock()
        self.turn.acquire()
        self.start()

    def switch(self) -> None:
        self.turn.release()

    def rest(self) -> None:
        self.turn.acquire()


class ThreadLauncher:
    """The launching thread; it has the turn again when they have ended."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()

    switch, rest = PythonsThread.switch, PythonsThread.rest


Stack: Any = PythonsThread
Launcher: Any = ThreadLauncher
current: Callable[[], Any] = threading.current_thread
"""The simulated thread that runs."""
resume: Callable[[Any], Any] = PythonsThread.switch
"""`switch` to one that has begun."""
_kept: Any = SimpleNamespace(stacks=[])

if greenlet is not None:
    switch_to = greenlet.greenlet.switch

    class Own(threading.local):
        """A greenlet serves the thread of Python's that it was made in."""

        launcher: Any

        def __init__(self) -> None:
            self.stacks: list[Any] = []

    class Greenlet(greenlet.greenlet):  # type: ignore[misc]
        """It rests until `switch` returns.

        It is begun by the launcher: a greenlet starts at the call depth of its switcher.
        """

        syncthreads_count = BlockThread.syncthreads_count
        syncthreads_and = BlockThread.syncthreads_and
        syncthreads_or = BlockThread.syncthreads_or

        def __init__(self) -> None:
            super().__init__(parent=_kept.launcher.home)

        def switch(self) -> None:
            if self:  # has begun
                switch_to(self)
            else:
                _kept.launcher.following = self
                _kept.launcher.home.switch()

        def rest(self) -> None:
            pass

        def is_alive(self) -> bool:
            return not self.dead

    class GreenletLauncher:
        def __init__(self) -> None:
            self.home = greenlet.getcurrent()
            self.following: Any = self
            _kept.launcher = self

        def switch(self) -> None:
            self.following = self
            self.home.switch()

        def rest(self) -> None:
            while (following := self.following) is not self:
                self.following = self
                switch_to(following)

    Stack, Launcher, current = Greenlet, GreenletLauncher, greenlet.getcurrent
    resume = switch_to
    _kept = Own()
    kernelapi.threading = SimpleNamespace(current_thread=current, Lock=threading.Lock)


def keep(stack: Any) -> bool:
    """For later, if it may be."""
    if greenlet is None and len(_kept.stacks) >= MOST_KEPT:
        return False
    _kept.stacks.append(stack)
    return True


def kept() -> Any:
    """One of those that were kept, or None."""
    while _kept.stacks:
        stack = _kept.stacks.pop()
        if stack.is_alive():  # a forked process has none of its parent's threads
            return stack
    return None
