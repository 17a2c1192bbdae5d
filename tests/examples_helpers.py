"""What the tests of the examples share: small settings, and a text with something to learn."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL_MODEL = ["--hidden", "64", "--block-size", "8", "--embedding", "16"]
SMALL_MODEL += [
    "--device",
    "cpu",
    "--density",
    "0.15",
    "--batch",
    "4",
    "--length",
    "8",
    "--held-out-batches",
    "2",
]
SMALL = [*SMALL_MODEL, "--sample", "20"]


def imported(monkeypatch, name):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return import_module(name)


def write_text(folder, name="text.txt", words=("block ", "sparse ", "weights\n"), n=4000):
    path = folder / name
    path.write_text("".join(np.random.default_rng(0).choice(words, n)))
    return str(path)


def run_python(code, *arguments):
    """A Python of its own beside the examples. Gives the finished process."""
    paths = [str(EXAMPLES), str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def same_arrays(one, other):
    """Two .npz files hold the same bits under the same names."""
    with np.load(one) as first, np.load(other) as second:
        assert first.files == second.files
        for name in first.files:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
