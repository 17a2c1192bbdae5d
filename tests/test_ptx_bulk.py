"""Copies without a box, and boxes that a cluster shares."""

import numpy as np
import pytest
from numba import cuda, float32, uint8, uint32, uint64
from ptx_helpers import on_hopper, simulated_only

from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map, tensor_maps
from numbsparse.kernels import ptx

pytestmark = on_hopper


@cuda.jit
def bulk_kernel(source, first, nbytes, out):
    shared = cuda.shared.array(0, uint8)
    bars = cuda.shared.array(1, uint64)
    t = uint32(cuda.threadIdx.x)
    start = ptx.first_multiple(shared, 1024)
    if t == 0:
        ptx.mbarrier_init(bars, 0, 1)
        ptx.fence_mbarrier_init()
    cuda.syncthreads()
    if ptx.elect() != 0:
        ptx.mbarrier_expect(bars, 0, uint32(nbytes))
        ptx.bulk_load(shared, start + 32, source, first, uint32(nbytes), bars, 0)
    ptx.mbarrier_wait(bars, 0, 0)
    for i in range(t, nbytes, 32):
        out[i] = shared[start + 32 + i]


@pytest.mark.parametrize(("first", "nbytes"), [(0, 16), (4, 4096), (1000, 64)])
def test_bulk_load_copies_bytes(first, nbytes, rng):
    source = rng.integers(0, 2**32, 2048, dtype=np.uint32)
    out = device.to_device(np.zeros(nbytes, np.uint8))
    args = device.to_device(source), first, nbytes, out
    launch(bulk_kernel, 1, 32, *args, shared_bytes=8192)
    np.testing.assert_array_equal(out.numpy(), source[first:].view(np.uint8)[:nbytes])


@cuda.jit
def lone_kernel(source, first, nbytes):
    shared = cuda.shared.array(0, uint8)
    bars = cuda.shared.array(1, uint64)
    ptx.mbarrier_init(bars, 0, 1)
    ptx.bulk_load(shared, 0, source, first, uint32(nbytes), bars, 0)


@simulated_only
@pytest.mark.parametrize(("first", "nbytes"), [(0, 20), (1, 16), (2040, 64)])
def test_bulk_load_is_refused_between_multiples_of_16_bytes_and_outside(first, nbytes, rng):
    source = rng.integers(0, 2**32, 2048, dtype=np.uint32)
    with pytest.raises((ValueError, IndexError)):
        launch(lone_kernel, 1, 1, device.to_device(source), first, nbytes, shared_bytes=8192)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((0, 64), (32, 32)),  # an empty axis
        ((64, 64), (257, 32)),
        ((64, 64), (32, 64)),  # lines of 256 bytes
        ((64, 64), (32, 6)),  # of 24 bytes
        ((64, 64), (32, 4)),  # of 16 bytes
        ((64, 66), (32, 32)),  # from row to row 264 bytes
    ],
)
def test_maps_that_no_copy_engine_takes_are_refused(shape, box):
    x = device.to_device(np.zeros(shape, np.float32))
    with pytest.raises(RuntimeError, match="a tensor map of"):
        tensor_map(x, box)


@pytest.mark.parametrize("box", [(32, 32), (32, 6)])
def test_lines_of_swizzled_bytes_are_not_plain_nor_those_between_16_bytes(box):
    x = device.to_device(np.zeros((64, 64), np.float32))
    with pytest.raises(RuntimeError, match="a tensor map of"):
        tensor_maps((x, box, (), True))
    assert tensor_maps((x, (32, 36), (), True)).shape == (1, 16)


def test_a_map_alone_is_not_taken_for_a_list_of_one():
    x = device.to_device(np.zeros((64, 64), np.float32))
    for _ in range(2):
        assert tensor_maps((x, (32, 32))).shape == (1, 16)
        assert tensor_map(x, (32, 32)).shape == (16,)


def shared_box_kernel(CLUSTER):
    RANKS, NBYTES = (1 << CLUSTER) - 1, 8 * 64

    @cuda.jit
    def kernel(x_map, out):
        """Each block asks for a box for all blocks: as many land in each."""
        shared = cuda.shared.array(0, uint8)
        bars = cuda.shared.array(1, uint64)
        t, rank = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        start = ptx.first_multiple(shared, 1024)
        if t == 0:
            ptx.mbarrier_init(bars, 0, 1)
            ptx.fence_mbarrier_init()
        cuda.syncthreads()
        ptx.cluster_sync()
        if ptx.elect() != 0:
            ptx.mbarrier_expect(bars, 0, CLUSTER * NBYTES)
            to = start + rank * NBYTES
            ptx.tma_load_2d_multicast(shared, to, x_map, rank * 32, 0, bars, 0, RANKS)
        ptx.mbarrier_wait(bars, 0, 0)
        for i in range(t, CLUSTER * NBYTES, 32):
            out[rank, i] = shared[start + i]
        ptx.cluster_sync()

    return kernel


def test_a_box_lands_in_every_block_of_a_cluster(rng):
    cluster = 2
    x = device.to_device(rng.integers(0, 2**16, (8, 64), dtype=np.uint16))
    out = device.to_device(np.zeros((cluster, cluster * 8 * 64), np.uint8))
    args = tensor_map(x, (8, 32)), out
    kernel = shared_box_kernel(cluster)
    launch(kernel, cluster, 32, *args, shared_bytes=4096, cluster=(cluster,))
    rows, byte = np.divmod(np.arange(8 * 64), 64)
    swizzled = byte ^ rows // 2 % 4 * 16
    boxes = [x.numpy()[:, 32 * r : 32 * r + 32].copy().view(np.uint8) for r in range(cluster)]
    expected = np.concatenate([box[rows, swizzled] for box in boxes])
    np.testing.assert_array_equal(out.numpy(), np.tile(expected, (cluster, 1)))


def taking_kernel(CLUSTER):
    @cuda.jit
    def kernel(x, out):
        """Each block leaves its numbers, and takes those of the next block."""
        floats = cuda.shared.array(0, float32)
        t, rank = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x) % CLUSTER
        for i in range(4):
            floats[4 * t + i] = x[cuda.blockIdx.x, 4 * t + i]
        ptx.cluster_sync()
        there = ptx.load_4xf32_at(floats, 4 * (31 - t), uint32((rank + 1) % CLUSTER))
        for i in range(4):
            out[cuda.blockIdx.x, 4 * t + i] = there[i]
        ptx.cluster_sync()

    return kernel


def leaving_kernel(CLUSTER):
    @cuda.jit
    def kernel(x, out):
        """Each block leaves its numbers with the one before, where another thread takes them."""
        floats = cuda.shared.array(0, float32)
        t, rank = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x) % CLUSTER
        own, before = x[cuda.blockIdx.x, 4 * t : 4 * t + 4], uint32((rank + CLUSTER - 1) % CLUSTER)
        ptx.cluster_sync()
        ptx.store_4xf32_at(floats, 4 * (31 - t), before, own[0], own[1], own[2], own[3])
        ptx.cluster_sync()
        for i in range(4):
            out[cuda.blockIdx.x, 4 * t + i] = floats[4 * t + i]

    return kernel


@pytest.mark.parametrize("kernel_of", [taking_kernel, leaving_kernel])
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_numbers_of_another_block_of_the_cluster(cluster, kernel_of, rng):
    x = rng.standard_normal((2 * cluster, 128), np.float32)
    out = device.to_device(np.full(x.shape, np.nan, np.float32))
    args = device.to_device(x), out
    launch(kernel_of(cluster), len(x), 32, *args, shared_bytes=1024, cluster=(cluster,))
    clusters = x.reshape(2, cluster, 32, 4)
    expected = np.roll(clusters, -1, axis=1)[:, :, ::-1].reshape(x.shape)
    np.testing.assert_array_equal(out.numpy(), expected)


@cuda.jit
def outside_kernel(first):
    floats = cuda.shared.array(0, float32)
    ptx.load_4xf32_at(floats, first, uint32(0))


@cuda.jit
def leaving_outside_kernel(first):
    floats, one = cuda.shared.array(0, float32), float32(1)
    ptx.store_4xf32_at(floats, first, uint32(0), one, one, one, one)


@simulated_only
@pytest.mark.parametrize("kernel", [outside_kernel, leaving_outside_kernel])
@pytest.mark.parametrize("first", [-4, 2, 254, 256])
def test_numbers_beside_the_shared_memory_are_refused(first, kernel):
    with pytest.raises((IndexError, ValueError)):
        launch(kernel, 1, 1, first, shared_bytes=1024, cluster=(1,))
