"""Which tests execute which lines of the kernels, and how long each takes: found once, and kept.

A line that a compiler takes (the CPU's kernels) is not seen, and a factory that is cached is run by
the first test alone. So a test also stands for what encloses a function that it runs, and where no
test is left, for the whole file.
"""

from __future__ import annotations

import ast
import hashlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from mutants_code import KERNELS, ROOT, Mutant

LEAST = 0.05  # seconds that any test is thought to take


class Recorder:
    """A pytest plugin: {test: (seconds, {file: lines})} in `tests`, the lines as bits."""

    def __init__(self, root: Path) -> None:
        self.tests: dict[str, tuple[float, dict[str, int]]] = {}
        self._root, self._folder = root, f"{root / KERNELS}{os.sep}"
        self._ours: dict[str, bool] = {}
        self._codes: dict[int, tuple[Any, int]] = {}  # held, so that no other takes its id
        self._seen: dict[int, set[int]] = {}
        self._tracers: dict[int, Any] = {}

    def start(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_name == "<module>":  # whichever test imports it first
            return None
        ours = self._ours.get(code.co_filename)
        if ours is None:
            ours = self._ours[code.co_filename] = code.co_filename.startswith(self._folder)
        if not ours:
            return None
        key = id(code)
        if key not in self._codes:
            self._codes[key] = code, len({line for *_, line in code.co_lines() if line})
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = {code.co_firstlineno}
            self._tracers[key] = _line_tracer(seen)
        # The last lines of a function may never run; then it is traced each time.
        return self._tracers[key] if len(seen) < self._codes[key][1] else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._seen, self._tracers, start = {}, {}, time.process_time()
        if sys.gettrace() is None:
            self.start()
        try:
            return (yield)
        finally:
            files: dict[str, int] = {}
            for key, lines in list(self._seen.items()):
                file = os.path.relpath(self._codes[key][0].co_filename, self._root)
                files[file] = files.get(file, 0) | sum(1 << line for line in lines)
            self.tests[item.nodeid] = time.process_time() - start, files


def _line_tracer(seen: set[int]) -> Any:
    add = seen.add

    def line(frame: Any, event: str, arg: Any) -> Any:
        add(frame.f_lineno)
        return line

    return line


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


class Lines:
    """What the recorder found in each test file, in a folder; a changed file is to be run again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tests: dict[str, tuple[float, dict[str, int]]] = {}
        self.moved: set[str] = set()  # kernels that are not what they were
        self.known = ""  # a hash of the tests' files

    def missing(self, files: list[str]) -> list[str]:
        return [file for file in files if self._kept(file) is None]

    def keep(self, file: str, tests: Any) -> None:
        now = {path: _text(path) for _, files in tests.values() for path in files}
        whole = pickle.dumps((_text(file), now, tests))
        self._path(file).with_suffix(".new").write_bytes(whole)
        self._path(file).with_suffix(".new").rename(self._path(file))

    def read(self, files: list[str]) -> None:
        for file in files:
            if (kept := self._kept(file)) is not None:
                text, then, tests = kept
                self.tests |= tests
                self.known = digest(self.known.encode(), text.encode())
                self.moved |= {path for path, text in then.items() if _text(path) != text}

    def _path(self, file: str) -> Path:
        return self.folder / f"{Path(file).stem}.pickle"

    def _kept(self, file: str) -> Any:
        if not self._path(file).exists():
            return None
        kept = pickle.loads(self._path(file).read_bytes())
        return kept if kept[0] == _text(file) else None

    def tests_of(self, mutant: Mutant, source: str) -> list[tuple[str, float]]:
        """(test, seconds) of those to run: quick ones first, and of each test function some soon.

        First come those that execute the line, then those of the functions around it, then those
        of the file; where no test touches that, all that run a product on the CPU's cores.
        """
        places = [1 << mutant.line, around(source, mutant.line), -1]
        if mutant.file in self.moved:
            places = [-1]
        chosen: dict[str, float] = {}
        for place in places:
            found = self._in_order(mutant.file, place, mutant.line)
            chosen |= {test: s for test, s in found if test not in chosen}
            if chosen and place == 1 << mutant.line and not is_compiled_once(source, mutant.line):
                break
        if not chosen:
            chosen = dict(self._in_order(f"{KERNELS}/cores.py", -1, mutant.line))
        return list(chosen.items())

    def _in_order(self, file: str, place: int, seed: int) -> list[tuple[str, float]]:
        functions: dict[str, list[tuple[str, float]]] = {}
        for test, (seconds, files) in self.tests.items():
            if files.get(file, 0) & place:
                functions.setdefault(test.partition("[")[0], []).append((test, seconds))
        ranked = []
        for tests in functions.values():
            Random(seed).shuffle(tests)
            ranked += [((k + 1) * (s + LEAST), test, s) for k, (test, s) in enumerate(tests)]
        return [(test, s) for _, test, s in sorted(ranked)]


def around(source: str, line: int) -> int:
    """The lines of the outermost function there, as bits."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            return sum(1 << n for n in range(node.lineno, (node.end_lineno or 0) + 1))
    return 0


def is_compiled_once(source: str, line: int) -> bool:
    """Whether the line stands in a function that is cached, and not in one that this makes."""
    inside = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return bool(inside) and any("cache" in ast.unparse(d) for d in inside[-1].decorator_list)


def _text(file: str) -> str:
    path = ROOT / file
    return digest(path.read_bytes()) if path.exists() else ""
