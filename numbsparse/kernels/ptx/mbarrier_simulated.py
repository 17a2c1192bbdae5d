"""Barriers in shared memory that count arrivals and bytes, in the simulator."""

from collections.abc import Callable
from operator import index

import numpy as np

from numbsparse.kernels.ptx.simulated import cp_async_commit, cp_async_wait
from numbsparse.simulator.accesses import note, noted
from numbsparse.simulator.arrays import address_of, counterpart
from numbsparse.simulator.clocks import MBARRIER, Moment, Post
from numbsparse.simulator.threads import Worker, current


class Barrier:
    """A phase ends after all its arrivals and all the bytes it expects; then the next begins."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.missing_bytes = self.phase = 0
        self.waiting: list[Worker] = []
        self.post = Post(phased=True)
        self.words = [self.post.word]  # at the end of each phase

    def arrive(self, nbytes: int) -> None:
        if (thread := noted()) is not None:
            self.post.leave(thread)
        self._change(1, nbytes)

    def deliver(self, nbytes: int, copy: Moment | None) -> None:
        """A copy is over when the phase is that it belongs to."""
        if copy is not None:
            copy.end = self.post.line, self.post.time + 1
        self._change(0, -nbytes)

    def _change(self, arrivals: int, nbytes: int) -> None:
        self.pending -= arrivals
        self.missing_bytes += nbytes
        if self.pending < 0:
            raise RuntimeError(f"more than {self.count} arrivals at an mbarrier in one phase")
        if self.pending == self.missing_bytes == 0:
            self.pending, self.phase = self.count, self.phase ^ 1
            if noted() is not None:
                self.post.close()
                self.words.append(self.post.word)
            current().turns.wake(self.waiting)

    def wait(self, parity: int, missing: Callable[[], str]) -> None:
        awaited, thread = self.post.time + (self.phase == parity), current()
        while self.phase == parity:
            self.waiting.append(thread)
            thread.turns.wait(thread, missing)
        if (noting := noted()) is not None:
            self.post.read(noting, self.words[awaited])


def mbarrier_init(bars, i, count):
    barriers, place = _place(bars, i, current().block)
    note("shared", True, place, 8, unit=MBARRIER)
    barriers[place] = Barrier(int(count))


def mbarrier_expect(bars, i, nbytes):
    barrier_of(bars, i).arrive(int(nbytes))


def mbarrier_arrive(bars, i):
    barrier_of(bars, i).arrive(0)


def cp_async_arrive(bars, i):
    cp_async_commit()
    cp_async_wait(0)
    mbarrier_arrive(bars, i)


def mbarrier_wait(bars, i, parity):
    barrier = barrier_of(bars, i)
    barrier.wait(
        parity,
        lambda: (
            f"{barrier.pending} arrivals and {barrier.missing_bytes} bytes at mbarrier {int(i)}"
        ),
    )


def barrier_of(bars, i, rank=None, copy=None):
    """This block's, or that of a block of the cluster, for the running thread or for a copy."""
    block = current().block if rank is None else current().block.cluster[rank]
    barriers, place = _place(bars, i, block)
    if place not in barriers:
        raise RuntimeError(f"mbarrier {int(i)} was not initialized")
    # Barriers change as one; a read of them stands for what must follow `mbarrier_init`.
    note("shared", False, place, 8, copy, block.place, MBARRIER)
    return barriers[place]


def _place(bars, i, block):
    if bars.dtype != np.uint64:
        raise TypeError(f"an mbarrier is in an array of uint64, got {bars.dtype}")
    barriers: dict[int, Barrier] = block.own.setdefault(Barrier, {})
    there = counterpart(bars, current().block, block)
    return barriers, address_of(there) + 8 * index(i)
