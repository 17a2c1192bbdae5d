"""Without a GPU the kernels run in the CUDA simulator, which must be chosen before numba loads."""

import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest

if "numba" not in sys.modules:
    run_path(str(Path(__file__).parents[1] / "examples" / "gpu_or_simulator.py"))

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
