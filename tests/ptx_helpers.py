"""What the tests of PTX instructions share: one block of one kernel, run."""

from __future__ import annotations

import numpy as np
import pytest

from numbsparse import device
from numbsparse.device.launch import launch


def capability() -> tuple[int, int]:
    if device.SIMULATED:
        return (99, 0)  # the simulator knows every instruction
    return device.compute_capability() if device.is_available() else (0, 0)


needs_ampere = pytest.mark.skipif(
    capability() < (8, 0), reason="takes a GPU of compute capability 8.0, or the simulator"
)
on_hopper = pytest.mark.skipif(
    not device.SIMULATED and capability() != (9, 0),
    reason="takes a GPU of compute capability 9.0, or the simulator",
)
simulated_only = pytest.mark.skipif(not device.SIMULATED, reason="a GPU does not notice")


def run(kernel, *operands, out, threads=32):
    """The kernel's output, of shape and dtype of `out`, after one block ran."""
    out = np.ascontiguousarray(out)
    out.view(np.uint8)[...] = 0xFF
    result = device.to_device(out)
    launch(kernel, 1, threads, *(device.to_device(operand) for operand in operands), result)
    return result.numpy()


def random_bits(rng, *shape) -> np.ndarray:
    return rng.integers(0, 2**32, shape, dtype=np.uint32)
