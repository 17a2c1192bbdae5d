"""The package loads quickly, and without what only some users have."""

import os
import subprocess
import sys

import numpy as np
import pytest

import numbsparse as ns


@pytest.mark.parametrize(
    "module",
    [
        *("numba.cuda", "cuda.core", "matplotlib", "ml_dtypes", "safetensors"),
        *("torch", "jax", "tqdm"),
    ],
)
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


def test_without_ml_dtypes_only_bfloat16_is_missing(tmp_path):
    np.savez(tmp_path / "state.npz", w=np.zeros(2, "V2"))  # as bfloat16 is stored
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np, numbsparse as ns
w = ns.BlockSparse(np.ones((1, 4, 4), np.float16), [[1]])
print((np.ones((1, 4), np.float16) @ w)[0, 0])
for call in (lambda: w.astype("bfloat16"), lambda: ns.load("state.npz")):
    try:
        call()
    except ImportError as error:
        print(error)
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    says = "bfloat16 takes the package ml_dtypes: pip install 'numbsparse[bfloat16]'"
    assert run.stdout.splitlines() == ["4.0", says, says], run.stderr


def test_without_safetensors_a_sentence_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    says = r"^\.safetensors files take the package safetensors: pip install 'numbsparse\[safetens"
    for call in (lambda path: ns.save(path, {}), ns.load):
        with pytest.raises(ImportError, match=says):
            call(tmp_path / "state.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("room", "name"), [("torch", "torch"), ("jax", "JAX")])
def test_without_its_library_a_room_says_in_one_sentence_what_is_missing(room, name):
    code = f"""
import sys
sys.modules["{room}"] = None
import numbsparse
try:
    import numbsparse.{room}
except ImportError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    says = f"numbsparse.{room} takes {name}: pip install 'numbsparse[{room}]'\n"
    assert run.stdout == says, run.stderr


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
