"""The instructions of `grid_emitted` in the simulator, where one thread runs at a time."""

from operator import index

import numpy as np

from numbsparse.kernels.ptx.bulk_simulated import fence_proxy_async
from numbsparse.simulator.accesses import observe, signal
from numbsparse.simulator.arrays import address_of
from numbsparse.simulator.threads import current

fence_proxy_async_global = fence_proxy_async


def load_acquire(array, j):
    thread = current()
    thread.block.turns.poll(thread)
    value = np.uint32(array[j])
    observe(_address(array, j))
    return value


def load_acquire_system(array, j):
    return np.int32(load_acquire(array, j))


def store_release_system(array, j, n):
    array[j] = n
    signal(_address(array, j))


def add_release(array, j, n):
    array[j] += n
    signal(_address(array, j))


def add_acq_rel(array, j, n):
    before = np.int32(array[j])
    array[j] += n
    observe(_address(array, j))
    signal(_address(array, j))
    return before


def _address(array, j):
    return address_of(array) + index(j) * array.strides[0]
