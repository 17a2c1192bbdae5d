"""The numbered examples: a course in order, each short, each run, each ending in an assertion."""

import ast
import os
import re
import runpy
import subprocess
import sys
import time

import pytest
from conftest import numba_told_the_same
from examples_helpers import EXAMPLES

from numbsparse import device

COURSE = sorted(EXAMPLES.glob("[0-9]*.py"))
LINES, SECONDS = 100, 30
# What each prints, among other things: its point, seen without a GPU.
SAYS = {
    "01_layout": r"block column 2 meets \[3\] in blocks \[6\]",
    "02_three_products": r"multiplications of each: 3,200 of the 7,680",
    "03_first_kernel": r"y\[9\] = 18  by thread 1 of block 2",
    "04_shared_tile": r"reads of global memory per output: 64 and 8",
    "05_race": r"thread 0 writes to shared memory \(05_race.py:\d+\) what thread 7 reads",
    "06_tensor_core": r"\n 4a0  4a0  5a0  5a0  6a0  6a0  7a0  7a0 ",
    "07_your_own_rung": r"four_rows: 14\.5 reads per output|four_rows [\d.]+ [mu]s",
    "08_dense_to_sparse": r"wide, last letters 156,224 parameters",
}


def test_they_are_numbered_without_a_gap():
    assert [path.stem for path in COURSE] == list(SAYS)
    assert [int(path.stem[:2]) for path in COURSE] == list(range(1, 9))


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_form(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) < LINES
    said = ast.get_docstring(tree) or ""
    assert re.match(rf"Lesson {int(path.stem[:2])}: \w.*\.\n\nYou will learn ", said)
    assert "\n\nLook at " in said
    assert "\n\nExercise: " in said
    last = tree.body[-1]
    if isinstance(last, ast.If):  # what runs when it is the program
        last = last.body[-1]
    assert isinstance(last, ast.Assert)


@pytest.mark.parametrize("path", COURSE, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch, capsys):
    if not device.SIMULATED:  # some choose the simulator, which a process has or has not
        check_program(path, tmp_path)
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [str(path)])
    began = time.thread_time()
    runpy.run_path(str(path), run_name="__main__")
    assert time.thread_time() - began < 2 * SECONDS  # of one core
    check_said(path.stem, *capsys.readouterr())
    assert not any(tmp_path.iterdir())


def test_one_runs_in_a_python_of_its_own(tmp_path):
    check_program(EXAMPLES / "03_first_kernel.py", tmp_path)


def check_program(path, folder):
    """Run in a Python of its own, which finds out for itself whether there is a GPU."""
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore:Grid size", str(path)],  # they are small
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    check_said(path.stem, run.stdout, run.stderr)
    assert not any(folder.iterdir())


def check_said(stem, out, err):
    assert re.search(SAYS[stem], out), out
    assert err == ""
    assert max(map(len, out.splitlines())) <= 160


@pytest.mark.parametrize(("name", "value"), [("NUMBA_A", "0"), ("NUMBA_B", "1")])
def test_what_a_test_leaves_to_numba_fails_it_and_is_taken_back(name, value, monkeypatch):
    """As some of these programs, run in a process that had a GPU, would."""
    monkeypatch.setenv("NUMBA_A", "1")
    fails = pytest.raises(pytest.fail.Exception, match=f"{name}': '{value}'.*had been")
    with fails, numba_told_the_same():
        os.environ[name] = value
    assert os.environ["NUMBA_A"] == "1"
    assert "NUMBA_B" not in os.environ
    with numba_told_the_same():
        pass


EXERCISES = {  # what the reader changes, and what is said then
    "03_first_kernel": (
        "acc = float32(0)",
        "acc = y[n, k]",
        "y differs from x @ w by nan.*reads y",
    ),
    "06_tensor_core": ("ldmatrix_x4_trans(ws", "ldmatrix_x4(ws", "of 128 values of d .*lane 4 g"),
}


@pytest.mark.skipif(not device.SIMULATED, reason="kernels of a text without a file")
@pytest.mark.parametrize("stem", EXERCISES)
def test_an_exercise_says_what_is_wrong_and_where_to_look(stem, monkeypatch, capsys):
    old, new, says = EXERCISES[stem]
    text = (EXAMPLES / f"{stem}.py").read_text(encoding="utf-8")
    assert text.count(old) == 1
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(AssertionError, match=says):
        exec(compile(text.replace(old, new), stem, "exec"), {"__name__": "exercise"})
