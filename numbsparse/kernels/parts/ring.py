"""A ring of stages in shared memory: what a producer fills, consumers empty, one after another.

A barrier distinguishes phases by their parity. Stage 0 follows the last one, a phase later: to wait
for a stage is to wait for the parity of its phase.
"""

from __future__ import annotations

from numba import cuda, uint32

from numbsparse.kernels.ptx import mbarrier_init


@cuda.jit(device=True)
def begin_ring(bars, at, stages, fillers, readers):
    """From barrier `at` on one for each stage that is full, then one for each that is empty.

    So many arrivals fill a stage, with the bytes copied, and so many empty it. One thread does it;
    `fence_mbarrier_init` and a barrier for all threads follow.
    """
    for i in range(stages):
        mbarrier_init(bars, at + i, fillers)
        mbarrier_init(bars, at + stages + i, readers)


@cuda.jit(device=True)
def following(stage, phase, stages):
    """The stage after this one, and the parity of its phase."""
    stage = uint32(stage + 1)
    if stage == stages:
        return uint32(0), uint32(phase ^ 1)
    return stage, phase
