"""Without numba-cuda all of the CPU works, and the rest says what to install."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

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
from numbsparse.bench import measure
measure.ON_CPU = 0  # a call is timed for a hundredth of a second
main(["bench", "--quick", "--place", "cpu"])
loaded = [name for name in sys.modules if name.startswith(("numba.cuda.", "cuda."))]
assert not loaded, loaded
"""


# Each line is run by itself, and what it raises is told.
TOLD = """
import contextlib, io, json
from numbsparse.__main__ import main
x, w = np.ones((8, 8), "f4"), ns.BlockSparse(np.ones((1, 8, 8), "f4"), [[1]])
told = {}
for line in LINES:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(line)
    except (Exception, SystemExit) as error:
        told[line] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""

NEEDED = "RuntimeError: a GPU is needed here, but "
COMPILER = f"{NEEDED}the compiler for GPU kernels is not installed: pip install 'numbsparse[cu13]'"
SIMULATOR = f"{NEEDED}the simulator is not installed: pip install 'numbsparse[simulator]'"
MOVES = ["ns.to_device(np.ones(3))", "nn.Linear(4, 4).to('cuda')"]
LOADS = {
    "ns.matmul(x, w, kernel='k6_hopper')": "k6_hopper",
    "ns.sddmm(x.T, x, w, kernel='k1_naive')": "k1_naive",
    "import numbsparse.kernels.ptx": "numbsparse.kernels.ptx",
    "from numbsparse.kernels import ladder; ladder.step('s01_naive')": "s01_naive",
}
COMMANDS = {f"main(['{name}'])": name for name in ("ladder", "profile", "machine-code")}


def run(code: str, simulated: bool) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": str(int(simulated))},
        capture_output=True,
        text=True,
        timeout=300,
    )


def told(simulated: bool, lines: list[str]) -> dict[str, str]:
    """What each line raises."""
    ended = run(f"LINES = {lines!r}\n{TOLD}", simulated)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, str] = json.loads(ended.stdout)
    assert list(found) == lines
    return found


def test_the_cpu_needs_nothing_of_nvidias():
    ended = run(WORKS, simulated=False)
    assert ended.returncode == 0, ended.stderr


def test_what_needs_them_says_what_to_install():
    """In one process: it takes a second to begin, and none for each line."""
    install = "needs numba-cuda: pip install 'numbsparse[simulator]'"
    says = dict.fromkeys(MOVES, COMPILER)
    says |= {line: f"ImportError: {name} {install}" for line, name in LOADS.items()}
    says |= {line: f"SystemExit: numbsparse: {name} {install}" for line, name in COMMANDS.items()}
    found = told(False, list(says))
    assert {line: found[line][: len(start)] for line, start in says.items()} == says


def test_in_the_simulator_they_say_what_to_install():
    found = told(True, MOVES)
    assert {line: said[: len(SIMULATOR)] for line, said in found.items()} == dict.fromkeys(
        MOVES, SIMULATOR
    )


def test_a_workflow_runs_the_lowest_versions():
    """The first ones that pyproject.toml allows, and the Python."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    job = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8").partition("  lowest:")[2]
    for name in ("numba", "numpy", "scipy", "numba-cuda", "cuda-core"):
        (least,) = set(re.findall(rf'"{name} >=([\d.]+)', project))
        assert re.search(rf" {name}=={re.escape(least)}(\.\*)?\s", job), name
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    assert f'python-version: "{python}"' in job
