"""README.md keeps its word: set-up commands, links, names of files, and what its examples print."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import subprocess
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest

from numbsparse import device
from numbsparse.bench import tables

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

# One paste on a bare Debian or Ubuntu, and on any other system whose Python can make a venv.
SET_UP = """\
python3 -m ensurepip --version || $(command -v sudo) sh -c 'apt-get update; apt-get install -y python3-venv' &&
python3 -m venv .venv && .venv/bin/pip install {what} && .venv/bin/python {run}
"""  # noqa: E501
MAIN_JOB = SET_UP.format(what="'.[examples]'", run="examples/char_lm.py")
TESTS = SET_UP.format(what="-e '.[test]'", run="-m pytest -n 2")


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language, in order."""
    text = README.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose() -> str:
    """README without its code blocks."""
    text = README.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_two_set_up_commands() -> None:
    assert blocks("sh") == [MAIN_JOB, TESTS]


def test_ci_runs_the_test_command_word_for_word() -> None:
    shown = subprocess.run(
        [ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == TESTS


def test_extras_exist() -> None:
    text = README.read_text(encoding="utf-8")
    named = {extra for names in re.findall(r"\.\[([\w,]+)\]", text) for extra in names.split(",")}
    assert {"examples", "test"} <= named <= set(metadata("numbsparse").get_all("Provides-Extra"))


def test_tables_and_figure_are_those_of_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    copy, picture = tmp_path / "README.md", "examples/results/speed_up.png"
    copy.write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    tables.fill(copy)
    assert copy.read_text(encoding="utf-8") == README.read_text(encoding="utf-8")
    # Another matplotlib may draw other pixels, of the same results.
    assert drawn_from(ROOT / picture) == drawn_from(tmp_path / picture)


def drawn_from(picture: Path) -> bytes:
    """The digest that a picture carries of its results."""
    found = re.search(rb"tEXtDescription\0([0-9a-f]{64})", picture.read_bytes())
    assert found is not None, f"{picture} does not say what it was drawn from"
    return found[1]


def test_relative_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(<?([^)#>\s]+)|\b(?:src|href)=\"([^\"#]+)", prose())
    relative = {a or b for a, b in targets if not re.match(r"\w+:", a or b)}
    assert not {target for target in relative if not (ROOT / target).exists()}


def test_named_files_exist() -> None:
    """Every `file.py` or `folder/` in the prose: by its path, or by its bare name in any room."""
    named = re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|yml)|/))`", prose())
    rooms = ("numbsparse", "examples", "tests")

    def exists(name: str) -> bool:
        return (ROOT / name).exists() or any(any((ROOT / room).rglob(name)) for room in rooms)

    assert not {name for name in named if not exists(name)}


def promised(code: str) -> str:
    """What a block says it prints: the comment after each print, and comment lines below it."""
    lines: list[str] = []
    after_print = False
    for line in code.splitlines():
        if after_print and line.startswith("# "):
            lines.append(line[2:])
            continue
        after_print = line.startswith("print(")
        if after_print and (comment := re.search(r"\)\s+# (.*)$", line)):
            lines.append(comment[1])
    return "".join(line + "\n" for line in lines)


def test_python_blocks_print_what_their_comments_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ```python blocks, in order, in one namespace; `...` in a comment stands for anything."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    namespace: dict[str, Any] = {"__name__": "readme"}
    codes = blocks("python")
    assert codes, "README.md shows no python"
    for code in codes:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), namespace)
        want, got = promised(code), printed.getvalue()
        assert doctest.OutputChecker().check_output(want, got, flags), (
            f"{code}\npromises\n{want}\nand prints\n{got}"
        )


@pytest.mark.skipif(not device.SIMULATED, reason="counting takes the simulator")
def test_sessions_print_what_they_show() -> None:
    (session,) = blocks("pycon")
    test = doctest.DocTestParser().get_doctest(session, {}, "README.md", None, None)
    failed, tried = doctest.DocTestRunner(verbose=False).run(test)
    assert tried == 4
    assert not failed
