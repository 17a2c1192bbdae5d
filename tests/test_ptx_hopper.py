"""The copy engine and its barriers against plain NumPy; in the simulator their meanings."""

import numpy as np
import pytest
from numba import cuda, float32, int64, uint8, uint16, uint32, uint64
from ptx_helpers import on_hopper, run, simulated_only

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT
from numbsparse.kernels.ptx.tiles import swizzled

pytestmark = on_hopper


def box_kernel(height, width):
    NBYTES = height * width

    @cuda.jit
    def kernel(x_map, column, row, out):
        """The bytes of a box as they are in shared memory."""
        shared = cuda.shared.array(0, uint8)
        bars = cuda.shared.array(1, uint64)
        t = uint32(cuda.threadIdx.x)
        start = ptx.first_multiple(shared, 1024)
        if t == 0:
            ptx.mbarrier_init(bars, 0, 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        ptx.fence_tensor_map(x_map)
        ptx.prefetch_tensor_map(x_map)
        if ptx.elect() != 0:
            ptx.mbarrier_expect(bars, 0, NBYTES)
            ptx.tma_load_2d(shared, start, x_map, column, row, bars, 0)
        ptx.mbarrier_wait(bars, 0, 0)
        for i in range(t, NBYTES, 32):
            out[i] = shared[start + i]

    return kernel


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("column", "row"), [(0, 0), (16, 5), (40, 30), (-8, -3), (0, 40)])
def test_tma_load_swizzles_and_fills_with_zeros(width, column, row, rng):
    wide = rng.standard_normal((37, 2, 56)).astype(np.float16)
    x, height = wide[:, 0], 24
    out = device.to_device(np.full(height * width, 0xFF, np.uint8))
    kept = device.to_device(wide)  # the map names its address
    x_map = tensor_map(kept[:, 0], (height, width // 2))
    kernel = box_kernel(height, width)
    launch(kernel, 1, 32, x_map, column, row, out, shared_bytes=height * width + 1024)

    padded = np.zeros((200, 200), np.float16)
    padded[50:87, 50:106] = x
    box = padded[50 + row :, 50 + column :][:height, : width // 2]
    expected = np.empty(height * width, np.uint8)
    expected[swizzled(np.arange(height * width), width)] = np.ravel(box).view(np.uint8)
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize("column", [-4, 1, 20])
def test_a_box_that_begins_between_multiples_of_16_bytes_is_refused(column):
    x, out = (
        device.to_device(np.zeros((8, 64), np.float16)),
        device.to_device(np.zeros(8, np.uint8)),
    )
    args = tensor_map(x, (8, 32)), column, 0, out
    with pytest.raises(ValueError, match=f"item {column}, where a box begins, is not"):
        launch(box_kernel(8, 64), 1, 32, *args, shared_bytes=2048)


def storing_kernel(height, width):
    NBYTES = height * width

    @cuda.jit
    def kernel(given, x_map, column, row):
        """The bytes of a box from shared memory, twice."""
        shared = cuda.shared.array(0, uint8)
        t = uint32(cuda.threadIdx.x)
        start = ptx.first_multiple(shared, 1024)
        ptx.fence_tensor_map(x_map)
        for turn in range(2):
            ptx.bulk_wait_read()
            ptx.sync_warp()
            for i in range(t, NBYTES, 32):
                shared[start + i] = given[turn, i]
            ptx.fence_proxy_async()
            ptx.sync_warp()
            if ptx.elect() != 0:
                ptx.tma_store_2d(shared, start, x_map, column, row)
                ptx.bulk_commit()
        ptx.bulk_wait_read()

    return kernel


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize(("column", "row"), [(0, 0), (16, 5), (40, 30), (0, 40)])
def test_tma_store_writes_what_is_inside(width, column, row, rng):
    height, before = 24, rng.standard_normal((37, 2, 56)).astype(np.float16)
    boxes = rng.standard_normal((2, height, width // 2)).astype(np.float16)
    given = np.empty((2, height * width), np.uint8)
    given[:, swizzled(np.arange(height * width), width)] = boxes.view(np.uint8).reshape(2, -1)
    kept = device.to_device(before)  # the map names its address
    x_map = tensor_map(kept[:, 0], (height, width // 2))
    kernel, shared_bytes = storing_kernel(height, width), height * width + 1024
    launch(kernel, 1, 32, device.to_device(given), x_map, column, row, shared_bytes=shared_bytes)

    padded = np.zeros((200, 200), np.float16)
    padded[50:87, 50:106] = before[:, 0]
    padded[50 + row :, 50 + column :][:height, : width // 2] = boxes[1]
    expected = before.copy()
    expected[:, 0] = padded[50:87, 50:106]
    np.testing.assert_array_equal(kept.numpy(), expected)


@cuda.jit
def stmatrix_kernel(registers, out):
    """Four matrices, then the transposed ones."""
    shared = cuda.shared.array((4, 8, 16), uint16, ALIGNMENT)
    t = cuda.threadIdx.x
    r0, r1, r2, r3 = registers[t, 0], registers[t, 1], registers[t, 2], registers[t, 3]
    for turn in range(2):
        if turn == 0:
            ptx.stmatrix_x4(shared, 16 * t, r0, r1, r2, r3)
        else:
            ptx.stmatrix_x4_trans(shared, 16 * t, r0, r1, r2, r3)
        ptx.sync_warp()
        for m in range(4):
            for i in range(t, 64, 32):
                out[turn, m, i // 8, i % 8] = shared[m, i // 8, i % 8]
        ptx.sync_warp()


def test_stmatrix_stores_fragments(rng):
    matrices = rng.integers(0, 2**16, (4, 8, 8), dtype=np.uint16)
    lanes = np.arange(32)  # each holds two neighbours of a row, of every matrix
    pairs = matrices.reshape(4, 8, 4, 2)[:, lanes // 4, lanes % 4]
    registers = np.ascontiguousarray(pairs).view(np.uint32)[:, :, 0].T
    got = run(stmatrix_kernel, registers, out=np.empty((2, 4, 8, 8), np.uint16))
    np.testing.assert_array_equal(got[0], matrices)
    np.testing.assert_array_equal(got[1], matrices.swapaxes(1, 2))


@cuda.jit
def layered_kernel(w_map, out):
    shared = cuda.shared.array(0, uint8)
    bars = cuda.shared.array(1, uint64)
    t = uint32(cuda.threadIdx.x)
    start = ptx.first_multiple(shared, 1024)
    if t == 0:
        ptx.mbarrier_init(bars, 0, 1)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    ptx.fence_tensor_map(w_map)
    if ptx.elect() != 0:
        ptx.mbarrier_expect(bars, 0, 1024)
        ptx.tma_load_3d(shared, start, w_map, 0, 0, 2, bars, 0)
    ptx.mbarrier_wait(bars, 0, 0)
    for i in range(t, 1024, 32):
        out[i] = shared[start + i]


@pytest.mark.parametrize(("inside", "step"), [((9, 32), 1), ((16, 20), 1), ((26, 32), 3)])
def test_tma_load_takes_a_part_of_a_layer(inside, step, rng):
    w = rng.integers(1, 2**16, (4, 48, 32), dtype=np.uint16)
    kept = device.to_device(w)
    out = device.to_device(np.full(1024, 0xFF, np.uint8))
    w_map = tensor_map(kept[:, : inside[0], : inside[1]], (1, 16, 32), (1, step, 1))
    launch(layered_kernel, 1, 32, w_map, out, shared_bytes=2048)
    layer = w[2].copy()
    layer[inside[0] :] = layer[:, inside[1] :] = 0
    got = out.numpy()[swizzled(np.arange(1024), 64)]
    np.testing.assert_array_equal(got, np.ravel(layer[::step][:16]).view(np.uint8))


ROUNDS = 5


@cuda.jit
def ring_kernel(x_map, out):
    """Two warps pass boxes through a ring of two stages."""
    shared = cuda.shared.array(0, float32)
    bars = cuda.shared.array(4, uint64)  # full, then empty
    t = uint32(cuda.threadIdx.x)
    start = ptx.first_multiple(shared, 1024)
    if t == 0:
        for stage in range(2):
            ptx.mbarrier_init(bars, stage, 1)
            ptx.mbarrier_init(bars, 2 + stage, 32)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        ptx.fence_tensor_map(x_map)
    for i in range(ROUNDS):
        stage, phase = i % 2, i // 2 % 2
        place = start + stage * 256
        if t < 32:
            ptx.mbarrier_wait(bars, 2 + stage, phase ^ 1)
            if ptx.elect() != 0:
                ptx.mbarrier_expect(bars, stage, 1024)
                ptx.tma_load_2d(shared, place, x_map, 0, 8 * i, bars, stage)
        else:
            ptx.mbarrier_wait(bars, stage, phase)
            total = float32(0)
            for j in range(t - 32, 256, 32):
                total += shared[place + j]
            out[i, t - 32] = total
            ptx.mbarrier_arrive(bars, 2 + stage)


def test_barriers_hand_stages_over(rng):
    x = rng.integers(0, 100, (8 * ROUNDS, 32)).astype(np.float32)
    kept = device.to_device(x)
    out = device.to_device(np.full((ROUNDS, 32), np.nan, np.float32))
    launch(ring_kernel, 1, 64, tensor_map(kept, (8, 32)), out, shared_bytes=4096)
    sums = x.reshape(ROUNDS, 256).sum(1)
    np.testing.assert_array_equal(out.numpy().sum(1), sums)


@cuda.jit
def arriving_copies_kernel(x, out):
    shared, bars = cuda.shared.array(256, float32, ALIGNMENT), cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        ptx.mbarrier_init(bars, 0, 32)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    if t < 32:
        ptx.cp_async(shared, 4 * t, x, 4 * t)
        ptx.cp_async_zero_fill(shared, 128 + 4 * t, x, 4 * t, 8)
        ptx.cp_async_arrive(bars, 0)
    else:
        ptx.mbarrier_wait(bars, 0, 0)
        for i in range(t - 32, 256, 32):
            out[i] = shared[i]


def test_copies_of_lanes_arrive_at_a_barrier(rng):
    x, out = rng.random(128, np.float32), np.full(256, np.nan, np.float32)
    x, out = device.to_device(x), device.to_device(out)
    launch(arriving_copies_kernel, 1, 64, x, out)
    kept = x.numpy().reshape(32, 4)
    np.testing.assert_array_equal(out.numpy()[:128], kept.ravel())
    np.testing.assert_array_equal(out.numpy()[128:], (kept * [1, 1, 0, 0]).ravel())


@cuda.jit
def uninitialized_kernel(out):
    bars = cuda.shared.array(1, uint64)
    ptx.mbarrier_arrive(bars, 0)
    out[0] = int64(0)


@cuda.jit
def too_many_kernel(out):
    bars = cuda.shared.array(1, uint64)
    ptx.mbarrier_init(bars, 0, 1)
    ptx.mbarrier_expect(bars, 0, 16)
    ptx.mbarrier_arrive(bars, 0)
    out[0] = int64(0)


@simulated_only
@pytest.mark.parametrize(
    ("kernel", "message"),
    [(uninitialized_kernel, "was not initialized"), (too_many_kernel, "more than 1 arrivals")],
)
def test_misused_barriers_are_reported(kernel, message):
    out = device.to_device(np.zeros(1, np.int64))
    with pytest.raises(RuntimeError, match=message):
        launch(kernel, 1, 1, out)
