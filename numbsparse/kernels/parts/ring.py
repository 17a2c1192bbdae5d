"""A ring of stages in shared memory: what a producer fills, consumers empty, one after another.

A barrier distinguishes phases by their parity. Stage 0 follows the last one, a phase later: to wait
for a stage is to wait for the parity of its phase.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from numbsparse.kernels.ptx import (
    cluster_sync,
    cp_async_commit,
    cp_async_wait,
    elect,
    fence_mbarrier_init,
    fence_tensor_map,
    let_next_kernel_start,
    mbarrier_init,
    mbarrier_wait,
    prefetch_tensor_map,
    sync_warp,
)


@cuda.jit(device=True)
def begin_ring(bars, at, stages, fillers, readers):
    """Initialise, from barrier `at` on, one for each full stage, then one for each empty stage.

    `fillers` arrivals and the bytes copied fill a stage, `readers` arrivals empty it. Thread 0
    calls this; `show_barriers`, or a fence and a barrier for all threads, follow.
    """
    for i in range(stages):
        mbarrier_init(bars, at + i, fillers)
        mbarrier_init(bars, at + stages + i, readers)


@cuda.jit(device=True)
def show_barriers(thread, cluster):
    """What thread 0 has initialised is there for all threads, those of a cluster too; and the next
    kernel may start."""
    let_next_kernel_start()
    show_own_barriers(thread, cluster)


@cuda.jit(device=True)
def show_own_barriers(thread, cluster):
    """As `show_barriers`, but the next kernel may not start yet."""
    if thread == 0:
        fence_mbarrier_init()
    cuda.syncthreads()
    if cluster > 1:
        cluster_sync()


@cuda.jit(device=True)
def following(stage, phase, stages):
    """The stage after this one, and the parity of its phase."""
    stage = uint32(stage + 1)
    if stage == stages:
        return uint32(0), uint32(phase ^ 1)
    return stage, phase


class Source(NamedTuple):
    """How a warp fills a ring of its own: by the copy engine, or by its lanes with `cp.async`.

    A stage is free once the lanes of the warp are synchronised, so there are no empty barriers.
    """

    engine: bool
    stages: int
    overlap: bool  # whether the kernel may start while the one before it ends
    reach: Any = None  # of lanes: `requests.Reach`


@cache
def opening(source: Source, many_maps: int) -> Any:
    """Initialise the barriers of a warp's ring, while the copy engine prefetches the maps.

    Where the maps are fresh, they are announced first.
    """
    STAGES, ENGINE = source.stages, source.engine

    @cuda.jit(device=True)
    def prepare(bars, bar, fresh, maps):
        if ENGINE and elect() != 0:
            if fresh != 0:
                for k in range(many_maps):
                    fence_tensor_map(maps[k])
            for k in range(many_maps):
                prefetch_tensor_map(maps[k])
            for s in range(STAGES):
                mbarrier_init(bars, bar + s, 1)
            fence_mbarrier_init()
        if ENGINE:
            sync_warp()

    return prepare


@cache
def waiting(source: Source) -> Any:
    """wait(bars, bar, phase): until the stage is filled that the warp requested first."""
    PENDING, ENGINE = source.stages - 1, source.engine

    @cuda.jit(device=True)
    def wait(bars, bar, phase):
        if ENGINE:
            mbarrier_wait(bars, bar, phase)
        else:
            cp_async_wait(PENDING)
            sync_warp()

    return wait


@cache
def closing(source: Source) -> Any:
    """close(): what lanes copied since the last time is one stage, even if it is nothing."""
    ENGINE = source.engine

    @cuda.jit(device=True)
    def close():
        if not ENGINE:
            cp_async_commit()

    return close
