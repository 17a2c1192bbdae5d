"""The threads of simulated blocks: one runs, until it must wait for others; then the next does.

Numba's own simulator starts a Python thread for each and lets them all run: they compete for
Python's lock, and those that wait poll for it. Here one thread runs until it waits: at a barrier,
in an instruction that a warp runs together, for the copy engine. So a launch runs the same way each
time, and a deadlock is an error at once. Threads that need not wait share one stack.

They run on greenlets: `a.switch()` hands over to `a`, and returns when that hands back: a call, and
no work for the system's scheduler.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import greenlet
from numba.cuda.simulator import kernelapi
from numba.cuda.simulator.kernel import BlockThread
from numba.cuda.simulator.kernelapi import Dim3

from numbsparse.simulator import accesses

POLLS = 10_000
"""How often threads may poll for what no thread does; then that is an error."""

current: Callable[[], Worker] = greenlet.getcurrent
"""The simulated thread that runs."""
accesses.running = current
kernelapi.threading = SimpleNamespace(current_thread=current, Lock=threading.Lock)
resume = greenlet.greenlet.switch
"""`switch` to one that has begun."""

order: Callable[[Sequence[Any]], Sequence[Any]] = list
"""Of those that may run next: of each `Worker`, or of the numbers of threads to begin."""


class Own(threading.local):
    """A greenlet serves the thread of Python's that it was made in."""

    launcher: Launcher

    def __init__(self) -> None:
        self.stacks: list[Worker] = []  # for later


_own = Own()


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


class Worker(greenlet.greenlet):  # type: ignore[misc]
    """A stack that is a simulated thread: after its end it becomes another one.

    It is begun by the launcher: a greenlet starts at the call depth of its switcher.

    Attributes
    ----------
    threadIdx, blockIdx, thread_id, syncthreads : what the simulator reads of the current thread
    block : Block
    own : what instructions keep for this simulated thread
    awaits : what says what it waits for; None until it waits
    """

    turns: Turns
    first: int  # the thread to become at its next turn
    awaits: Callable[[], str] | None = None
    _manager = property(lambda self: self.block.manager)
    syncthreads_count = BlockThread.syncthreads_count
    syncthreads_and = BlockThread.syncthreads_and
    syncthreads_or = BlockThread.syncthreads_or

    def __init__(self) -> None:
        super().__init__(parent=_own.launcher.home)

    def switch(self) -> None:
        """It rests until this returns."""
        if self:  # has begun
            resume(self)
        else:
            _own.launcher.following = self
            _own.launcher.home.switch()

    def run(self) -> None:
        while True:
            following = self.turns.begin(self)
            _own.stacks.append(self)
            following.switch()

    def become(self, block: Block, number: int) -> None:
        self.block, self.blockIdx = block, block.index
        self.threadIdx, self.thread_id = block.places[number], number
        self.own: dict[Any, Any] = {}

    def syncthreads(self) -> None:
        if accesses.watcher is None:
            self.block.synchronize(self)
            return
        accesses.watcher.thread(self).barriers += 1
        with accesses.synchronizing(self.block):
            self.block.synchronize(self)


@cache
def _places(width: int, height: int, depth: int) -> list[Dim3]:
    """Of a block's threads, by their numbers."""
    return [Dim3(x, y, z) for z in range(depth) for y in range(height) for x in range(width)]


class Block:
    """A block of threads that runs.

    Attributes
    ----------
    own : what instructions keep for this block
    cluster : the blocks of its cluster, by rank
    turns : Turns, of these and of others that run at the same time
    """

    cluster: list[Block]
    turns: Turns

    def __init__(self, manager: Any, place: Sequence[int], work: Callable[[], None]) -> None:
        self.manager, self.place, self.work = manager, tuple(place), work
        self.index, self.places = Dim3(*place), _places(*manager._block_dim)
        self.threads = len(self.places)
        self.left = self.threads  # that have not ended
        self.own: dict[Any, Any] = {}
        self._here: list[Worker] = []
        self._of_cluster: list[Worker] = []

    def synchronize(self, worker: Worker) -> None:
        """Wait for all threads of the block that have not ended."""
        self._here.append(worker)
        if len(self._here) == self.left:
            self.turns.wake(self._here)
        self.turns.wait(worker, lambda: "all threads at cuda.syncthreads()")

    def synchronize_cluster(self, worker: Worker) -> None:
        """And of its cluster."""
        with accesses.synchronizing(self.cluster[0], "cluster"):
            self._of_cluster.append(worker)
            self._open()
            self.turns.wait(worker, lambda: "all threads of the cluster")

    def leave(self) -> None:
        """The running thread ends: what it did is ordered before later barriers."""
        accesses.leave(self)
        accesses.leave(self.cluster[0], "cluster")

    def end_one(self) -> None:
        self.left -= 1
        if self._here or self._of_cluster or len(self.cluster) > 1:
            self._open()

    def _open(self) -> None:
        if self._here and len(self._here) == self.left:
            self.turns.wake(self._here)
        if sum(len(b._of_cluster) for b in self.cluster) == sum(b.left for b in self.cluster):
            for block in self.cluster:
                self.turns.wake(block._of_cluster)


class Turns:
    """Who runs, of the threads of blocks that are there at the same time."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks, self._threads = blocks, blocks[0].threads
        self._ready: deque[Any] = deque(order(range(len(blocks) * self._threads)))
        self._begun: dict[Worker, None] = {}  # one runs, and the others wait
        self._polls, self._stuck = 0, ""
        self._error: BaseException | None = None
        self._launcher = Launcher()
        for block in blocks:
            block.turns = self

    def run(self) -> None:
        self._whose(self._next()).switch()
        try:
            self._launcher.rest()
        except BaseException as interruption:  # the threads end where they wait next
            self._fail(interruption)
            self._launcher.rest()
        if self._error is not None:
            raise self._error

    def wait(self, worker: Worker, what: Callable[[], str]) -> None:
        """Until somebody wakes this thread, others run; `what` says what it waits for."""
        worker.awaits = what
        following = self._ready.popleft() if self._ready else self._next()
        if following is not worker:
            if type(following) is Worker:
                resume(following)
            else:
                self._whose(following).switch()
        if self._error is not None:
            raise RuntimeError("another thread failed")
        if self._stuck:
            raise RuntimeError(self._stuck)

    def wake(self, workers: list[Worker]) -> None:
        """Their turns will come. The list is empty after that."""
        if self._error is None:  # else all end, and some of these have
            self._ready.extend(order(workers))
        workers.clear()
        self._polls = 0

    def poll(self, worker: Worker) -> None:
        """Everybody else runs before `worker` looks again."""
        self._polls += 1
        if self._polls > POLLS:
            raise RuntimeError("a thread waits for what no thread that runs does")
        self._ready.append(worker)
        self.wait(worker, lambda: "their turn")

    def begin(self, worker: Worker) -> Any:
        """Run the thread that is first in this worker, and others while it is for one to begin.

        Gives whose turn it is then.
        """
        following: Any = worker.first
        while type(following) is int:
            block = self._blocks[following // self._threads]
            worker.become(block, following % self._threads)
            worker.rank = following  # the thread, among those of all blocks
            try:
                block.work()
                if accesses.watcher is not None:
                    block.leave()
            except BaseException as error:
                self._fail(_named(error, worker))
            self._polls, worker.awaits = 0, None
            block.end_one()
            following = self._next()
        # Nothing is kept alive while it is idle.
        del worker.turns, worker.block, worker.own, self._begun[worker]
        return self._whose(following)

    def _next(self) -> Any:
        """Whose turn it is: a Worker that waited, a thread to begin, or nobody's."""
        if self._ready:
            return self._ready.popleft()
        waiting = {worker: worker.awaits for worker in self._begun if worker.awaits is not None}
        if self._error is None and waiting:
            reasons = Counter(what() for what in waiting.values())
            listed = "; ".join(f"{n} for {what}" for what, n in reasons.items())
            self._stuck = f"no thread can go on; they wait, {listed}"
            return min(waiting, key=lambda worker: worker in worker.block._here)
        return next(iter(waiting), None)

    def _fail(self, error: BaseException) -> None:
        """Nobody else begins, and the threads end where they wait: the first error is raised."""
        self._error = self._error or error
        self._ready.clear()

    def _whose(self, turn: Any) -> Any:
        """The stack of what `_next` gave."""
        if type(turn) is not int:
            return self._launcher if turn is None else turn
        worker = _own.stacks.pop() if _own.stacks else Worker()
        worker.turns, worker.first, self._begun[worker] = self, turn, None
        return worker


def _named(error: BaseException, worker: Worker) -> BaseException:
    """The same error, and which thread it was, in the words of Numba's simulator."""
    place = f"tid={list(worker.threadIdx)} ctaid={list(worker.blockIdx)}"
    text = f"{place}: {error}" if str(error) else place
    return type(error)(text).with_traceback(error.__traceback__)
