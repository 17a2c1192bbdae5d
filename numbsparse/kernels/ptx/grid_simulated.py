"""The instructions of `grid_emitted` in the simulator, where blocks run one after another."""

from __future__ import annotations

import numpy as np


def load_acquire(array, j):
    return np.uint32(array[j])


def fence_proxy_async_global():
    pass
