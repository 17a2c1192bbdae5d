"""The instructions of `grid_emitted` in the simulator, where one thread runs at a time."""

from __future__ import annotations

import numpy as np

from numbsparse.device.threads import current


def load_acquire(array, j):
    thread = current()
    thread.block.turns.poll(thread)
    return np.uint32(array[j])


def add_release(array, j, n):
    array[j] += n


def add_acq_rel(array, j, n):
    before = np.int32(array[j])
    array[j] += n
    return before


def fence_proxy_async_global():
    pass
