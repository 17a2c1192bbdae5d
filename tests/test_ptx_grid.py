"""Blocks of a grid that run together and wait for each other."""

import numpy as np
import pytest
from numba import cuda, int32
from ptx_helpers import on_hopper

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx

pytestmark = on_hopper


@cuda.jit(device=True)
def fence_and_add(arrived, i):
    cuda.threadfence()
    cuda.atomic.add(arrived, i, 1)


@cuda.jit(device=True)
def add_release(arrived, i):
    ptx.add_release(arrived, i, 1)


@cuda.jit(device=True)
def add_acq_rel(arrived, i):
    ptx.add_acq_rel(arrived, i, int32(1))


def rounds(tell):
    @cuda.jit
    def round_kernel(arrived, steps, values, out):
        """Each block shows a number and takes its neighbour's, step after step."""
        block, blocks = cuda.blockIdx.x, cuda.gridDim.x
        for step in range(steps):
            values[step, block] = 100 * step + block
            tell(arrived, step)
            while ptx.load_acquire(arrived, step) < blocks:
                pass
            out[step, block] = values[step, (block + 1) % blocks]

    return round_kernel


@pytest.mark.parametrize("tell", [fence_and_add, add_release, add_acq_rel])
def test_blocks_wait_for_each_other(tell):
    blocks = 3
    if not device.SIMULATED:
        blocks = 2 * device.runtime.current_device().properties.multiprocessor_count
    arrived = device.to_device(np.zeros(5, np.int32))
    values, out = (device.to_device(np.zeros((5, blocks), np.int32)) for _ in "ab")
    launch(rounds(tell), blocks, 1, arrived, 5, values, out, together=True)
    expected = 100 * np.arange(5)[:, None] + np.roll(np.arange(blocks), -1)
    np.testing.assert_array_equal(out.numpy(), expected)


@cuda.jit
def ticket_kernel(tickets, out):
    """Each block takes a number; the last one to come sees what all others wrote before."""
    out[cuda.blockIdx.x] = cuda.blockIdx.x + 1
    if ptx.add_acq_rel(tickets, 0, int32(1)) == cuda.gridDim.x - 1:
        total = 0
        for block in range(cuda.gridDim.x):
            total += out[block]
        tickets[1] = total


def test_the_last_block_sees_what_the_others_wrote():
    tickets, out = (device.to_device(np.zeros(n, np.int32)) for n in (2, 300))
    launch(ticket_kernel, 300, 1, tickets, out)
    np.testing.assert_array_equal(tickets.numpy(), [300, 300 * 301 // 2])


@pytest.mark.gpu(reason="any grid fits in the simulator")
def test_a_grid_that_does_not_fit_at_once_is_refused():
    arrays = (device.to_device(np.zeros((5, 1), np.int32)) for _ in "ab")
    arrived, kernel = device.to_device(np.zeros(5, np.int32)), rounds(fence_and_add)
    with pytest.raises(RuntimeError, match="was not launched"):
        launch(kernel, 1 << 20, 1, arrived, 0, *arrays, together=True)
