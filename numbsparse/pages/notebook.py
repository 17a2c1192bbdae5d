"""Lessons as notebooks: `python -m numbsparse notebook` makes them of the lesson and the file.

A notebook has the lesson's text, what is new since the step before, the code in cells that can be
changed, and cells that check the result, count, find races and draw the trace, in the simulator.
"""

import ast
import json
import re
from collections.abc import Iterator
from difflib import unified_diff
from itertools import groupby
from pathlib import Path
from typing import Any

from numbsparse import kernels
from numbsparse.files import write_bytes
from numbsparse.kernels import ladder
from numbsparse.pages.ladder import body_of, file_of, source_of
from numbsparse.pages.trace import NAMES, problem_of

LESSONS = Path(kernels.__file__).parent / "README.md"
LINK = re.compile(r"\[([^]\n]*)\]\((?!http)([^)\n]*)\)")  # within the repository

START = """\
import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"  # before numba: kernels run in its simulator, on the CPU
"""
CHECK = '''\
from types import SimpleNamespace

from numbsparse.testing import Case, check_rung, count, races, trace

case = Case({batch}, {in_features}, {out_features}, block_size={size}, density=1)


def product():
    """y = x @ w by the cells above; raises AssertionError where y is not right."""
    rung = SimpleNamespace(__name__="{name}", forward=forward)
    check_rung(rung, "forward", case, "{dtype}", "cuda", contiguous=True)


product()
print("y is right")
'''
COUNT = "print(count(product)[-1])\n"
RACES = 'print(*races(product) or ["no races"], sep="\\n")\n'
TRACE = "trace(product)[-1]\n"


def run(names: list[str], folder: Path) -> None:
    """What the command does: a file for each name, or for all lessons."""
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"RUNG takes some of {', '.join(NAMES)}, got {unknown[0]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or NAMES:
        file = folder / f"{name}.ipynb"
        write_bytes(file, text_of(name).encode())
        print(file)


def text_of(name: str) -> str:
    """The notebook of a step or a rung, as the text of its file."""
    cells: list[dict[str, Any]] = [
        {
            "cell_type": kind,
            "id": f"cell-{i}",
            "metadata": {},
            "source": text.strip("\n").splitlines(keepends=True),
            **({"execution_count": None, "outputs": []} if kind == "code" else {}),
        }
        for i, (kind, text) in enumerate(_cells(name))
    ]
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": python, "language_info": {"name": "python"}}
    book = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _cells(name: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of each cell."""
    docstring, *code = _parts(source_of(name))
    yield "markdown", lesson_of(name)
    yield (
        "markdown",
        "Run the cells from top to bottom, then change the code and run them again. It takes no "
        "GPU, but `pip install 'numbsparse[simulator]'`.",
    )
    yield "code", START
    yield "markdown", f"## The file\n\n{docstring}{_others(name)}"
    number = ladder.NAMES.index(name) if name in ladder.NAMES else 0
    if number:
        before = ladder.NAMES[number - 1]
        new = "".join(unified_diff(body_of(before), body_of(name), before, name))
        yield "markdown", f"New since the step before:\n\n```diff\n{new}```"
    yield from (("code", text) for text in code)
    yield "markdown", "## Is it right?\n\nThe product is compared with that of `k0_reference`."
    of = problem_of(name)
    sizes = {key: getattr(of, key) for key in ("batch", "in_features", "out_features", "dtype")}
    yield "code", CHECK.format(name=name, size=of.block_size, **sizes)
    yield "markdown", "## What does it request of the memory?"
    yield "code", COUNT
    yield "markdown", "## Do its threads race?"
    yield "code", RACES
    yield "markdown", "## Who waits for whom?"
    yield "code", TRACE


def lesson_of(name: str) -> str:
    """What the lessons say about a step or a rung; links become names of files."""
    number = ladder.NAMES.index(name) + 1 if name in ladder.NAMES else 0
    title = f"## Step {number}: " if number else f"## {name}: "
    prose, lines = True, list[str]()
    for line in LESSONS.read_text(encoding="utf-8").splitlines(keepends=True):
        if prose and line.startswith(("# ", "## ")) and (lines or line.startswith(title)):
            if lines:
                break
            lines.append(line[1:])
        elif lines:
            lines.append(LINK.sub(_named, line) if prose else line)
        prose ^= line.startswith("```")
    return "".join(lines)


def _named(link: re.Match[str]) -> str:
    """A link within the repository, in words."""
    text, target = link.groups()
    file = Path(target).name
    return text if "#" in target or file in text else f"{text} ({file})"


def _others(name: str) -> str:
    """Where the rest of a rung is, that has several files."""
    file = file_of(name)
    if file.name != "__init__.py":
        return ""
    names = ", ".join(sorted(other.name for other in file.parent.glob("[a-z]*.py")))
    return f"\n\nThese cells are the rung's `__init__.py`; they import from {names} beside it."


def _parts(source: str) -> Iterator[str]:
    """The docstring, then the imports, values and functions of a file: a cell each."""
    tree, lines, at = ast.parse(source), source.splitlines(keepends=True), 0
    yield ast.get_docstring(tree) or ""
    at = tree.body[0].end_lineno or 0
    for _, nodes in groupby(tree.body[1:], key=_kind):
        end = [*nodes][-1].end_lineno or 0
        yield "".join(lines[at:end])
        at = end


def _kind(node: Any) -> Any:
    """Imports stand together, and values; each function is alone."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "imports"
    return "values" if isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr) else node
