"""Without a GPU the kernels run in the CUDA simulator, which must be chosen before numba loads."""

import ctypes
import os
import sys

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
