"""README and the other pages keep their word: commands, links, named files, printed results."""

import contextlib
import doctest
import io
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from numbsparse import device
from numbsparse.bench.plane import known
from numbsparse.pages import tables
from numbsparse.pages.committed import on_gpu
from numbsparse.pages.figure import of_rows

ROOT = Path(__file__).parents[1]
README, BENCHMARKS = ROOT / "README.md", ROOT / "BENCHMARKS.md"
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
PAGES = [
    *(README, BENCHMARKS, ROOT / "CONTRIBUTING.md", ROOT / "examples" / "README.md", *GUIDES),
    *(ROOT / ".github").glob("*.md"),
]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())

# One paste on a bare Debian or Ubuntu, and on any other system whose Python can make a venv. A new
# pip chooses among all that there is in half of the time that the one in an older Python takes.
SET_UP = """\
python3 -m ensurepip --version || $(command -v sudo) sh -c 'apt-get update; apt-get install -y python3-venv' &&
python3 -m venv --upgrade-deps .venv && .venv/bin/pip install {what} && .venv/bin/python {run}
"""  # noqa: E501
MAIN_JOB = SET_UP.format(what="'.[examples]'", run="examples/char_lm.py")
TESTS = SET_UP.format(what="-e '.[test]'", run="-m pytest -n 2")


def blocks(language: str, page: Path = README) -> list[str]:
    """The fenced code blocks of one language, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_the_two_set_up_commands() -> None:
    assert blocks("sh") == [MAIN_JOB, TESTS]


@pytest.mark.skipif(os.name == "nt", reason="Windows runs no shell script by itself")
def test_ci_runs_the_test_command_word_for_word() -> None:
    shown = subprocess.run(
        [ROOT / ".ci" / "run", "--show"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == TESTS


def test_extras_exist() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = re.findall(r"(?:\.|numbsparse)\[([\w,]+)\]", text)
    named = {extra for names in found for extra in names.split(",")}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = project.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    known = set(re.findall(r"^(\w+) = \[", listed, re.MULTILINE))
    assert {"examples", "test", "cu12", "cu13", "simulator"} <= named <= known


@pytest.mark.slow
def test_tables_and_figure_are_those_of_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    copy, picture = tmp_path / "BENCHMARKS.md", "examples/results/speed_up.png"
    copy.write_text(BENCHMARKS.read_text(encoding="utf-8"), encoding="utf-8")
    tables.fill(copy)
    assert copy.read_text(encoding="utf-8") == BENCHMARKS.read_text(encoding="utf-8")
    # Another matplotlib may draw other pixels, of the same results.
    assert drawn_from(ROOT / picture) == drawn_from(tmp_path / picture)


@pytest.mark.parametrize(
    ("name", "place", "option"),
    [("plane_cuda", "cuda", "--png"), ("plane_roofline", "cuda", "--roofline-png"),
     ("plane_cpu", "cpu", "--png")],
)  # fmt: skip
def test_the_maps_pictures_are_of_the_committed_maps(name: str, place: str, option: str) -> None:
    results, picture = (
        f"numbsparse/bench/results/plane_{place}.json",
        f"examples/results/{name}.png",
    )
    _, rows = known(place, ROOT / results)
    drawn = drawn_from(ROOT / picture).decode() == of_rows(rows)["metadata"]["Description"]
    command = f"plane --place {place} --minutes 0 --json {results} {option} {picture}"
    assert drawn, f"draw it anew: python -m numbsparse {command}"


def test_the_lstms_of_the_benchmarks_are_those_of_the_committed_results() -> None:
    lines = []
    for row in on_gpu()["lstm"]["rows"]:
        dtype = f"{row['dtype']}, tf32" if row["precision"] == "high" else row["dtype"]
        peers = "numbsparse", "cuDNN dense", "torch BSR"
        cells = [
            f"{row['seconds'][peer] * 1e3:.1f} ms, {row['bytes'][peer] / 2**30:.1f} GiB"
            if peer in row["seconds"] and (peer, dtype) != ("cuDNN dense", "float32")
            else "-"
            for peer in peers
        ]
        lines.append(f"| {row['hidden']:,} | {dtype} | {' | '.join(cells)} |\n")
    assert "".join(lines) in BENCHMARKS.read_text(encoding="utf-8")


def drawn_from(picture: Path) -> bytes:
    """The digest that a picture carries of its results."""
    found = re.search(rb"tEXtDescription\0([0-9a-f]{64})", picture.read_bytes())
    assert found is not None, f"{picture} does not say what it was drawn from"
    return found[1]


@pages
def test_relative_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(<?([^)#>\s]+)|\b(?:src|href)=\"([^\"#]+)", prose(page))
    relative = {a or b for a, b in targets if not re.match(r"\w+:", a or b)}
    assert not {target for target in relative if not (page.parent / target).exists()}


@pages
def test_named_files_exist(page: Path) -> None:
    """Every `file.py` or `folder/` in the prose: by its path, or by its bare name in any room."""
    named = re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|yml)|/))`", prose(page))
    rooms = ("numbsparse", "examples", "tests")

    def exists(name: str) -> bool:
        return (ROOT / name).exists() or any(any((ROOT / room).rglob(name)) for room in rooms)

    assert not {name for name in named if not exists(name)}


def test_a_stranger_reads_it_in_two_minutes() -> None:
    words = len(prose(README).split())
    assert words < 800, f"README has {words} words beside its code: a guide may take some"


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


@pytest.mark.parametrize("page", [README, *GUIDES], ids=lambda page: page.stem)
def test_python_blocks_print_what_their_comments_say(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ```python blocks, in order, in one namespace; `...` in a comment stands for anything."""
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    namespace: dict[str, Any] = {"__name__": page.stem}
    codes = blocks("python", page)
    assert codes or blocks("pycon", page), f"{page} shows no python"
    for code in codes:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page.name, "exec"), namespace)
        want, got = promised(code), printed.getvalue()
        assert doctest.OutputChecker().check_output(want, got, flags), (
            f"{code}\npromises\n{want}\nand prints\n{got}"
        )


@pytest.mark.skipif(not device.SIMULATED, reason="counting takes the simulator")
@pytest.mark.slow
def test_sessions_print_what_they_show() -> None:
    (session,) = (session for page in PAGES for session in blocks("pycon", page))
    test = doctest.DocTestParser().get_doctest(session, {}, "own_kernel.md", None, None)
    failed, tried = doctest.DocTestRunner(verbose=False).run(test)
    assert tried == 4
    assert not failed
