"""What kernels ask of the memory is counted right: requests, sectors, wavefronts, barriers."""

import numpy as np
import pytest
from numba import cuda, float32, uint64

import numbsparse as ns
from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.kernels.ptx import ALIGNMENT
from numbsparse.testing import count

simulator = pytest.mark.skipif(not device.SIMULATED, reason="counting takes the simulator")


@cuda.jit
def copy_kernel(x, stride, out):
    i = cuda.grid(1)
    out[i] = x[i * stride]


@cuda.jit
def shared_kernel(stride, out):
    tile = cuda.shared.array(32 * 33, float32)
    t = cuda.threadIdx.x
    tile[t * stride] = t
    cuda.syncthreads()
    out[t] = tile[t * stride]


@cuda.jit
def wide_kernel(x, out):
    tile = cuda.shared.array((32, 4), float32, ALIGNMENT)
    t = cuda.threadIdx.x
    ptx.cp_async(tile, 4 * t, x, 4 * t)
    ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    a, b, c, d = ptx.load_4xf32(tile, 4 * t)
    ptx.store_4xf32(out, 4 * t, a, b, c, d)


@cuda.jit
def loop_kernel(x, out):
    t = cuda.threadIdx.x
    total = float32(0)
    for i in range(t // 32 + 1):  # the second warp reads twice
        total += x[32 * i + t % 32]
    if t % 2 == 0:
        out[t] = total
    else:
        out[t] = -total


@cuda.jit
def slice_kernel(x, out):
    tile = cuda.shared.array((4, 4), float32)
    t = cuda.threadIdx.x
    tile[t] = 1
    out[t, :] = tile[t, 0] + x[t]


@cuda.jit
def last_kernel(x, out):
    t = cuda.threadIdx.x
    out[-1 - t] = x[t] + x[-x.size + t]


@cuda.jit
def bulk_kernel(x, out):
    tile = cuda.shared.array(64, float32, ALIGNMENT)
    bars = cuda.shared.array(1, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        ptx.mbarrier_init(bars, 0, 1)
        ptx.mbarrier_expect(bars, 0, 256)
        ptx.bulk_load(tile, 0, x, 0, 256, bars, 0)
    cuda.syncthreads()
    ptx.mbarrier_wait(bars, 0, 0)
    out[t] = tile[t]


def array(*shape):
    return ns.to_device(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))


@simulator
@pytest.mark.parametrize(("stride", "sectors"), [(0, 1), (1, 4), (2, 8), (8, 32), (100, 32)])
def test_sectors_follow_from_the_addresses(stride, sectors):
    x, out = array(64 * 100), array(64)
    (counted,) = count(lambda: launch(copy_kernel, 2, 32, x, stride, out))
    assert counted.global_reads[:4] == (2, 64, 256, 2 * sectors)
    assert counted.global_reads.excess == 2 * (sectors - (4 if stride else 1))
    assert counted.global_writes == (2, 64, 256, 8, 8)
    assert counted.shared_reads == counted.shared_writes == (0, 0, 0, 0, 0)
    assert counted.barriers == 0
    np.testing.assert_array_equal(out.numpy(), np.arange(64) * stride)


@simulator
@pytest.mark.parametrize(("stride", "ways"), [(1, 1), (2, 2), (3, 1), (16, 16), (32, 32), (33, 1)])
def test_wavefronts_follow_from_the_banks(stride, ways):
    (counted,) = count(lambda: launch(shared_kernel, 1, 32, stride, array(32)))
    assert counted.shared_writes == (1, 32, 128, ways, 1)
    assert counted.shared_reads.units == ways
    assert counted.shared_reads.excess == ways - 1
    assert counted.barriers == 1


@simulator
def test_wide_accesses_go_in_parts():
    x, out = array(128), array(128)
    (counted,) = count(lambda: launch(wide_kernel, 1, 32, x, out))
    assert counted.global_reads == (1, 32, 512, 16, 16)
    assert counted.shared_writes == counted.shared_reads == (1, 32, 512, 4, 4)
    assert counted.global_writes == (1, 32, 512, 16, 16)


@simulator
def test_each_time_and_each_branch_is_a_request_of_its_own():
    (counted,) = count(lambda: launch(loop_kernel, 1, 64, array(64), array(64)))
    assert counted.global_reads == (3, 96, 384, 12, 12)
    # Both branches of both warps store 16 values in every second place.
    assert counted.global_writes == (4, 64, 256, 16, 8)


@cuda.jit
def local_kernel(x, out):
    t = cuda.threadIdx.x
    for i in range(3):
        kept = cuda.local.array(6, float32)
        kept[0] = x[i]
    if t == 1:
        other = cuda.local.array((2, 2), uint64)
        other[0, 0] = t
    out[t] = kept[0]


@simulator
def test_local_arrays_are_those_of_the_text_in_the_thread_with_most():
    (counted,) = count(lambda: launch(local_kernel, 1, 4, array(4), array(4)))
    assert counted.local_bytes == 6 * 4 + 4 * 8
    (counted,) = count(lambda: launch(copy_kernel, 1, 4, array(4), 1, array(4)))
    assert counted.local_bytes == 0


@simulator
def test_a_slice_is_an_access_for_each_of_its_values():
    out = array(4, 4)
    (counted,) = count(lambda: launch(slice_kernel, 1, 4, array(4), out))
    assert counted.shared_writes[:3] == counted.global_writes[:3] == (4, 16, 64)
    assert counted.shared_reads[:3] == counted.global_reads[:3] == (1, 4, 16)
    np.testing.assert_array_equal(out.numpy(), [[1] * 4, [2] * 4, [3] * 4, [4] * 4])


@simulator
def test_negative_places_count_from_the_end():
    x = array(12)
    (counted,) = count(lambda: launch(last_kernel, 1, 8, x, x))
    touched = {byte // 32 for byte in range(x.address + 16, x.address + 48)}
    assert counted.global_writes[:4] == (1, 8, 32, len(touched))


@simulator
def test_what_wgmma_reads_is_named():
    w = ns.nn.init.uniform(ns.Layout([[1]]), 32, seed=0).astype("float16").to("cuda")
    x = ns.to_device(np.ones((16, 32), np.float16))
    counted = count(lambda: ns.matmul(x, w, kernel="k6_hopper"))[-1]
    assert counted.unseen == ("the copy engine", "wgmma")


@simulator
def test_what_the_copy_engine_moves_is_named_and_not_counted():
    x, out = array(64), array(32)
    (counted,) = count(lambda: launch(bulk_kernel, 1, 32, x, out))
    assert counted.global_reads.requests == counted.shared_writes.requests == 0
    assert counted.shared_reads[:3] == (1, 32, 128)
    assert counted.unseen == ("the copy engine",)
    assert str(counted).endswith("not counted: the bytes of the copy engine")
    np.testing.assert_array_equal(out.numpy(), x.numpy()[:32])


@simulator
@pytest.mark.parametrize("product", ["forward", "weight_grad"])
def test_the_naive_rung_reads_what_its_formula_says(product):
    """Two reads for each product; the blocks, and where they are, beside that."""
    size, n, batch = 8, 2, 4
    w = ns.nn.init.uniform(ns.Layout(np.ones((n, n))), size, seed=0).to("cuda")
    x = ns.to_device(np.ones((batch, n * size), np.float32))
    calls = {
        "forward": lambda: ns.matmul(x, w, kernel="k1_naive"),
        "weight_grad": lambda: ns.sddmm(x.T, x, w, kernel="k1_naive"),
    }
    (counted,) = count(calls[product])
    products = batch * n * n * size * size
    index_reads = counted.global_reads.accesses - 2 * products
    assert 0 <= index_reads <= 0.5 * products
    outputs = batch * n * size if product == "forward" else n * n * size * size
    assert counted.global_writes.accesses == outputs


@simulator
def test_launches_are_distinguished_and_shown():
    x, out = array(64), array(64)

    def call():
        launch(copy_kernel, 1, 32, x, 1, out)
        launch(shared_kernel, (1, 1), (32, 1), 1, out)

    first, second = count(call)
    assert (first.kernel, second.kernel) == ("copy_kernel", "shared_kernel")
    assert "4 sectors" in str(first)
    assert "1 barriers" in str(second)
    launch(copy_kernel, 1, 32, x, 1, out)  # nobody watches any more


@simulator
def test_one_watcher_at_a_time():
    with pytest.raises(RuntimeError, match="already"):
        count(lambda: count(lambda: None))
    assert count(lambda: None) == []


@pytest.mark.skipif(device.SIMULATED, reason="without the simulator")
def test_refuses_without_the_simulator():
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        count(lambda: None)
