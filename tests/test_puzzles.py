"""Every puzzle can be solved, no stub solves one, and wrong kernels are told what is wrong."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from numbsparse import __main__ as command_line
from numbsparse import device
from numbsparse.puzzles import checker, course

ROOT = Path(__file__).parents[1]
NUMBERS = range(1, len(course.LEVELS) + 1)

pytestmark = pytest.mark.skipif(not device.SIMULATED, reason="puzzles run in the simulator")


def level(number):
    return import_module(f"numbsparse.puzzles.levels.{course.LEVELS[number - 1]}")


def source(number):
    return Path(level(number).__file__).read_text("utf-8")


def faults_of(number, text, tmp_path):
    file = tmp_path / "tried.py"
    file.write_text(text, "utf-8")
    return checker.faults(level(number), file)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_solution_passes_and_a_stub_fails(number, tmp_path):
    assert faults_of(number, source(number), tmp_path) == []
    stub = course.stub(number)
    assert stub.count("# your code") == 1
    assert "# end" not in stub
    assert "checker" not in stub
    assert any("values are wrong" in fault for fault in faults_of(number, stub, tmp_path))
    assert len(level(number).HINTS) > 1


WRONG = [
    (
        1,
        "    if i < x.size:\n        y[i] = 2",
        "    if True:\n        y[i] = 2",
        r"stops: IndexError: thread \(\d, 0, 0\) of block \(2, 0, 0\): index",
    ),
    (1, "2 * x[i]", "3 * x[i]", r"20 of 20 values are wrong .*: y\[0\] is .* is right"),
    (1, "2 * x[i]", "x[i] + x[i]", "too many reads .*: 40 values.*; 20 are enough"),
    (1, "if i < x.size", "if 0 < i < x.size", r"1 of 20 .*: y\[0\] is not written"),
    (2, "column, row = cuda.grid(2)", "row, column = cuda.grid(2)", "too many reads .* sectors"),
    (3, "    cuda.syncthreads()\n", "", "a race"),
    (3, "tile[t] + tile[t + 1]", "x[i - 1] * (i > 0) + tile[t + 1]", "too many reads"),
    (4, "        cuda.syncthreads()\n        for", "        for", "a race"),
    (4, "        cuda.syncthreads()\n    # end", "    # end", "a race"),
    (4, "xs[ty, i] * ws[i, tx]", "x[row, first + i] * ws[i, tx]", "too many reads"),
    (5, "        cuda.syncthreads()\n    # end", "    # end", "a race"),
    (5, "blocks[p]", "p", "values are wrong"),
    (5, "xs[ty, i] *", "x[row, indices[p] * B + i] *", "too many reads"),
    (5, "import cuda, float32", "import cuda, float33", "does not run: ImportError"),
]


@pytest.mark.parametrize(("number", "right", "wrong", "says"), WRONG)
def test_what_is_wrong_is_said(number, right, wrong, says, tmp_path):
    text = source(number)
    assert right in text
    assert re.search(says, "\n".join(faults_of(number, text.replace(right, wrong), tmp_path)))


def play(*words):
    """The exit status."""
    with pytest.raises(SystemExit) as left:
        command_line.main(["puzzle", *words])
    return left.value.code


def test_a_learner_goes_through(tmp_path, capsys):
    folder = tmp_path / "mine"
    words = ["2", "--folder", str(folder)]
    assert play("--folder", str(folder)) == 0
    assert "begin with: python -m numbsparse puzzle 1" in capsys.readouterr().out
    assert not folder.exists()
    assert play(*words) == 0
    file = folder / "2_neighbours.py"
    assert file.read_text("utf-8") == course.stub(2)
    assert play(*words) == 1
    assert "values are wrong" in (said := capsys.readouterr().out)
    assert "for a hint: python -m numbsparse puzzle 2 --hint" in said
    for shown in (1, 2, 3, 3):
        assert play(*words, "--hint") == 0
        hints = capsys.readouterr().out.splitlines()
        assert [hint[:6] for hint in hints] == [f"{i} of 3" for i in range(1, shown + 1)]
    file.write_text(source(2), "utf-8")
    for _ in range(2):
        assert play(*words) == 0
        assert "puzzle 2 is solved" in capsys.readouterr().out
    first = folder / "1_guard.py"
    first.write_text(source(1), "utf-8")
    assert play("1", "--folder", str(folder)) == 0
    kept = json.loads((folder / "progress.json").read_text())
    assert kept == {"solved": [1, 2], "hints": {"2": 3}}
    play("--folder", str(folder))
    assert re.search(r"^2 .* solved$", (said := capsys.readouterr().out), re.MULTILINE)
    assert "\nnext: python -m numbsparse puzzle 3; " in said
    assert (
        play("6", "--folder", str(folder)) == "numbsparse: puzzle takes a number from 1 to 5, got 6"
    )


def test_the_guide_shows_what_is_printed(tmp_path, monkeypatch, capsys):
    def seen(text):
        return re.sub(r"thread \(\d|index \d+", "", text)  # whichever ran first

    page = ROOT / "examples" / "guides" / "first_quarter_of_an_hour.md"
    guide = seen(page.read_text("utf-8"))
    monkeypatch.chdir(tmp_path)
    folder, first = Path("puzzles"), "    i = cuda.grid(1)\n    y[i] = 2 * x[i]\n"
    assert first in guide

    def run(text="", hint=False):
        if text:
            (folder / "1_guard.py").write_text(text, "utf-8")
        course.run(1, folder, hint=hint)
        command = "puzzle 1 --hint" if hint else "puzzle 1"
        assert f"$ python -m numbsparse {command}\n{seen(capsys.readouterr().out)}" in guide

    run()
    wrong = course.stub(1).replace("    pass  # your code\n", first)
    run(wrong)
    run(hint=True)
    run(hint=True)
    run(wrong.replace("    y[i]", "    if i < x.size:\n        y[i]"))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"solved": 1, "hints": {}}', '{"solved": [1e999]}']
)
def test_progress_that_is_damaged_is_begun_anew(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    assert course.progress(tmp_path) == {"solved": [], "hints": {}}
