"""One compiled function on every CPU core.

The function runs on all the cores at once, and its runs take shares of the work by counting in an
array that they have in common. A core that comes late, or is busy elsewhere, only takes fewer. The
helpers are plain Python threads under functions compiled with `nogil=True`, so any thread may start
a product at any time, and so may a forked process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import numpy as np
from numba import config, njit

from numbsparse.kernels.simd import fetch_add

WORTH_A_CORE = 1 << 22  # multiply-adds; fewer are done before a helper wakes up
SHARES = 32  # for each core, so that uneven shares even out
TAKEN, DONE = 0, 1  # what the counts of a phase count


def on_cores(
    function: Callable, args: tuple, *, phases: int, work: int, multiply_adds: int
) -> None:
    """Run `function(progress, share, *args)` on the cores; return when all its work is done.

    `progress` (phases, 2) has the counts of each phase for `shares`; the last phase has `work`
    parts, taken `share` at a time. It runs on NUMBA_NUM_THREADS cores at most, on one if
    `multiply_adds` are few.
    """
    cores = cores_for(multiply_adds)
    progress = np.zeros((phases, 2), np.int64)
    share = max(1, work // (cores * SHARES))
    if cores > 1:
        _helpers(os.getpid()).offer(cores - 1, function, progress, share, *args)
    function(progress, share, *args)
    wait(progress[-1], work)


def cores_for(multiply_adds: int) -> int:
    """How many cores that much work pays for."""
    return max(1, min(config.NUMBA_NUM_THREADS, multiply_adds // WORTH_A_CORE))


@njit(nogil=True)
def shares(counts, share, work):
    """The parts of `work` that this core does: (first, last), `share` at a time."""
    first = fetch_add(counts, TAKEN, share)
    while first < work:
        last = min(first + share, work)
        yield first, last
        fetch_add(counts, DONE, last - first)
        first = fetch_add(counts, TAKEN, share)


@njit(nogil=True, cache=True)
def wait(counts, work):
    """Return when all the work is done; it has all been taken, so that is soon."""
    while fetch_add(counts, DONE, 0) < work:
        pass


@cache
def _helpers(process: int) -> _Helpers:
    """This process's helpers: a forked process has none of its parent's threads."""
    return _Helpers(config.NUMBA_NUM_THREADS - 1)


class _Helpers:
    """Threads that wait for a function to run."""

    def __init__(self, count: int):
        # A caller is often back with its next function before a helper has closed the last one,
        # so a few may wait; any more would only keep memory alive.
        self._room = Semaphore(4 * count)
        self._offers: SimpleQueue = SimpleQueue()
        for _ in range(count):
            Thread(target=self._serve, name="numbsparse", daemon=True).start()

    def offer(self, count: int, function: Callable, *args: Any) -> None:
        """Let `count` threads run `function(*args)` when they can; nobody waits for them."""
        for _ in range(count):
            if not self._room.acquire(blocking=False):
                return
            self._offers.put((function, args))

    def _serve(self) -> None:
        while True:
            function, args = self._offers.get()
            try:
                function(*args)
            finally:
                del function, args
                self._room.release()
