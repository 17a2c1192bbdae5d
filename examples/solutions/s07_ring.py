"""s07_double_buffer: how many groups of copies may be under way when a tile is read.

Tiles of 128 numbers pass through a ring of STAGES. At step s the copies of the tiles up to
s + STAGES - 2 have been asked for, and tile s must be there: so STAGES - 2 groups may be missing.
With one more the step reads what is not there yet: the simulator puts NaN in its place.
"""

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # a GPU may be early or late

import numpy as np
from numba import cuda, float32

import numbsparse as ns
from numbsparse.device.launch import launch
from numbsparse.kernels.ptx import ALIGNMENT, cp_async, cp_async_commit, cp_async_wait

TILE, THREADS = 128, 32


def ring_sum(STAGES, PENDING):
    """out[t] = sum of x[t], x[t + 128], ... for the threads t, by way of shared memory."""
    AHEAD, RING = STAGES - 1, STAGES * TILE

    @cuda.jit
    def kernel(x, out):
        ring = cuda.shared.array(RING, float32, ALIGNMENT)
        t = cuda.threadIdx.x
        total = float32(0)
        steps = x.size // TILE
        for step in range(-AHEAD, steps):
            if step >= 0:
                cp_async_wait(PENDING)
                cuda.syncthreads()
            coming = step + AHEAD
            if coming < steps:
                cp_async(ring, coming % STAGES * TILE + 4 * t, x, coming * TILE + 4 * t)
            cp_async_commit()  # an empty group too: so the count of groups is the count of steps
            if step >= 0:
                total += ring[step % STAGES * TILE + t]
        out[t] = total

    return kernel


x = np.random.default_rng(0).standard_normal(10 * TILE).astype(np.float32)
expected = x.reshape(-1, TILE).sum(0)[:THREADS]
for stages in (2, 3, 4):
    for pending in (stages - 2, stages - 1):
        out = ns.to_device(np.zeros(THREADS, np.float32))
        launch(ring_sum(stages, pending), 1, THREADS, ns.to_device(x), out)
        right = np.allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5)
        print(f"{stages} stages, {pending} groups pending: {'right' if right else 'too early'}")
        assert right == (pending == stages - 2)
