"""Tests in a forked process: what was imported before is not imported again, and it can be killed.

The parent has imported what the library stands on, and not the library: the child does, from a tree
in which a file is broken.
"""

import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
from mutants_code import ROOT

IMPORTED = (
    "numba", "numba.cuda", "numba.core.caching", "scipy.sparse", "hypothesis", "ml_dtypes", "torch",
    "_pytest.doctest", "_pytest.assertion", "matplotlib",
)  # fmt: skip
STAGES = (12, 60)  # tests that are looked for together; then the rest
SILENT = "silent"


def warm_up() -> None:
    """Import what takes long and no mutant changes."""
    run_path(str(ROOT / "examples" / "gpu_or_simulator.py"))
    for name in IMPORTED:
        if find_spec(name.partition(".")[0]):
            import_module(name)


def forked(work: Callable[[Callable[[Any], None]], None], patience: float) -> Iterator[Any]:
    """What `work(say)` says in a process of its own; SILENT and the end where it says nothing.

    A number that it says is how many seconds more it may be silent from then on.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(work, writing)
    os.close(writing)
    rest, allowed = b"", patience
    try:
        while True:
            if not heard(reading, child, allowed):
                yield SILENT
                return
            if not (data := os.read(reading, 1 << 16)):
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if (said := json.loads(line)) is None:
                    return
                if isinstance(said, int | float):
                    allowed = patience + said
                else:
                    yield said
    finally:
        os.close(reading)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def heard(reading: int, child: int, allowed: float) -> bool:
    """Whether the child says something in time: on a busy machine it may have had none yet."""
    start = cpu_seconds(child)
    for _ in range(10):
        if select.select([reading], [], [], allowed)[0]:
            return True
        used = cpu_seconds(child) - start
        if used > allowed / 2 or used < allowed / 1000:  # it goes round in circles, or sleeps
            return False
    return False


def cpu_seconds(process: int) -> float:
    """What it has used so far; 0 where the system does not say."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _work(work: Callable[[Callable[[Any], None]], None], writing: int) -> None:
    """The child: its output goes nowhere, and its children end with it.

    What it has from its parent is not looked through for garbage: of a whole run of the tests that
    takes half a minute.
    """
    gc.freeze()
    os.setsid()

    def say(what: Any) -> None:
        data = json.dumps(what).encode() + b"\n"
        while data:
            data = data[os.write(writing, data) :]

    try:
        log = os.environ.get("MUTANTS_LOG", os.devnull)
        nowhere = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        work(say)
        say(None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def enter(tree: Path, cache: Path, bytecode: bool = False) -> None:
    """Be a process that imports the library and its tests from that tree."""
    os.chdir(tree)
    here = {str(ROOT), str(ROOT / "tests"), ""}
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in here)]
    os.environ["PYTHONPATH"] = str(tree)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they ask to be imported after pytest
    os.environ["NUMBSPARSE_CACHE_DIR"] = str(cache)
    if not bytecode:
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


def run_pytest(files: list[str], plugin: Any) -> int:
    quiet = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    return int(pytest.main([*quiet, *files], plugins=[plugin]))


class Chosen:
    """A pytest plugin: runs these tests in this order, says which begins and which fails."""

    def __init__(self, tests: list[tuple[str, float]], say: Callable[[Any], None]) -> None:
        self.tests, self.say, self.failed = dict(tests), say, False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        wanted = {item.nodeid: item for item in items if item.nodeid in self.tests}
        items[:] = [wanted[test] for test in self.tests if test in wanted]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.say(20 * self.tests.get(nodeid, 0))
        self.say({"begun": nodeid, "at": time.time()})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.fail(report.nodeid, report)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.fail(report.nodeid, report)

    def fail(self, name: str, report: Any) -> None:
        lines = report.longreprtext.strip().splitlines()
        self.failed = True
        self.say({"failed": name, "why": lines[-1][:200] if lines else ""})


def outcome(tests: list[tuple[str, float]], tree: Path, cache: Path, patience: float) -> dict:
    """Which test fails first, if one does, of those in the tree: {caught, by, why, run}."""

    def work(say: Callable[[Any], None]) -> None:
        enter(tree, cache)
        start = 0
        for end in (*STAGES, len(tests)):
            if part := tests[start:end]:
                chosen = Chosen(part, say)
                files = list(dict.fromkeys(test.partition("::")[0] for test, _ in part))
                code = run_pytest(files, chosen)
                if chosen.failed:
                    return
                if code not in (0, 5):  # an error in conftest.py, say
                    say({"failed": files[0], "why": f"pytest ended with {code}"})
                    return
            start = end
        say({"passed": True})

    run, last = 0, ""
    for said in forked(work, patience):
        if said == SILENT:
            return {"caught": True, "by": last, "why": "no end", "run": run}
        if "failed" in said:
            return {"caught": True, "by": said["failed"], "why": said["why"], "run": run}
        if "passed" in said:
            return {"caught": False, "by": "", "why": "", "run": run}
        run, last = run + 1, said["begun"]
    return {"caught": True, "by": last, "why": "the process ended", "run": run}
