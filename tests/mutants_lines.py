"""Which tests execute which lines of the kernels, and how long each takes: found once, and kept.

A line that a compiler takes (the CPU's kernels) is not seen, and a factory that is cached is run by
the first test alone. So a test also stands for what encloses a function that it runs, and where no
test is left, for the whole file.
"""

import ast
import hashlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
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
        self._seen: set[tuple[str, int]] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self._seen.clear()
        self.begin()
        start = time.process_time()
        try:
            return (yield)
        finally:
            files: dict[str, int] = {}
            for path, line in list(self._seen):
                file = os.path.relpath(path, self._root)
                files[file] = files.get(file, 0) | 1 << line
            self.tests[item.nodeid] = time.process_time() - start, files

    def is_ours(self, code: Any) -> bool:
        """Whether it is a kernel's; a module's own lines run with whichever test imports it."""
        return code.co_filename.startswith(self._folder) and code.co_name != "<module>"

    def begin(self) -> None:
        """Of a test: all lines are to be seen again."""
        raise NotImplementedError


class Monitor(Recorder):
    """Python 3.12 tells of a line once a test, which takes next to no time."""

    def begin(self) -> None:
        monitoring = sys.monitoring
        tool, events = monitoring.COVERAGE_ID, monitoring.events
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, "mutants")
            monitoring.register_callback(tool, events.PY_START, self._started)
            monitoring.register_callback(tool, events.LINE, self._ran)
            monitoring.set_events(tool, events.PY_START)
        monitoring.restart_events()

    def _started(self, code: Any, offset: int) -> Any:
        if self.is_ours(code):
            self._seen.add((code.co_filename, code.co_firstlineno))
            monitoring = sys.monitoring
            monitoring.set_local_events(monitoring.COVERAGE_ID, code, monitoring.events.LINE)
        return sys.monitoring.DISABLE

    def _ran(self, code: Any, line: int) -> Any:
        self._seen.add((code.co_filename, line))
        return sys.monitoring.DISABLE


class Tracer(Recorder):
    """Any Python; each greenlet, which a simulated thread is, has a trace of its own."""

    def begin(self) -> None:
        if sys.gettrace() is None:
            with suppress(ImportError):
                Worker: Any = import_module("numbsparse.simulator.threads").Worker
                run = Worker.run
                Worker.run = lambda worker: (sys.settrace(self._call), run(worker))
            threading.settrace(self._call)
            sys.settrace(self._call)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        if not self.is_ours(frame.f_code):
            return None
        self._seen.add((frame.f_code.co_filename, frame.f_lineno))
        return self._call


def recorder(root: Path) -> Recorder:
    return Monitor(root) if hasattr(sys, "monitoring") else Tracer(root)


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
