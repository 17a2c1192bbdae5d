"""Races with the copy engine and `wgmma`, and between blocks of threads."""

import numpy as np
import pytest
from numba import cuda, float32, types, uint64
from race_helpers import N, array, check, meet, nothing, of

import numbsparse as ns
from numbsparse import device, testing
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")


def bulk_kernel(wait_full, refill, after_init=meet):
    """Thread 0 has a tile fetched, and the next one into the same place."""

    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array(N, float32, ALIGNMENT)
        bars = cuda.shared.array(2, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            ptx.mbarrier_init(bars, 0, 1)
            ptx.mbarrier_init(bars, 1, 1)
        after_init()
        for step in range(2):
            if t == 0:
                ptx.mbarrier_expect(bars, step, 4 * N)
                ptx.bulk_load(tile, 0, x, 0, 4 * N, bars, step)
            wait_full(bars, step)
            y[t] = tile[t]
            refill()

    return kernel


@cuda.jit(device=True)
def wait_for_all(bars, step):
    ptx.mbarrier_wait(bars, step, 0)


@cuda.jit(device=True)
def only_first_waits(bars, step):
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_wait(bars, step, 0)


def storing_kernel(fence, commit, wait_read):
    """Thread 0 has a tile stored that all have written, twice."""

    @cuda.jit
    def kernel(x_map):
        tile = cuda.shared.array((8, 16), float32, ALIGNMENT)
        t = cuda.threadIdx.x
        for step in range(2):
            for i in range(4):
                tile[i + 4 * (t // 16), t % 16] = step
            fence()
            cuda.syncthreads()
            if t == 0:
                ptx.tma_store_2d(tile, 0, x_map, 0, 8 * step)
                commit()
                wait_read()
            cuda.syncthreads()

    return kernel


def product_kernel(fence, barrier, last):
    """Threads store two factors, a warpgroup multiplies them, and the factors are written anew."""
    lines = ptx.Operand(128, 64 * 128)
    multiply, zeros = ptx.wgmma("f16", 1, 8, 4, lines, lines), ptx.zeros(4)

    @cuda.jit
    def kernel(out):
        operands = cuda.shared.array((72, 64), types.float16, ALIGNMENT)
        t = cuda.threadIdx.x
        for i in range(36):
            operands[i * 2 + t // 64, t % 64] = 1
        fence()
        barrier()
        acc = multiply(zeros(), operands, 0, operands, 64 * 64)
        last()
        operands[t // 2, t % 2] = 2
        out[t] = acc[0]

    return kernel


def told_kernel(first, then):
    """A block of threads tells the other by a counter what it has written."""

    @cuda.jit
    def kernel(data, counter, out):
        if cuda.blockIdx.x == 0:
            first(data, counter)
            then(data, counter)
        else:
            while ptx.load_acquire(counter, 0) == 0:
                pass
            out[0] = data[0]

    return kernel


@cuda.jit(device=True)
def write(data, counter):
    data[0] = 5


@cuda.jit(device=True)
def tell(data, counter):
    ptx.add_release(counter, 0, 1)


def of_stores(kernel):
    def call():
        y = ns.to_device(np.zeros((16, 16), np.float32))
        launch(kernel, 1, 32, tensor_map(y, (8, 16)))

    return call


def of_product(kernel):
    return lambda: launch(kernel, 1, 128, array())


def of_two_blocks(kernel):
    def call():
        counter = ns.to_device(np.zeros(1, np.int32))
        launch(kernel, 2, 1, array(), counter, array(), together=True)

    return call


fence, stored, read_done = ptx.fence_proxy_async, ptx.bulk_commit, ptx.bulk_wait_read

CASES = {  # a kernel that races, what is said of it, and its twin that does not
    "nobody waits for the copy engine": (
        of(bulk_kernel(only_first_waits, meet)),
        "the copy engine, started by thread 0, writes to shared .* what thread 1 reads",
        of(bulk_kernel(wait_for_all, meet)),
    ),
    "the copy engine overwrites what is read": (
        of(bulk_kernel(wait_for_all, nothing)),
        "the copy engine, started by thread 0, writes to shared .* what thread 1 reads",
        of(bulk_kernel(wait_for_all, meet)),
    ),
    "an mbarrier is used before it is there": (
        of(bulk_kernel(wait_for_all, meet, nothing)),
        "thread 0 writes to shared .* what thread 1 reads",
        of(bulk_kernel(wait_for_all, meet)),
    ),
    "the copy engine does not see what was stored": (
        of_stores(storing_kernel(nothing, stored, read_done)),
        "thread 0 writes to shared .* what the copy engine, started by thread 0, reads",
        of_stores(storing_kernel(fence, stored, read_done)),
    ),
    "what the copy engine reads is written": (
        of_stores(storing_kernel(fence, stored, nothing)),
        "thread 0 writes to shared .* what the copy engine, started by thread 0, reads",
        of_stores(storing_kernel(fence, stored, read_done)),
    ),
    "nobody commits a store": (
        of_stores(storing_kernel(fence, nothing, read_done)),
        "thread 0 writes to shared .* what the copy engine, started by thread 0, reads",
        of_stores(storing_kernel(fence, stored, read_done)),
    ),
    "wgmma does not wait for other threads": (
        of_product(product_kernel(fence, nothing, meet)),
        "thread 0 writes to shared .* what wgmma of the warp of thread .* reads",
        of_product(product_kernel(fence, meet, meet)),
    ),
    "wgmma does not see what was stored": (
        of_product(product_kernel(nothing, meet, meet)),
        "thread 0 writes to shared .* what wgmma of the warp of thread .* reads",
        of_product(product_kernel(fence, meet, meet)),
    ),
    "an operand is written while other warps read it": (
        of_product(product_kernel(fence, meet, nothing)),
        "thread .* writes to shared .* what wgmma of the warp of thread .* reads",
        of_product(product_kernel(fence, meet, meet)),
    ),
    "told before it is written": (
        of_two_blocks(told_kernel(tell, write)),
        "thread 0 writes to global .* what thread 0 of another block reads",
        of_two_blocks(told_kernel(write, tell)),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_race_is_found_and_its_twin_has_none(case):
    with testing.in_turns("rising"):  # what a race makes of a kernel is chance
        check(*CASES[case])
