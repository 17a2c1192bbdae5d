"""One compiled function on every CPU core.

The function runs on all the cores at once. Each run starts on its own stretch of the work, so that
data stay in the caches of the core that wrote them, and then helps with the stretches of others: a
core that is late, or busy elsewhere, only does less. The helpers are plain Python threads under
functions compiled with `nogil=True`, so any thread may start a product at any time, and so may a
forked process.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from numba import config, njit, types

from numbsparse.device.cpu_cache import CpuCache
from numbsparse.kernels.simd import fetch_add

WORTH_A_CORE = 1 << 21  # multiply-adds; fewer are done before a helper wakes up
SHARES = 32  # for each core, so that uneven shares even out
DONE = 0  # position in the counts
PATIENCE = 1 << 14  # looks at a count, a fraction of a millisecond; no share takes as long
WAITING = 4  # calls that a helper may be behind; it closes one while its caller starts the next

KIND = {"nogil": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
"""What all compiled functions are. None here divides by zero, and a division that might raise an
error takes longer to compile."""

inner = partial(njit, no_cpython_wrapper=True, **KIND)
"""For functions that compiled ones call and Python never does: what Python would call is not made,
which takes longer to compile than some of them."""


def on_cores(
    function: Callable, args: tuple, *, phases: int, work: int, multiply_adds: int
) -> None:
    """Run `function(core, progress, share, *args)` on the cores; return when all work is done.

    `progress` has the counts of each phase for `next_share`; the last phase has `work` parts, to
    be taken `share` at a time. NUMBA_NUM_THREADS cores at most, one if `multiply_adds` are few.
    """
    cores = cores_for(multiply_adds)
    progress = np.zeros((phases, cores + 1), np.int64)
    if cores == 1:  # nobody to share with, or to wait for
        function(0, progress, max(1, work), *args)
        return
    share = max(1, work // (cores * SHARES))
    for core in range(1, cores):
        helper = _helper(os.getpid(), core)
        if helper.qsize() < WAITING:
            helper.put((function, (core, progress, share, *args)))
    function(0, progress, share, *args)
    wait(progress[-1], work)


def cores_for(multiply_adds: int) -> int:
    """How many cores that much work pays for."""
    if multiply_adds < 2 * WORTH_A_CORE:
        return 1
    return min(config.NUMBA_NUM_THREADS, multiply_adds // WORTH_A_CORE)


def read_only(dtype: types.Type, axes: int, layout: str = "C") -> types.Array:
    """The type of an array that a compiled function only reads."""
    return types.Array(dtype, axes, layout, readonly=True)


@inner()
def next_share(core, counts, share, work):
    """What this core does next, (first, last): of its own stretch, then of others'; or (0, 0).

    `counts` has how much is done, and how much of each core's stretch is taken. The core that took
    a share adds it to `counts[DONE]` in the end.
    """
    cores = len(counts) - 1
    for turn in range(cores):
        stretch = (core + turn) % cores
        start, end = work * stretch // cores, work * (stretch + 1) // cores
        first = start + fetch_add(counts, 1 + stretch, share)
        if first < end:
            return first, min(first + share, end)
    return 0, 0


def compiled(signature: Any = None, **how: Any) -> Callable[[Any], Any]:
    """`numba.njit` without Python's lock, kept on disk: for one signature, or for any when called.

    A folder that cannot be written, or a full disk, costs nothing but time.
    """

    def decorate(function: Any) -> Any:
        if config.DISABLE_JIT:
            return function
        dispatcher = njit(**KIND | how)(function)
        dispatcher._cache = CpuCache(dispatcher)
        if signature is not None:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return decorate


def entry_of(kernel: Any) -> Callable[..., Any]:
    """A function that `compiled` made for one signature, without comparing types at each call.

    It takes arrays of those types for granted.
    """
    return made_of(kernel).entry_point  # type: ignore[no-any-return]


def made_of(kernel: Any) -> Any:
    """What Numba holds of a function that `compiled` made for one signature."""
    if config.DISABLE_JIT:
        raise RuntimeError("NUMBA_DISABLE_JIT is set: unset it, as CPU kernels only run compiled")
    (made,) = kernel.overloads.values()
    return made


@compiled()
def wait(counts, work):
    """Return when all the work is done; it has all been taken, so that is soon.

    Compiled when it is called: with a signature it would take half of the package's import.
    """
    while fetch_add(counts, DONE, 0) < work:
        pass


@njit(nogil=True)
def wait_or_part(core, counts, work, parted):
    """`wait`, in a loop of phases: core 0 has the others leave it where they keep it waiting.

    Then another program has taken a core of theirs, and may do so again in the next phase. Gives
    whether this core goes on. `parted` (cores + 1,) is 0 at first.
    """
    looks = 0
    while fetch_add(counts, DONE, 0) < work:
        looks += 1
        if core == 0 and looks == PATIENCE:
            fetch_add(parted, 0, 1)
    return core == 0 or fetch_add(parted, 0, 0) == 0


def threads() -> ThreadPoolExecutor:
    """Of this process, kept: what runs on one of them may not wait for others there."""
    return _threads(os.getpid())


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(config.NUMBA_NUM_THREADS, "numbsparse-plans")


@cache
def _helper(process: int, core: int) -> SimpleQueue[Any]:
    """What one thread of this process is to run; a forked process has none of its parent's."""
    calls: SimpleQueue[Any] = SimpleQueue()
    with suppress(RuntimeError):  # as Python 3.12 ends no thread can start: the caller does all
        Thread(target=_serve, args=(calls,), name=f"numbsparse-{core}", daemon=True).start()
    return calls


def _serve(calls: SimpleQueue[Any]) -> None:
    while True:
        function, args = calls.get()
        with suppress(Exception):  # the caller runs the same and meets the same error
            function(*args)
        del function, args  # nothing is kept alive while waiting
