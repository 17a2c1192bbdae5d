"""Races with `cp.async`, which copies beside the thread, and with what a warp stores together."""

import pytest
from numba import cuda, float32, types
from race_helpers import N, check, meet, nothing, of

from numbsparse import device
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")


@cuda.jit(device=True)
def wait():
    ptx.cp_async_wait(0)


def copying_kernel(commit, first, second):
    """y is x, the pieces of four values in reverse order."""

    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array(N, float32, ALIGNMENT)
        t = cuda.threadIdx.x
        ptx.cp_async(tile, 4 * t, x, 4 * t)
        commit()
        first()
        second()
        y[t] = tile[4 * (31 - t)]

    return kernel


def own_piece_kernel(between):
    """Each thread reads what it had copied itself: for that no barrier is needed."""

    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array(N, float32, ALIGNMENT)
        t = cuda.threadIdx.x
        ptx.cp_async(tile, 4 * t, x, 4 * t)
        ptx.cp_async_commit()
        between()
        y[t] = tile[4 * t]

    return kernel


def source_kernel(before, after):
    """The next values are put where these are still copied from."""

    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array(N, float32, ALIGNMENT)
        t = cuda.threadIdx.x
        ptx.cp_async(tile, 4 * t, x, 4 * t)
        ptx.cp_async_commit()
        before()
        x[4 * t] = t
        after()
        y[t] = tile[4 * t]

    return kernel


def ring_kernel(PENDING):
    """Three tiles through a ring of two stages."""

    @cuda.jit
    def kernel(x, y):
        ring = cuda.shared.array(2 * N, float32, ALIGNMENT)
        t = cuda.threadIdx.x
        for step in range(4):
            if step > 0:
                ptx.cp_async_wait(PENDING)
                cuda.syncthreads()
            if step < 3:
                ptx.cp_async(ring, step % 2 * N + 4 * t, x, 4 * t)
            ptx.cp_async_commit()
            if step > 0:
                y[t] = ring[(step - 1) % 2 * N + 4 * (31 - t)]

    return kernel


@cuda.jit
def stored_matrix_kernel(x, y):
    """Each lane reads a row that another one stores."""
    tile = cuda.shared.array(256, types.float16, ALIGNMENT)
    lane = cuda.threadIdx.x
    ptx.stmatrix_x4(tile, 8 * lane, *ptx.load_4xu32(x, 4 * lane))
    y[lane] = tile[8 * (31 - lane)]


@cuda.jit
def ordered_matrix_kernel(x, y):
    tile = cuda.shared.array(256, types.float16, ALIGNMENT)
    lane = cuda.threadIdx.x
    ptx.stmatrix_x4(tile, 8 * lane, *ptx.load_4xu32(x, 4 * lane))
    ptx.sync_warp()
    y[lane] = tile[8 * (31 - lane)]


@cuda.jit
def plain_sum_kernel(x, y):
    y[0] += x[cuda.threadIdx.x]


@cuda.jit
def atomic_sum_kernel(x, y):
    cuda.atomic.add(y, 0, x[cuda.threadIdx.x])


commit, warp = ptx.cp_async_commit, ptx.sync_warp

CASES = {  # a kernel that races, what is said of it, and its twin that does not
    "the barrier stands before the wait": (
        of(copying_kernel(commit, meet, wait)),
        "the copy that thread .* began writes .* what thread .* reads",
        of(copying_kernel(commit, wait, meet)),
    ),
    "the barrier of a warp stands before the wait": (
        of(copying_kernel(commit, warp, wait)),
        "the copy that thread .* began writes",
        of(copying_kernel(commit, wait, warp)),
    ),
    "nobody commits": (
        of(copying_kernel(nothing, wait, meet)),
        "the copy that thread .* began writes",
        of(copying_kernel(commit, wait, meet)),
    ),
    "nobody waits": (
        of(copying_kernel(commit, nothing, meet)),
        "the copy that thread .* began writes",
        of(copying_kernel(commit, wait, meet)),
    ),
    "a thread does not wait for its own copy": (
        of(own_piece_kernel(meet)),
        "the copy that thread 0 began writes to shared .* what thread 0 reads",
        of(own_piece_kernel(wait)),
    ),
    "what is copied is written meanwhile": (
        of(source_kernel(nothing, wait)),
        "thread 0 writes to global .* what the copy that thread 0 began reads",
        of(source_kernel(wait, nothing)),
    ),
    "a group too many is under way": (
        of(ring_kernel(1)),
        "the copy that thread .* began writes",
        of(ring_kernel(0)),
    ),
    "a lane reads what another stores": (
        of(stored_matrix_kernel),
        "thread .* writes to shared .* what thread .* reads",
        of(ordered_matrix_kernel),
    ),
    "a sum is added to by all": (
        of(plain_sum_kernel),
        "thread 0 writes to global .* what thread 1 writes",
        of(atomic_sum_kernel),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_race_is_found_and_its_twin_has_none(case):
    check(*CASES[case])
