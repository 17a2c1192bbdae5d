"""A ring of stages in shared memory: what a producer fills, consumers empty, one after another.

A barrier tells phases apart by their parity. Stage 0 comes again after the last one, a phase later:
whoever waits for a stage waits for the parity of its phase.
"""

from __future__ import annotations

from numba import cuda, uint32


@cuda.jit(device=True)
def following(stage, phase, stages):
    """The stage after this one, and the parity of its phase."""
    stage = uint32(stage + 1)
    if stage == stages:
        return uint32(0), uint32(phase ^ 1)
    return stage, phase
