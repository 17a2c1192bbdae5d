"""The instructions of `grid_emitted` in the simulator, where blocks run one after another."""

from __future__ import annotations

import threading

import numpy as np

_lock = threading.Lock()


def load_acquire(array, j):
    return np.uint32(array[j])


def add_release(array, j, n):
    with _lock:
        array[j] += n


def add_acq_rel(array, j, n):
    with _lock:
        before = np.int32(array[j])
        array[j] += n
        return before


def fence_proxy_async_global():
    pass
