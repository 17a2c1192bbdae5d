"""The simulator's threads: who may run when, what waits for ever, and what an error leaves."""

import math
import os
import sys
import threading

import numpy as np
import pytest
from numba import cuda, float32, uint64

import numbsparse as ns
from numbsparse import device
from numbsparse.device.launch import launch
from numbsparse.kernels import ptx
from numbsparse.testing import in_turns

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")


@cuda.jit
def places_kernel(out):
    x, y, z = cuda.threadIdx.x, cuda.threadIdx.y, cuda.threadIdx.z
    out[cuda.blockIdx.y, z, y, x] = x + 10 * y + 100 * z


@cuda.jit
def rounds_kernel(out):
    """Each thread adds its part after those before it: as many barriers as threads."""
    sums, t = cuda.shared.array(1, float32), cuda.threadIdx.x
    if t == 0:
        sums[0] = 0
    for k in range(cuda.blockDim.x):
        cuda.syncthreads()
        if k == t:
            sums[0] = 2 * sums[0] + t
    cuda.syncthreads()
    out[t] = sums[0]


@cuda.jit
def early_kernel(out):
    t = cuda.threadIdx.x
    if t % 2 == 0:
        return  # those who ended are not waited for
    out[t] = cuda.syncthreads_count(t > 4)


@cuda.jit
def forgotten_kernel(out):
    bars = cuda.shared.array(2, uint64)
    if cuda.threadIdx.x == 0:
        ptx.mbarrier_init(bars, 1, 3)
    cuda.syncthreads()
    if cuda.threadIdx.x == 1:
        ptx.mbarrier_expect(bars, 1, 16)
        ptx.mbarrier_wait(bars, 1, 0)
    cuda.syncthreads()


@cuda.jit
def told_kernel(counter, out):
    t = cuda.threadIdx.x
    if t == 0:
        while ptx.load_acquire(counter, 0) < 31:
            pass
        out[0] = 5
    else:
        ptx.add_release(counter, 0, 1)


@cuda.jit
def own_memory_kernel(out):
    """Each block finds its shared memory as nobody wrote to it before."""
    here, dynamic = cuda.shared.array(1, float32), cuda.shared.array(0, float32)
    i = cuda.blockIdx.x
    out[i] = here[0] != here[0] and dynamic[1] != dynamic[1]
    here[0] = dynamic[1] = i
    ptx.cluster_sync()
    out[i] += here[0] + dynamic[1]


@cuda.jit
def relay_kernel(out):
    """A block waits for its own barrier, at which the other block of the cluster arrives."""
    bars, rank = cuda.shared.array(1, uint64), cuda.blockIdx.x % 2
    ptx.mbarrier_init(bars, 0, 1)
    ptx.cluster_sync()
    if rank == 0:
        ptx.mbarrier_wait(bars, 0, 0)
        out[cuda.blockIdx.x] = 2 * out[cuda.blockIdx.x + 1]
    else:
        out[cuda.blockIdx.x] = cuda.blockIdx.x
        ptx.mbarrier_arrive_at(bars, 0, 0)


@cuda.jit
def uneven_end_kernel(out):
    """Some threads end before their cluster meets: they are not waited for."""
    if cuda.threadIdx.x > cuda.blockIdx.x:
        return
    ptx.cluster_sync()
    if cuda.threadIdx.x == cuda.blockIdx.x:
        out[cuda.blockIdx.x] = cuda.threadIdx.x


@cuda.jit
def other_block_kernel(counter):
    if cuda.blockIdx.x == 0:
        while ptx.load_acquire(counter, 0) == 0:
            pass
    ptx.add_release(counter, 0, 1)


@cuda.jit
def third_fails_kernel(out):
    if cuda.threadIdx.x == 2:
        raise ValueError("too much")
    if cuda.threadIdx.x > 2:  # nobody begins after that
        out[cuda.threadIdx.x] = 1
    cuda.syncthreads()
    out[cuda.threadIdx.x] = 1


@cuda.jit(debug=True, opt=False)
def quotient_kernel(out):
    out[0] = out[0] / float32(0)


@cuda.jit
def neighbours_kernel(out):
    """What the block in the middle along x and second along z tells the others of its cluster."""
    x, y, z = cuda.blockIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
    out[z, y, x] = x + 10 * z + 100
    ptx.cluster_sync()
    told = out[z // 2 * 2 + 1, y, x // 3 * 3 + 1]
    ptx.cluster_sync()
    out[z, y, x] = told


def outputs(shape=8, dtype="float32"):
    return ns.to_device(np.full(shape, -1, dtype))


def counter():
    return ns.to_device(np.zeros(1, np.int32))


def test_a_thread_knows_its_place():
    out = outputs((3, 2, 4, 5))
    launch(places_kernel, (1, 3), (5, 4, 2), out)
    z, y, x = np.indices((2, 4, 5))
    np.testing.assert_array_equal(out.numpy(), np.broadcast_to(x + 10 * y + 100 * z, out.shape))


def test_barriers_order_the_threads():
    out = outputs()
    launch(rounds_kernel, 1, 8, out)
    np.testing.assert_array_equal(out.numpy(), 247)  # 2 (2 (2 (0) + 1) + 2) + ... + 7


def test_a_barrier_opens_when_the_others_have_ended():
    out = outputs()
    launch(early_kernel, 1, 8, out)
    np.testing.assert_array_equal(out.numpy(), [-1, 2, -1, 2, -1, 2, -1, 2])


def test_threads_that_wait_for_ever_say_for_what():
    text = (
        r"tid=\[1, 0, 0\].* no thread can go on; they wait, "
        r"3 for all threads at cuda.syncthreads\(\); 1 for 2 arrivals and 16 bytes at mbarrier 1"
    )
    with pytest.raises(RuntimeError, match=text):
        launch(forgotten_kernel, 1, 4, outputs())


def test_who_polls_lets_the_others_run():
    out = outputs(1)
    launch(told_kernel, 1, 32, counter(), out)
    assert out.numpy() == 5


def test_nobody_polls_for_a_later_block():
    with pytest.raises(RuntimeError, match="waits for what no thread that runs does"):
        launch(other_block_kernel, 2, 1, counter())


def test_blocks_have_memory_of_their_own():
    for cluster in (None, (2,)):
        out = outputs(4)
        launch(own_memory_kernel, 4, 1, out, shared_bytes=8, cluster=cluster)
        np.testing.assert_array_equal(out.numpy(), 1 + 2 * np.arange(4))


def test_blocks_of_a_cluster_wait_for_each_other():
    out = outputs(6)
    launch(relay_kernel, 6, 1, out, cluster=(2,))
    np.testing.assert_array_equal(out.numpy(), [2, 1, 6, 3, 10, 5])


def test_a_cluster_meets_when_the_others_have_ended():
    out = outputs(2)
    launch(uneven_end_kernel, 2, 4, out, cluster=(2,))
    np.testing.assert_array_equal(out.numpy(), [0, 1])


def test_blocks_that_do_not_run_together_do_not_meet():
    with pytest.raises(RuntimeError, match="1 for 1 arrivals and 0 bytes at mbarrier 0"):
        launch(relay_kernel, 6, 1, outputs(6))


def test_all_blocks_run_together_where_they_wait_for_each_other():
    count = counter()
    launch(other_block_kernel, 2, 1, count, together=True)
    assert count.numpy() == 2


def test_a_cluster_extends_along_any_axis():
    out = ns.to_device(np.zeros((4, 2, 6), np.int32))
    launch(neighbours_kernel, (6, 2, 4), 1, out, cluster=(3, 1, 2))
    z, _, x = np.indices(out.shape)
    np.testing.assert_array_equal(out.numpy(), x // 3 * 3 + 1 + 10 * (z // 2 * 2 + 1) + 100)


def test_an_error_names_its_thread_and_ends_the_others():
    out = outputs()
    for _ in range(2):
        says = r"tid=\[2, 0, 0\] ctaid=\[0, 0, 0\]: too much"
        with pytest.raises(ValueError, match=says), in_turns("rising"):
            launch(third_fails_kernel, 1, 8, out)
    np.testing.assert_array_equal(out.numpy(), -1)
    launch(rounds_kernel, 1, 8, out)
    np.testing.assert_array_equal(out.numpy(), 247)


@cuda.jit(device=True)
def logarithm(x):
    return math.log(x)


@cuda.jit
def math_kernel(x, out):
    out[0], out[1] = logarithm(x[0]), math.sqrt(x[1])
    out[2], out[3] = math.exp(x[2]), math.pow(x[0], x[1])
    out[4], out[5] = math.sin(x[3]), math.erf(x[2]) + math.pi


def test_functions_of_math_have_the_results_that_a_gpu_gives():
    """And the module of the kernel has Python's again afterwards."""
    out = np.zeros(6)
    math_kernel[1, 1](np.array([0.0, -1.0, 1000.0, np.inf]), out)
    np.testing.assert_array_equal(out, [-np.inf, np.nan, np.inf, np.inf, np.nan, 1 + np.pi])
    with pytest.raises(ValueError, match=r"math domain error|expected a positive input"):
        math.log(0.0)


def test_a_division_by_zero_is_seen_where_one_looks():
    with pytest.raises(FloatingPointError, match=r"tid=\[0, 0, 0\].* divide by zero"):
        launch(quotient_kernel, 1, 1, outputs())


def test_threads_of_python_serve_again():
    launch(rounds_kernel, 2, 8, outputs())
    running = threading.active_count()
    for _ in range(3):
        launch(rounds_kernel, 2, 8, outputs())
        launch(places_kernel, (1, 3), (5, 4, 2), outputs((3, 2, 4, 5)))
    assert threading.active_count() == running


@pytest.mark.skipif(not hasattr(os, "fork"), reason="takes fork")
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python warns of a fork beside threads")
def test_a_forked_process_has_threads_of_its_own():
    launch(rounds_kernel, 1, 8, outputs())
    child = os.fork()
    if child == 0:
        out = outputs()
        launch(rounds_kernel, 1, 8, out)
        os._exit(int((out.numpy() != 247).any()))
    assert os.waitpid(child, 0)[1] == 0
