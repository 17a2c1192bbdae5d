"""The simulator raises where a GPU would do wrong without a word."""

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint32, uint64
from ptx_helpers import random_bits, run, simulated_only

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT
from numbsparse.simulator.arrays import DYNAMIC_START

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
    elif which[0] == 8:
        ptx.cp_async_word(shared, 0, x, 0, 5)
    elif which[0] == 9:
        ptx.store_4xu32(shared, 0, x[t], x[t], x[t], t)


MISUSES = [
    (IndexError, "item 30"), (IndexError, "item 29"), (ValueError, "multiple of 16"),
    (TypeError, "global"), (TypeError, "shared"), (TypeError, "float32 got uint32"),
    (ValueError, "got 17"), (IndexError, "item -4"), (ValueError, "got 5"),
    (TypeError, "uint32 got int"),
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


@cuda.jit
def starts_kernel(out):
    """Where multiples of bytes begin: in dynamic arrays, a part of one, and a static one."""
    bytes_, words = cuda.shared.array(0, uint8), cuda.shared.array(0, uint32)
    static = cuda.shared.array(8, uint32)
    for k in range(7):
        nbytes = uint32(16 << k)
        first = ptx.first_multiple(bytes_, nbytes)
        out[k, 0], out[k, 1] = first, ptx.first_multiple(words, nbytes)
        out[k, 2] = ptx.first_multiple(bytes_[first:], nbytes)
        out[k, 3] = ptx.first_multiple(static, nbytes)
        words[out[k, 1]] = k
        out[k, 4] = bytes_[first]


def test_dynamic_memory_begins_at_a_multiple_of_16_bytes_only():
    out = device.to_device(np.full((7, 5), -1))
    launch(starts_kernel, 1, 1, out, shared_bytes=2048)
    first, k = [-DYNAMIC_START % (16 << k) for k in range(7)], np.arange(7)
    expected = np.stack([first, np.array(first) // 4, 0 * k, 0 * k, k], 1)
    np.testing.assert_array_equal(out.numpy(), expected)
    assert [*map(bool, first)] == [k > 0 for k in range(7)]


@cuda.jit
def swapped_kernel(x_map, x, out):
    """The second half of each line of a box, read by every lane in two ways."""
    shared = cuda.shared.array(0, uint8)
    bars = cuda.shared.array(1, uint64)
    start, t = ptx.first_multiple(shared, 1024), uint32(cuda.threadIdx.x)
    if t == 0:
        ptx.mbarrier_init(bars, 0, 1)
        ptx.mbarrier_expect(bars, 0, 32 * 64)
        ptx.tma_load_2d(shared, start, x_map, 0, 0, bars, 0)
    ptx.sync_warp()
    ptx.mbarrier_wait(bars, 0, 0)
    at = uint32(64 * t + t // 2 % 4 * 16)  # the first piece of line t
    out[t, 0] = ptx.load_1xu32(shared, start + (at ^ uint32(32)))[0] == x[t, 8]
    out[t, 1] = ptx.load_1xu32(shared, (start + at) ^ uint32(32))[0] == x[t, 8]


def test_bits_of_an_index_are_not_those_of_an_address():
    x = device.to_device(np.arange(32 * 16, dtype=np.uint32).reshape(32, 16))
    out = device.to_device(np.zeros((32, 2), np.uint32))
    x_map = tensor_map(x, (32, 16))
    launch(swapped_kernel, 1, 32, x_map, x, out, shared_bytes=32 * 64 + 1024)
    assert out.numpy()[:, 0].all()
    assert not out.numpy()[:, 1].all()


LINES = ptx.Operand(128, 64 * 128)


def factor_kernel():
    multiply, start_from = ptx.wgmma("f16", 1, 64, 4, LINES, LINES), ptx.zeros(32)

    @cuda.jit
    def kernel(at, out):
        shared = cuda.shared.array(0, uint8)
        multiply(start_from(), shared, at, shared, at)

    return kernel


def split_kernel():
    multiply = ptx.wgmma_split(8, 1, False)

    @cuda.jit
    def kernel(at, out):
        shared = cuda.shared.array(0, float32)
        a, acc = cuda.local.array(4, uint32), cuda.local.array(4, float32)
        multiply(acc, a, a, shared, at)

    return kernel


@cuda.jit
def multiple_kernel(nbytes, out):
    ptx.first_multiple(cuda.shared.array(0, uint8), nbytes)


@cuda.jit
def global_kernel(nbytes, out):
    ptx.first_multiple(out, nbytes)


@cuda.jit
def box_kernel(at, x_map):
    bars = cuda.shared.array(1, uint64)
    ptx.tma_load_2d(cuda.shared.array(0, uint8), at, x_map, 0, 0, bars, 0)


@cuda.jit
def awaited_box_kernel(at, x_map):
    bars = cuda.shared.array(1, uint64)
    ptx.mbarrier_init(bars, 0, 1)
    ptx.mbarrier_expect(bars, 0, 4 * 32)
    ptx.tma_load_2d(cuda.shared.array(0, uint8), at, x_map, 0, 0, bars, 0)
    ptx.mbarrier_wait(bars, 0, 0)


@pytest.mark.parametrize("start", [0, 128, 384])
def test_a_box_begins_at_any_multiple_of_128_bytes(start):
    x = device.to_device(np.zeros((4, 8), np.uint32))
    at = -DYNAMIC_START % 1024 + start
    launch(awaited_box_kernel, 1, 1, at, tensor_map(x, (4, 8)), shared_bytes=2048)


UNALIGNED = -DYNAMIC_START % 1024 + 8  # an index


@pytest.mark.parametrize(
    ("kernel", "number", "error", "text"),
    [
        (multiple_kernel, 48, ValueError, "a power of 2 up to 1024 bytes, got 48"),
        (multiple_kernel, 2048, ValueError, "got 2048"),
        (global_kernel, 16, TypeError, "got one in global memory"),
        (box_kernel, 0, ValueError, "not at a multiple of 128"),
        (box_kernel, -DYNAMIC_START % 128 + 2048, ValueError, "does not fit at byte"),
        (factor_kernel(), UNALIGNED, ValueError, "multiple of 16"),
        (factor_kernel(), 0, IndexError, "begins before"),
        (split_kernel(), UNALIGNED // 4, ValueError, "multiple of 16"),
    ],
)
def test_addresses_that_do_not_serve_are_refused(kernel, number, error, text):
    x = device.to_device(np.zeros((32, 16), np.uint32))
    last = tensor_map(x, (32, 16)) if kernel is box_kernel else x
    with pytest.raises(error, match=text):
        launch(kernel, 1, 128, number, last, shared_bytes=3072)
