"""The threads of a simulated block: one runs, until it must wait for others; then the next does.

Numba's own simulator starts a thread of Python's for each and lets them all run: they fight for
Python's lock, and whoever waits asks for it again and again. Here one thread has the turn and gives
it away where it waits: at a barrier, in an instruction that a warp runs together, for the copy
engine. So a launch goes the same way each time, and a block in which nobody can go on is an error
at once. Threads that need not wait share one thread of Python's. Imported in the simulator alone.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numba.cuda.simulator.kernel import BlockManager, BlockThread
from numba.cuda.simulator.kernelapi import Dim3

from numbsparse.device import accesses

POLLS = 10_000
"""How often threads look for what none of their block does, until that is an error."""

order: Callable[[Sequence[Any]], list[Any]] = list
"""Of those whose turn may come at the same moment: `Worker`s, or numbers of threads to begin."""

_idle: list[Worker] = []


class Worker(BlockThread):  # type: ignore[misc]
    """A thread of Python's that is a simulated thread: after its end it becomes another one.

    Attributes
    ----------
    threadIdx, blockIdx, thread_id, syncthreads : what the simulator asks the current thread for
    block : Block
    own : what instructions keep for this simulated thread
    """

    def __init__(self) -> None:
        threading.Thread.__init__(self, daemon=True)
        self.turn = threading.Lock()
        self.turn.acquire()

    def run(self) -> None:
        while True:
            self.turn.acquire()
            self.block.begin(self, self.thread_id)

    def become(self, block: Block, number: int) -> None:
        width, height, _ = block.shape
        self.block, self._manager, self.blockIdx = block, block.manager, block.place
        self.threadIdx = Dim3(number % width, number // width % height, number // (width * height))
        self.thread_id = number
        self.own: dict[Any, Any] = {}

    def syncthreads(self) -> None:
        if accesses.watcher is not None:
            accesses.watcher.note_barrier(self)
        self.block.meet(self)


class Block:
    """A block of threads that runs.

    Attributes
    ----------
    own : what instructions keep for this block
    """

    def __init__(self, manager: Any, place: Sequence[int], work: Callable[[], None]) -> None:
        self.manager, self.place, self.work = manager, Dim3(*place), work
        self.shape = manager._block_dim
        self.threads = int(np.prod(self.shape))
        self.left = self.threads  # that have not ended
        self.own: dict[Any, Any] = {}
        self._ready: deque[Any] = deque(order(range(self.left)))
        self._waiting: dict[Worker, Callable[[], str]] = {}  # and for what, those of _ready too
        self._at_barrier: list[Worker] = []
        self._polls, self._stuck = 0, ""
        self._error: BaseException | None = None
        self._ended = threading.Lock()

    def run(self) -> None:
        self._ended.acquire()
        self._give_turn(self._next())
        try:
            self._ended.acquire()
        except BaseException as interruption:  # the threads end where they wait next
            self._error = interruption
            self._ended.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, worker: Worker, what: Callable[[], str]) -> None:
        """Until somebody wakes `worker`, which runs, others do; `what` says what it waits for."""
        self._waiting[worker] = what
        following = self._next()
        if following is not worker:
            self._give_turn(following)
            worker.turn.acquire()
        del self._waiting[worker]
        if self._error is not None:
            raise RuntimeError("another thread of the block failed")
        if self._stuck:
            raise RuntimeError(self._stuck)

    def wake(self, workers: list[Worker]) -> None:
        """Their turns will come. The list is empty after that."""
        self._ready.extend(order(workers))
        workers.clear()
        self._polls = 0

    def poll(self, worker: Worker) -> None:
        """Everybody else runs before `worker` looks again."""
        self._polls += 1
        if self._polls > POLLS:
            raise RuntimeError("a thread waits for another block; here they run one after another")
        self._ready.append(worker)
        self.wait(worker, lambda: "their turn")

    def meet(self, worker: Worker) -> None:
        """Wait for all threads that have not ended."""
        self._at_barrier.append(worker)
        self._open_barrier()
        self.wait(worker, lambda: "all threads at cuda.syncthreads()")

    def begin(self, worker: Worker, number: Any) -> None:
        """Run that thread in this worker, and then others, while it is for one to begin."""
        while isinstance(number, int):
            worker.become(self, number)
            try:
                self.work()
            except BaseException as error:
                if self._error is None:
                    self._error = _named(error, worker)
            self.left -= 1
            self._polls = 0
            self._open_barrier()
            number = self._next()
        del worker.block, worker._manager, worker.own  # nothing is kept alive while it is idle
        _idle.append(worker)
        self._give_turn(number)

    def _open_barrier(self) -> None:
        if self._at_barrier and len(self._at_barrier) == self.left:
            self.wake(self._at_barrier)

    def _next(self) -> Any:
        """Whose turn it is: a Worker that waited, the number of a thread to begin, or nobody's."""
        if self._error is None and self._ready:
            return self._ready.popleft()
        if self._error is None and self._waiting:
            reasons = Counter(what() for what in self._waiting.values())
            told = "; ".join(f"{n} for {what}" for what, n in reasons.items())
            self._stuck = f"no thread of the block can go on; they wait, {told}"
            return min(self._waiting, key=lambda worker: worker in self._at_barrier)
        return next(iter(self._waiting), None)

    def _give_turn(self, to: Any) -> None:
        if to is None:
            self._ended.release()
            return
        if not isinstance(to, Worker):
            worker = _idle_worker()
            worker.become(self, to)
            to = worker
        to.turn.release()


def current() -> Worker:
    """The simulated thread that runs."""
    worker: Any = threading.current_thread()
    return worker


def _idle_worker() -> Worker:
    while _idle:
        worker = _idle.pop()
        if worker.is_alive():  # a forked process has none of its parent's
            return worker
    worker = Worker()
    worker.start()
    return worker


def _named(error: BaseException, worker: Worker) -> BaseException:
    """The same error, and which thread it was, in the words of Numba's simulator."""
    place = f"tid={list(worker.threadIdx)} ctaid={list(worker.blockIdx)}"
    text = f"{place}: {error}" if str(error) else place
    return type(error)(text).with_traceback(error.__traceback__)


def run_block(manager: Any, place: Sequence[int], *args: Any) -> None:
    """In the place of `BlockManager.run`; under `cuda.jit(debug=True)` a division by 0 raises."""

    def work() -> None:
        with np.errstate(divide="raise"):
            manager._f(*args)

    Block(manager, place, work if manager._debug else partial(manager._f, *args)).run()


BlockManager.run = run_block
