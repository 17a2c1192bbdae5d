"""The package loads quickly, and without what only some users have."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import numbsparse as ns

# What one process without ml_dtypes, torch and JAX finds, in the order of its lines.
SAID = """
import json, sys
import numpy as np, numbsparse as ns
loaded = list(sys.modules)
w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), [[1]])
np.ones((1, 4), np.float32) @ w
after = list(sys.modules)
for name in ("ml_dtypes", "torch", "jax"):
    sys.modules[name] = None
w = ns.BlockSparse(np.ones((1, 4, 4), np.float16), [[1]])
product = (np.ones((1, 4), np.float16) @ w)[0, 0]
said = []
for code in ("w.astype('bfloat16')", "ns.load('state.npz')", "import numbsparse.torch",
             "import numbsparse.jax"):
    try:
        exec(code)
    except ImportError as error:
        said.append(str(error))
print(json.dumps([loaded, after, float(product), *said]))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """(modules after the import, after a product; a product in float16; what is missing)."""
    folder = tmp_path_factory.mktemp("said")
    np.savez(folder / "state.npz", w=np.zeros(2, "V2"))  # as bfloat16 is stored
    run = subprocess.run(
        [sys.executable, "-c", SAID],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        *("numba.cuda", "cuda.core", "matplotlib", "ml_dtypes", "safetensors"),
        *("torch", "jax", "tqdm"),
        "numba.np.arraymath",  # as Numba does before it compiles: half of the import's time
    ],
)
def test_import_loads_no(module, said):
    assert module not in said[0]
    assert "numbsparse" in said[0]


@pytest.mark.slow
def test_a_product_on_the_cpu_loads_no_cuda(said):
    assert "numba.cuda" not in said[1]
    assert "numbsparse.kernels.matmul.k0_cpu" in said[1]


@pytest.mark.slow
def test_without_ml_dtypes_only_bfloat16_is_missing(said):
    says = "bfloat16 needs the package ml_dtypes: pip install 'numbsparse[bfloat16]'"
    assert said[2:5] == [4.0, says, says]


@pytest.mark.parametrize(("line", "room", "name"), [(5, "torch", "torch"), (6, "jax", "JAX")])
def test_without_its_library_a_room_says_in_one_sentence_what_is_missing(said, line, room, name):
    assert said[line] == f"numbsparse.{room} needs {name}: pip install 'numbsparse[{room}]'"


def test_without_safetensors_a_sentence_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    says = r"^\.safetensors files need the package safetensors: pip install 'numbsparse\[safetens"
    for call in (lambda path: ns.save(path, {}), ns.load):
        with pytest.raises(ImportError, match=says):
            call(tmp_path / "state.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
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
