"""Two GPUs for tests; in the simulator their memory alone has a number."""

import numpy as np
import pytest

from numbsparse import device
from numbsparse.device import runtime, streams

X = np.ones((2, 8), np.float32)


@pytest.fixture(autouse=True)
def two(monkeypatch):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    if device.SIMULATED:
        monkeypatch.setattr(runtime, "simulated_devices", 2)
        for module, name, value in (
            (runtime, "several_devices", True), (runtime, "only_device", 0),
            (streams, "several", True), (streams, "_met", {0, 1}), (streams, "_defaults", {}),
            (streams.DEFAULT, "_device", 0),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, value)
    elif device.n_devices() < 2:
        pytest.skip("takes two GPUs")
