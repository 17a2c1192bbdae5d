"""Without numba-cuda all of the CPU works, and the rest says what to install."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT = """
import sys
for name in ("numba_cuda", "cuda", "numba.cuda"):
    sys.modules[name] = None  # an import of it fails
import numpy as np, numbsparse as ns
from numbsparse import nn
"""

WORKS = """
rng = np.random.default_rng(0)
dense = rng.standard_normal((64, 64), dtype=np.float32)
w = ns.BlockSparse.from_dense(dense, np.ones((8, 8), bool), block_size=8)
x = rng.standard_normal((4, 64), dtype=np.float32)
np.testing.assert_allclose(x @ w, x @ dense, rtol=1e-4, atol=1e-4)
net = nn.LSTM(16, 64, block_size=8, layout=np.eye(8, dtype=bool))
output, _ = net(np.ones((3, 2, 16), np.float32))
output.sum().backward()
optimizer = nn.optim.AdamW(net.parameters(), lr=1e-3)
optimizer.step()
images = rng.standard_normal((2, 5, 5, 8), dtype=np.float32)
nn.Conv2d(8, 16, 3, block_size=8, layout=np.ones((1, 2), bool))(images)
from numbsparse.__main__ import main
main(["bench", "--quick", "--place", "cpu"])
loaded = [name for name in sys.modules if name.startswith(("numba.cuda.", "cuda."))]
assert not loaded, loaded
"""


def run(code: str, simulated: bool = False) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": str(int(simulated))},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_cpu_needs_nothing_of_nvidias():
    ended = run(WORKS)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("call", ["ns.to_device(np.ones(3))", "nn.Linear(4, 4).to('cuda')"])
@pytest.mark.parametrize(
    ("simulated", "says"),
    [
        (False, "the compiler for GPU kernels is not installed: pip install 'numbsparse[cu13]'"),
        (True, "the simulator is not installed: pip install 'numbsparse[simulator]'"),
    ],
)
def test_what_needs_them_says_what_to_install(call, simulated, says):
    ended = run(call, simulated)
    assert ended.returncode == 1
    assert f"RuntimeError: a GPU is needed here, but {says}" in ended.stderr


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("ns.matmul(x, w, kernel='k6_hopper')", "k6_hopper"),
        ("ns.sddmm(x.T, x, w, kernel='k1_naive')", "k1_naive"),
        ("import numbsparse.kernels.ptx", "numbsparse.kernels.ptx"),
        ("from numbsparse.kernels import ladder; ladder.step('s01_naive')", "s01_naive"),
    ],
)
def test_kernels_that_cannot_be_loaded_say_what_to_install(code, what):
    operands = "x = np.ones((8, 8), 'f4'); w = ns.BlockSparse(np.ones((1, 8, 8), 'f4'), [[1]])\n"
    ended = run(operands + code)
    assert ended.returncode == 1
    says = f"ImportError: {what} takes numba-cuda: pip install 'numbsparse[simulator]', or "
    assert ended.stderr.splitlines()[-1].startswith(says)


@pytest.mark.parametrize("command", ["ladder", "profile", "machine-code"])
def test_commands_that_read_kernels_say_so(command):
    ended = run(f"from numbsparse.__main__ import main; main(['{command}'])")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"numbsparse: {command} takes numba-cuda: pip install ")
