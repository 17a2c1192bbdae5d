"""Simulated threads in an order of one's choosing, for kernels that must not depend on any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from numbsparse.device.runtime import SIMULATED


@contextmanager
def in_turns(order: str | int = "rising") -> Iterator[None]:
    """Run the threads of a block one after another, each to its next barrier, in a given order.

    A GPU promises no order between two barriers: a kernel whose results depend on it is wrong. Here
    the order is chosen, so that such a kernel goes wrong every time, and not once in a thousand.

    Parameters
    ----------
    order : "rising" or "falling" by the threads' numbers, or a seed for a random one

    Raises
    ------
    ValueError
        If `order` is another word.
    RuntimeError
        Outside the simulator; and in a kernel whose threads meet otherwise than in
        `cuda.syncthreads()`, as the lanes of a warp do in `mma.sync`.

    Examples
    --------
    >>> from numba import cuda, float32
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.device.launch import launch
    >>> @cuda.jit
    ... def shift_kernel(x, y):  # a barrier is missing
    ...     t, tile = cuda.threadIdx.x, cuda.shared.array(4, float32)
    ...     tile[t] = x[t]
    ...     y[t] = tile[(t + 1) % 4]
    >>> x, y = ns.to_device(np.arange(4, dtype=np.float32)), ns.to_device(np.zeros(4, np.float32))
    >>> if ns.device.SIMULATED:
    ...     with ns.testing.in_turns("falling"):
    ...         launch(shift_kernel, 1, 4, x, y)
    ...     print(y.numpy()[:3])
    ... else:
    ...     print("[1. 2. 3.]")
    [1. 2. 3.]
    """
    if isinstance(order, str) and order not in ("rising", "falling"):
        raise ValueError(f'order takes "rising", "falling" or a seed, got {order!r}')
    if not SIMULATED:
        raise RuntimeError("an order takes the simulator: set NUMBA_ENABLE_CUDASIM=1 before import")
    from numba.cuda.simulator.kernel import BlockManager, BlockThread

    rng = None if isinstance(order, str) else np.random.default_rng(order)

    def ordered(threads: Sequence[Any]) -> list[Any]:
        if rng is not None:
            return [threads[i] for i in rng.permutation(len(threads))]
        return sorted(threads, key=lambda t: t.thread_id, reverse=order == "falling")

    def run(manager: Any, grid_point: Any, *args: Any) -> None:
        _run_in_turns(manager, grid_point, args, ordered)

    plain = BlockManager.run, BlockThread.syncthreads
    BlockManager.run, BlockThread.syncthreads = run, _stop
    try:
        yield
    finally:
        BlockManager.run, BlockThread.syncthreads = plain


def _run_in_turns(
    manager: Any, grid_point: Any, args: Any, ordered: Callable[[Sequence[Any]], list[Any]]
) -> None:
    """A block: in each round every thread goes on to its next barrier, or to its end."""
    from numba.cuda.simulator.kernel import BlockThread

    def work() -> None:
        try:
            manager._f(*args)
        finally:
            thread: Any = threading.current_thread()
            thread.ended = True
            thread.stopped.set()

    manager.takes_turns = True
    threads = []
    for point in np.ndindex(*manager._block_dim):
        thread = BlockThread(work, manager, grid_point, point, manager._debug)
        thread.ended, thread.stopped = False, threading.Event()
        threads.append(thread)
    going = threads
    while going:
        for thread in ordered(going):
            thread.stopped.clear()
            if thread.ident is None:
                thread.start()
            else:
                thread.syncthreads_event.set()
            thread.stopped.wait()
            if thread.ended:
                thread.join()
            if thread.exception:
                _abort(threads)
                raise thread.exception[0].with_traceback(thread.exception[1])
        going = [thread for thread in going if not thread.ended]


def _stop(thread: Any) -> None:
    """`syncthreads` of a thread that waits for its turn."""
    thread.stopped.set()
    thread.syncthreads_event.wait()
    thread.syncthreads_event.clear()
    if thread.abort:
        raise RuntimeError("another thread of the block failed")


def _abort(threads: Sequence[Any]) -> None:
    for thread in threads:
        if thread.ident is not None and not thread.ended:
            thread.abort = True
            thread.syncthreads_event.set()
            thread.join()
