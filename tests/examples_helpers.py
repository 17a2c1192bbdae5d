"""What the tests of the examples share: small settings, and a text with something to learn."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

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


def imported_plans(monkeypatch):
    """Of examples/scaling.py: the plan of texts, and what all plans share."""
    modules = [imported(monkeypatch, name) for name in ("runs_plan", "scaling_plan")]
    return SimpleNamespace(**vars(modules[0]) | vars(modules[1]))


def small_plan(plans, **changes):
    groups = (plans.Group(64, plans.MAIN[:2], 4000), plans.Group(32, plans.MAIN[:1], 4000))
    return replace(plans.Plan(groups=groups, rates=(1e-3, 2e-3), seeds=2), **changes)


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
