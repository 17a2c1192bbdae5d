"""DeviceArray: NumPy's views in device memory, and no silent copies to the host."""

import gc
import operator
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from conftest import HALVES, needs_bfloat16
from numba import cuda, float32

import numbsparse as ns
from numbsparse import device
from numbsparse.device import dlpack, memory, runtime
from numbsparse.device.launch import _permit_shared_memory, launch
from numbsparse.dtypes import as_dtype

pytestmark = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")

A = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
KEYS = [
    0, -1, slice(1, 3), slice(None, None, 2), slice(5, 2), ..., None, (..., 2), (1, ..., None),
    (slice(None), 1), (1, 2, 3), (slice(1, None), slice(0, 4, 3), -2), (None, 0, ..., slice(2)),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_getitem_is_numpys_view(key):
    array = ns.to_device(A)
    part = array[key]
    np.testing.assert_array_equal(part.numpy(), A[key])
    assert part.is_contiguous == A[key].flags.c_contiguous or part.size <= 1
    assert part.owner is array.owner


BAD_KEYS = [3, -4, (0, 0, 5), (0, 0, 0, 0), slice(None, None, -1), [0], "a"]


@pytest.mark.parametrize("key", BAD_KEYS, ids=str)
def test_getitem_refuses(key):
    with pytest.raises(IndexError):
        ns.to_device(A)[key]


def test_transpose_and_reshape():
    array = ns.to_device(A)
    np.testing.assert_array_equal(array.T.numpy(), A.T)
    np.testing.assert_array_equal(array.reshape(4, -1).numpy(), A.reshape(4, -1))
    np.testing.assert_array_equal(array.reshape((60,)).numpy(), A.reshape(60))
    assert all(type(n) is int for n in array.reshape(np.int64(4), np.int64(15)).shape)
    np.testing.assert_array_equal(array[1].T.T.reshape(20).numpy(), A[1].reshape(20))
    with pytest.raises(ValueError, match="contiguous"):
        array.T.reshape(60)
    with pytest.raises(ValueError, match=r"\(7,\)"):
        array.reshape(7)


def test_drawn_shapes_are_those_of_numpy(rng):
    for _ in range(300):
        shape = tuple(rng.integers(0, 4, rng.integers(0, 4)))
        host, asked = np.zeros(shape, np.int8), rng.integers(-1, 5, rng.integers(0, 4)).tolist()
        array = ns.to_device(host)
        assert array.reshape(-1).shape == host.reshape(-1).shape  # after which views are kept
        if {-1, 0} <= {*asked}:  # what NumPy refuses, and kernels ask for
            continue
        try:
            expected = host.reshape(asked).shape
        except ValueError:
            with pytest.raises(ValueError, match="cannot take the shape"):
                array.reshape(asked)
        else:
            assert array.reshape(asked).shape == array.reshape(*asked).shape == expected


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">i4", ">i8", ">u2", ">c8"])
def test_values_arrive_in_the_byte_order_of_the_gpu(dtype):
    host = np.arange(6).reshape(2, 3).astype(dtype)
    array = ns.to_device(host)
    assert array.dtype.isnative
    np.testing.assert_array_equal(array.numpy(), host)


def test_an_array_that_is_there_comes_back_itself():
    array = ns.to_device(np.ones(3))
    assert ns.to_device(array) is array
    assert ns.to_device(array, array.device) is array
    with pytest.raises(TypeError, match=r"call \.numpy\(\)"):
        ns.to_device(array, "cpu")


OBJECTS = [None, [None, 1.0], np.array([{}]), np.zeros(2, [("a", object)])]


@pytest.mark.parametrize("host", OBJECTS, ids=str)
def test_objects_are_not_sent(host):
    with pytest.raises(TypeError, match="host takes an array of numbers, got"):
        ns.to_device(host)


@pytest.mark.parametrize("place", [None, 0, 3, True, "cpu", "gpu", "cuda:x", "cuda:99"], ids=str)
def test_arrays_are_sent_to_places(place):
    with pytest.raises(ValueError, match=r"place takes .*, got"):
        ns.to_device(np.ones(3), place)


DTYPES = [*HALVES, "float32", "float64", "int32", "int64", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_there_and_back(dtype, shape):
    host = (np.random.default_rng(0).random(shape) * 100).astype(as_dtype(dtype))
    array = ns.to_device(host)
    back = array.numpy()
    assert (back.shape, back.dtype, array.nbytes) == (host.shape, host.dtype, host.nbytes)
    np.testing.assert_array_equal(back, host)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(array)).numpy(), host)


def test_strided_arrays_go_there():
    np.testing.assert_array_equal(ns.to_device(A.T[::2]).numpy(), A.T[::2])


def test_nothing_reaches_the_host_silently(monkeypatch):
    monkeypatch.setattr(device.runtime, "several_devices", False)  # whatever other tests used
    array = ns.to_device(A)
    with pytest.raises(TypeError, match=r"\.numpy\(\)"):
        np.asarray(array)
    with pytest.raises(TypeError):
        A + array
    assert float(ns.to_device(3.5)) == 3.5
    assert ns.to_device([7]).item() == 7
    assert repr(array) == "DeviceArray(shape=(3, 4, 5), dtype=float32)"
    assert len(array) == 3


@pytest.mark.parametrize("other", [None, A, 0, 1.5, np.float32(0)], ids=lambda a: type(a).__name__)
def test_arrays_are_not_compared_by_identity(other):
    array, other = ns.to_device(A), ns.to_device(A) if other is None else other
    for compare in (operator.eq, operator.ne):
        for pair in ((array, other), (other, array)):
            with pytest.raises(TypeError, match=r"is not compared silently: call \.numpy\(\)"):
                compare(*pair)
    assert all(array != other for other in ("a word", None, ()))
    assert array in [array]
    assert len({array, ns.to_device(A)}) == 2
    with pytest.raises(TypeError, match=r"truth of a DeviceArray .* call \.numpy\(\)"):
        bool(array)


@pytest.mark.parametrize("to", ["uint8", "uint16", "float64"])
def test_the_bits_of_a_gapless_array_are_of_any_dtype(to):
    host = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    array = ns.to_device(host)
    np.testing.assert_array_equal(array.view(to).numpy(), host.view(to))
    assert array[:0].view(to).shape == host[:0].view(to).shape
    for other in (array.T, array[..., :3], array[:, :, ::2], array[0, 0, 0]):
        with pytest.raises(ValueError, match="dtype takes 4 bytes an item, or what fills"):
            other.view(to)


@needs_bfloat16
def test_bfloat16_is_not_shown_as_other_bits():
    # __cuda_array_interface__ would say "<V2", which some libraries take for another thing.
    array = ns.to_device(A.astype(as_dtype("bfloat16")))
    assert not hasattr(array, "__cuda_array_interface__")
    assert hasattr(array.view("uint16"), "__cuda_array_interface__")
    assert array.view("uint16").view("bfloat16").dtype == array.dtype
    assert device.is_device_operand(array)


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}], ids=["plain", "versioned"])
def test_a_dlpack_capsule_is_made_to_say_bfloat16(options):
    torch = pytest.importorskip("torch")
    numbers = np.float32([1, -2.5, 3e38, 0]).view(np.uint16)[1::2].copy()  # the upper halves
    lent = torch.from_dlpack(dlpack.as_bfloat16(numbers.__dlpack__(**options)))
    assert lent.dtype == torch.bfloat16
    np.testing.assert_array_equal(lent.view(torch.uint16).numpy(), numbers)
    with pytest.raises(RuntimeError, match="kind of number"):
        dlpack.as_bfloat16(np.zeros(3).__dlpack__(**options))


@cuda.jit
def fill_kernel(a, number, sizes, flag):
    i = cuda.grid(1)
    if i < a.shape[0]:
        a[i] = number + sizes[0] * 10 + sizes[1] * 100 + flag * 1000


@pytest.mark.parametrize("number", [1, 1.0])
@pytest.mark.parametrize("stride", [1, 3])
def test_launch_takes_arrays_numbers_and_tuples(number, stride):
    whole = ns.to_device(np.zeros(15, np.float32))
    launch(fill_kernel, (3,), 2, whole[::stride], number, (2, 3), 4)
    expected = np.zeros(15, np.float32)
    expected[::stride][:6] = 4321
    np.testing.assert_array_equal(whole.numpy(), expected)


class Ramp(NamedTuple):
    first: int
    steps: ns.DeviceArray
    sizes: tuple[int, int]


class Both(NamedTuple):
    ramp: Ramp
    out: ns.DeviceArray


@cuda.jit
def ramp_kernel(both, scale):
    i = cuda.grid(1)
    both.out[i] = both.ramp.first + both.ramp.steps[i] * both.ramp.sizes[1] * scale


def test_launch_takes_named_tuples_and_holds_their_memory():
    steps, expected = np.arange(6, dtype=np.int32), 5 + 3 * np.arange(6) * 7
    out = ns.to_device(np.zeros(6, np.float32))
    launch(ramp_kernel, 3, 2, Both(Ramp(5, ns.to_device(steps), (2, 3)), out), 7)
    np.testing.assert_array_equal(out.numpy(), expected)
    held = ns.to_device(steps)
    capture = device.Capture()
    with capture.under_way():
        launch(ramp_kernel, 3, 2, Both(Ramp(5, held, (2, 3)), out), 7)
    assert {id(held.owner), id(out.owner)} <= capture.used.keys()


def test_a_capture_holds_what_is_in_the_arena_of_a_plan():
    """The layout that has the plan may be gone before the graph, as one made in the step is."""
    capture, block = device.Capture(), device.Arena().allocate(24)
    array = device.DeviceArray(block.address, (6,), np.int32, None, block)
    block.shelf = []  # as on a GPU, where memory goes back to the arena's shelf
    capture.hold((array,))
    shelf, array = block.shelf, None
    del block
    gc.collect()
    assert not shelf
    assert not capture.has_lost_memory()
    del capture
    gc.collect()
    assert len(shelf) == 1


def test_an_empty_grid_is_no_work():
    launch(fill_kernel, (0, 3), 2, ns.to_device(np.zeros(0, np.float32)), 1, (2, 3), 4)


def test_as_device_array_refuses_host_memory():
    with pytest.raises(TypeError, match="operand takes an array in GPU memory, got ndarray"):
        device.as_device_array(A, "operand")


@pytest.mark.gpu(reason="simulated memory is the host's")
def test_running_out_of_memory_says_so():
    with pytest.raises(MemoryError, match=r"MiB of device memory.* were asked for; .* are free"):
        device.empty((1 << 43,), "uint8")
    assert ns.to_device(A).numpy().sum() == A.sum()


class Card:
    """Stands in for cuda.core.Device."""

    name = "Old Card"
    compute_capability = (9, 0)


class OldCard(Card):
    compute_capability = (6, 1)


def no_driver():
    raise OSError("libcuda.so.1 not found")


def no_library(name):
    if name == "nvvm":
        raise OSError("libnvvm.so not found")


@pytest.mark.parametrize(
    ("card", "load", "says"),
    [
        (no_driver, None, r"install NVIDIA's driver, .*\[cu13\].*\[cu12\].* CUDA 12\)"),
        (OldCard, None, "Old Card is too old: .* 7.0 and up"),
        (Card, no_library, r"nvvm was not found: pip install 'numbsparse\[cu13\]'"),
        (Card, lambda name: None, None),
    ],
    ids=["no driver", "old card", "no compiler", "all there"],
)
def test_what_is_missing_is_named(monkeypatch, card, load, says):
    core = pytest.importorskip("cuda.core")
    pathfinder = pytest.importorskip("cuda.pathfinder")
    monkeypatch.setattr(runtime, "SIMULATED", False)
    version = SimpleNamespace(cuDriverGetVersion=lambda: (0, 13000))
    monkeypatch.setattr(runtime, "driver", lambda: version)
    monkeypatch.setattr(core, "Device", card)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    reason = runtime.why_unavailable.__wrapped__()
    assert (
        (reason is None) if says is None else re.search(f"{says}.*NUMBA_ENABLE_CUDASIM=1", reason)
    )


@pytest.mark.gpu(reason="simulated memory is the host's")
def test_small_blocks_serve_again_and_are_given_up_when_memory_runs_out():
    memory.give_up_kept()
    first = device.empty((1000,), "float32")
    address = first.address
    del first
    assert memory._kept == 4096
    again = device.empty((999,), "float32")
    assert again.address == address
    assert memory._kept == 0
    del again
    with pytest.raises(MemoryError):
        device.empty((1 << 43,), "uint8")
    assert memory._kept == 0


def test_views_are_made_once():
    array = ns.to_device(A)
    assert array.T is array.T
    assert array.reshape(4, -1) is array.reshape(4, -1)
    assert array.reshape(3, 4, 5) is array
    assert array.span is array.span
    flat = array.reshape(60)
    assert flat.span is flat
    assert array[1:].T.strides == A[1:].T.strides


def test_a_grid_that_is_no_multiple_of_its_cluster_is_refused():
    with pytest.raises(
        ValueError, match=r"grid takes a multiple of the cluster \(2,\), got \(3,\)"
    ):
        launch(fill_kernel, 3, 2, ns.to_device(np.zeros(6, np.float32)), 1, (2, 3), 4, cluster=(2,))


@pytest.mark.slow
def test_no_buffer_is_freed_while_python_ends():
    """When JAX may have destroyed the GPU's context; before that, it is."""
    code = """
import os
from numbsparse.device import memory, streams

class Buffer:
    handle = 0x1000
    def __del__(self, write=os.write):
        write(1, self.name)

def from_pool(nbytes):
    buffer = Buffer()
    buffer.name = b"%d " % nbytes
    return buffer

memory._from_pool = from_pool
memory.take(512)
buffer = memory.take(1024)
shelf = streams.DEFAULT.shelves.setdefault(2048, [])
block = memory.Block(0x1000, memory.take(2048), 2048, shelf, streams.DEFAULT)
memory.Block(0x1000, memory.take(2048), 2048, shelf, streams.DEFAULT)  # goes to its shelf
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "512 ", "")


def test_less_shared_memory_takes_none_from_other_launches(monkeypatch):
    """The driver keeps one number a kernel: launches that need more were prepared before."""
    from cuda.bindings import driver

    kept, fine = {}, driver.CUresult.CUDA_SUCCESS
    kernel = SimpleNamespace(handle=7)
    monkeypatch.setattr(runtime, "current_device", lambda: SimpleNamespace(device_id=0))
    get = lambda attribute, *of: (fine, kept.get(of, 0))  # noqa: E731
    monkeypatch.setattr(driver, "cuKernelGetAttribute", get)
    put = lambda attribute, nbytes, *of: (kept.update({of: nbytes}) or fine,)  # noqa: E731
    monkeypatch.setattr(driver, "cuKernelSetAttribute", put)
    for nbytes, permitted in ((60_000, 60_000), (40_000, 60_000), (90_000, 90_000)):
        _permit_shared_memory(kernel, nbytes)
        assert kept == {(7, 0): permitted}
    error = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuKernelSetAttribute", lambda *of: (error,))
    with pytest.raises(RuntimeError, match="a block of 100000 bytes of shared memory was refused"):
        _permit_shared_memory(kernel, 100_000)


def test_a_kernel_is_launched_with_more_and_less_shared_memory_in_turns():
    @cuda.jit
    def kernel(y, last):
        shared = cuda.shared.array(0, float32)
        shared[last] = last
        y[0] = shared[last]

    y = device.empty((1,), np.float32)
    for last in (16_000, 10_000, 16_000, 20_000, 16_000):
        launch(kernel, (1,), 32, y, last, shared_bytes=4 * (last + 1))
        assert y.numpy()[0] == last
