"""The simulator raises where a GPU would do wrong without a word."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, uint32
from ptx_helpers import random_bits, run, simulated_only

from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT

pytestmark = simulated_only


@cuda.jit
def impatient_kernel(source, out):
    shared = cuda.shared.array(32 * 4, float32, ALIGNMENT)
    t = cuda.threadIdx.x
    shared[t] = float32(0)
    cuda.syncthreads()
    ptx.cp_async(shared, 4 * t, source, 4 * t)
    ptx.cp_async_commit()
    ptx.cp_async_wait(1)
    out[t] = shared[4 * t]


def test_a_missing_wait_shows_as_nan():
    out = run(impatient_kernel, np.ones(128, np.float32), out=np.empty(32, np.float32))
    assert np.isnan(out).all()


@cuda.jit
def diverged_kernel(x, out):
    t = cuda.threadIdx.x
    if t < 16:
        out[t] = ptx.shfl_xor(x[t], 1)
    else:
        out[t] = ptx.shfl_idx(x[t], 1)


@cuda.jit
def absent_kernel(x, out):
    t = cuda.threadIdx.x
    if t != 7:
        out[t] = ptx.shfl_xor(x[t], 1)


@cuda.jit
def second_warp_kernel(x, out):
    t = cuda.threadIdx.x
    if t >= 32:
        out[t] = ptx.shfl_xor(x[t], 1)


@cuda.jit
def misuse_kernel(x, which, out):
    shared = cuda.shared.array(32, uint32)
    t = cuda.threadIdx.x
    if which[0] == 0:
        ptx.cp_async(shared, 30, x, 0)
    elif which[0] == 1:
        ptx.cp_async(shared, 0, x, 29)
    elif which[0] == 2:
        ptx.cp_async(shared, 1, x, 0)
    elif which[0] == 3:
        ptx.cp_async(shared, 0, shared, 4)
    elif which[0] == 4:
        ptx.ldmatrix_x4(x, 0)
    elif which[0] == 5:
        out[t] = ptx.as_uint32(x[t])
    elif which[0] == 6:
        ptx.cp_async_zero_fill(shared, 0, x, 0, 17)
    elif which[0] == 7:
        ptx.load_4xu32(x, -4)


MISUSES = [
    (IndexError, "item 30"), (IndexError, "item 29"), (ValueError, "multiple of 16"),
    (TypeError, "global"), (TypeError, "shared"), (TypeError, "float32 got uint32"),
    (ValueError, "got 17"), (IndexError, "item -4"),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(MISUSES)), ids=lambda i: MISUSES[i][1])
def test_the_simulator_refuses(which, rng):
    error, text = MISUSES[which]
    with pytest.raises(error, match=text):
        run(misuse_kernel, random_bits(rng, 32), np.array([which]), out=np.empty(32, np.uint32))


def test_lanes_that_go_apart_are_an_error(rng):
    with pytest.raises(RuntimeError, match=r"shfl_xor in lanes \[0, .* shfl_idx in lanes \[16, "):
        run(diverged_kernel, random_bits(rng, 32), out=np.empty(32, np.uint32))


def test_an_absent_lane_is_named(rng):
    with pytest.raises(RuntimeError, match=r"31 for lanes \[7\] to run shfl_xor"):
        run(absent_kernel, random_bits(rng, 32), out=np.empty(32, np.uint32))


def test_a_block_ends_with_a_whole_warp(rng):
    with pytest.raises(RuntimeError, match="a block of 40 ends inside one"):
        run(second_warp_kernel, random_bits(rng, 40), out=np.empty(40, np.uint32), threads=40)
