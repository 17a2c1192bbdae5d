"""The package loads quickly, and without what only some users have."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["numba.cuda", "cuda.core", "matplotlib", "torch", "tqdm"])
def test_import_loads_no(module):
    code = f"import sys, numbsparse; sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_product_on_the_cpu_loads_no_cuda():
    code = """
import sys, numpy as np, numbsparse as ns
w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1]])
np.ones((1, 4), np.float32) @ w
sys.exit("numba.cuda" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_without_a_gpu_one_sentence_says_what_is_missing():
    code = """
import numbsparse as ns
try:
    ns.to_device([1.0])
except RuntimeError as error:
    print(error)
else:
    print("a GPU is needed here, but it is there")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"NUMBA_ENABLE_CUDASIM": "0", "PATH": "", "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.stdout.startswith("a GPU is needed here, but "), run.stderr
