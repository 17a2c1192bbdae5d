"""Without a GPU the kernels run in the CUDA simulator, which must be chosen before numba loads."""

import ctypes
import os
import sys
import threading
from importlib.util import find_spec

import numpy as np
import pytest


def gpu_is_there() -> bool:
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return (
        driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value
    )


if not gpu_is_there() and "numba" not in sys.modules:
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
    # The simulator polls its threads: where they hand over sooner, barriers take a tenth.
    sys.setswitchinterval(1e-4)


class MadeOnce(dict):
    """The shared arrays of a simulated block of threads: the first that asks makes one.

    The simulator looks one up and, where there is none, makes it: two threads at the same moment
    would make two. Between the look and the making nobody else may look.
    """

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def get(self, key):
        self.lock.acquire()
        if (found := super().get(key)) is not None:
            self.lock.release()
        return found

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.lock.release()


@pytest.fixture(autouse=True, scope="session")
def shared_arrays_are_made_once():
    if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
        from numba.cuda.simulator.kernelapi import FakeCUDAShared

        def init(self, dynshared_size, plain=FakeCUDAShared.__init__):
            plain(self, dynshared_size)
            self._allocations = MadeOnce()

        FakeCUDAShared.__init__ = init


HAS_BFLOAT16 = find_spec("ml_dtypes") is not None
needs_bfloat16 = pytest.mark.skipif(not HAS_BFLOAT16, reason="ml_dtypes is not installed")
HALVES = ["float16", "bfloat16"] if HAS_BFLOAT16 else ["float16"]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(42)


@pytest.fixture(params=["cpu", "cuda"])
def place(request) -> str:
    """Both homes; "cuda" is a GPU where there is one, and the simulator elsewhere."""
    from numbsparse import device

    if request.param == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    return request.param


@pytest.fixture
def put(place):
    """Put a NumPy array or BlockSparse in the place of this test."""
    from numbsparse import BlockSparse, to_device

    def put(data):
        if isinstance(data, BlockSparse):
            return data.to(place)
        return to_device(data) if place == "cuda" else data

    return put


def host(data) -> np.ndarray:
    """Any result as a NumPy array."""
    from numbsparse import BlockSparse, DeviceArray

    if isinstance(data, BlockSparse):
        return data.toarray()
    return data.numpy() if isinstance(data, DeviceArray) else np.asarray(data)
