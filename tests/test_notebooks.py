"""Lessons as notebooks: they are whole, and run from top to bottom."""

import json
import re
from pathlib import Path

import pytest

from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.kernels.ladder import NAMES as STEPS
from numbsparse.kernels.ladder import step
from numbsparse.kernels.matmul import LADDER
from numbsparse.pages.notebook import COUNT, RACES, TRACE, lesson_of, text_of
from numbsparse.pages.trace import NAMES
from numbsparse.simulator.tracing import Trace

simulator = pytest.mark.skipif(not device.SIMULATED, reason="notebooks run in the simulator")
ONE_BLOCK = re.compile(r"(case = Case\(\d+, )\d+(, \d+, block_size=)(\d+)")
SHORT = ("s01_naive", "s11_producer", "k8_small_batch")


def cells_of(name, kind):
    book = json.loads(text_of(name))
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == kind]


@simulator
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("no_garbage")
def test_a_notebook_runs(name, capsys):
    """Those of SHORT as a whole, the others until y is found right, of one input block."""
    *code, count, races, trace = cells_of(name, "code")
    if name not in SHORT:
        code[-1], changed = ONE_BLOCK.subn(r"\1\3\2\3", code[-1])
        assert changed == 1
    assert [f"{cell}\n" for cell in (count, races, trace)] == [COUNT, RACES, TRACE]
    space = {"__name__": "__main__"}
    for cell in code:
        exec(compile(cell, "a cell", "exec"), space)
    assert capsys.readouterr().out == "y is right\n"
    if name in SHORT:
        exec(count, space)
        exec(races, space)
        assert isinstance(eval(trace, space), Trace)
        counted, found = capsys.readouterr().out.rstrip().rsplit("\n", 1)
        assert "global reads" in counted
        assert found == "no races"


@simulator
def test_a_changed_cell_is_what_is_checked(monkeypatch):
    space = {"__name__": "__main__"}
    *code, check = cells_of("s01_naive", "code")[:-3]
    for cell in code:
        exec(compile(cell.replace("acc +=", "acc -="), "a cell", "exec"), space)
    with pytest.raises(AssertionError, match="s01_naive forward 8x64x32-B32-d1: 256 of 256"):
        exec(check, space)


@simulator
@pytest.mark.parametrize("name", ["s11_producer"])
def test_a_notebook_runs_in_jupyter(name):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.reads(text_of(name), as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=300).execute()
    assert "image/svg+xml" in book.cells[-1].outputs[0].data


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_lesson_and_the_whole_file(name):
    book = json.loads(text_of(name))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    lesson, *rest = cells_of(name, "markdown")
    title = f"# Step {STEPS.index(name) + 1}: " if name in STEPS else f"# {name}: "
    assert lesson.startswith(title)
    assert lesson.count("\n# ") == lesson.count("\n## ") == 0
    assert "](" not in lesson.replace("](http", "")
    assert any("```diff" in cell for cell in rest) == (name in STEPS[1:])
    code = "".join(cells_of(name, "code"))
    module = step(name) if name in STEPS else LADDER[name]
    body = Path(module.__file__).read_text(encoding="utf-8").split('"""', 2)[2]
    assert [line for line in body.splitlines() if line not in code] == []


def test_a_lesson_keeps_its_pictures():
    lesson = lesson_of("s03_shared")
    assert "ws: 32 x 32 of a block of w\n" in lesson
    assert "Solution (s03_banks.py)." in lesson


def test_the_command_writes_notebooks(tmp_path, capsys):
    folder = tmp_path / "lessons"
    command_line.main(["notebook", "s03_shared", "k3_registers", "--folder", str(folder)])
    assert sorted(file.name for file in folder.iterdir()) == [
        "k3_registers.ipynb",
        "s03_shared.ipynb",
    ]
    assert (folder / "k3_registers.ipynb").read_text(encoding="utf-8") == text_of("k3_registers")
    assert capsys.readouterr().out.count(".ipynb") == 2
    with pytest.raises(SystemExit, match=r"RUNG takes some of s01_naive, .*, got 's3'"):
        command_line.main(["notebook", "s3"])
