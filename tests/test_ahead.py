"""Kernels of a step, compiled in other processes before it runs."""

import os
import pickle
import subprocess
import sys
from threading import Lock

import numpy as np
import pytest

import numbsparse as ns
from numbsparse.device import ahead


@pytest.mark.skipif(not ns.device.is_available(), reason=str(ns.device.why_unavailable()))
def test_arrays_go_there_in_their_order_without_their_values():
    x = ns.to_device(np.arange(60, dtype=np.float16).reshape(5, 12))
    for array in (x, x.T, x[1:], x[:, 4:].T, x[:0], x[2]):
        found = pickle.loads(ahead._pickled(array))
        assert (found.shape, found.strides) == (array.shape, array.strides)
        assert found.dtype == array.dtype
        assert found.address % 256 == array.address % 256
        assert found.size == 0 or found.numpy().shape == array.shape
    assert b"numpy" not in ahead._pickled(lambda: None)
    large = ns.to_device(np.zeros(100_000, np.float32))
    assert len(ahead._pickled((large, large))) < 1000


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(TypeError, match="step and its arguments take what can be pickled: "):
        ahead._pickled(Lock())


@pytest.mark.parametrize(
    ("step", "jobs", "message"),
    [(None, None, "step takes a function, got None"), ("print", 1, "step takes a function, got ")]
    + [(print, jobs, "jobs takes .*, at least 1, got ") for jobs in (0, -1, 1.5, True, "2")],
)
def test_bad_arguments_are_refused(step, jobs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ns.compile_ahead(step, jobs=jobs)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "5", True, [5], 1j])
def test_a_time_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match="seconds takes a number above 0, got "):
        ns.compile_ahead(print, seconds=seconds)


def test_the_simulator_compiles_nothing():
    if not (ns.device.SIMULATED and ns.device.is_available()):
        pytest.skip("not in the simulator")
    assert ns.compile_ahead(lambda: 1 / 0) == 0


PROGRAM = """
import os, time
import numpy as np, numbsparse as ns
from numbsparse.device import compiler, kept, runtime, stand_in
from numbsparse.machine_code.cubin import description

found = stand_in.install()
runtime.driver_version = lambda: 13000

layout = ns.Layout(ns.patterns.random(4, 4, 0.5, seed=0))
w = ns.BlockSparse(np.zeros((layout.n_blocks, 32, 32), np.float16), layout).to("cuda")
x = ns.to_device(np.zeros((128, 16), np.float16)).T

def step(x, several):
    y = ns.matmul(x, w, kernel="k1_naive")  # which is soon compiled
    if several:
        ns.sddmm(x.T, y, layout, kernel="k1_naive")
    raise ValueError("at its end")

def hashes():
    files = [name for name in os.listdir(kept._folder()) if name.endswith(".cubin")]
    codes = [kept.read(file).partition(b"\\n")[2] for file in files]
    return {description(code)["hash"] for code in codes}

counts = [ns.compile_ahead(step, x, False, jobs=2), ns.compile_ahead(step, x, True, jobs=1)]
began = time.monotonic()
counts += [ns.compile_ahead(time.sleep, 100, jobs=1, seconds=0.1)]
assert time.monotonic() - began < 50
try:
    step(x, True)
except ValueError:
    pass
print(counts, len(found), hashes() == {description(each.cubin)["hash"] for each in found})
"""


def test_what_a_step_launches_is_on_disk_afterwards(tmp_path, compilers):
    """For a program's own function, which fails at its end; the card is not there."""
    settings = {
        "NUMBA_ENABLE_CUDASIM": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "NUMBSPARSE_CACHE_DIR": str(tmp_path),
    }
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.stdout.splitlines() == ["[1, 1, 0] 2 True"], ended.stderr
    assert "RuntimeWarning: compiled up to an error in step: ValueError: at its end" in ended.stderr
