"""Machine code of compute capability 9.0, compiled without a GPU, beside that committed."""

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from numbsparse import bench
from numbsparse.bench.results import table
from numbsparse.device import SIMULATED, runtime, stand_in
from numbsparse.device.waits import shown
from numbsparse.files import write_json
from numbsparse.machine import in_a_list, versions_of
from numbsparse.machine_code import fits
from numbsparse.machine_code.calls import calls
from numbsparse.machine_code.cubin import description

COMMITTED = Path(bench.__file__).parent / "results" / "machine_code.json"
COMPILERS = ("numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
SHOWN = ("instructions", "registers", "stack")
HEAD = ["call", "kernel", *SHOWN, "hash"]

Kernel = dict[str, Any]
Kernels = dict[str, list[Kernel]]

_found: list[stand_in.Compiled] = []


def run(
    words: Sequence[str] = (),
    *,
    json_file: Path | None = None,
    jobs: int = 0,
    capability: fits.Capability | None = None,
) -> bool:
    """Compile for compute capability 9.0, which takes no GPU; whether all is as committed. Or for
    another `capability`; whether all compiles, and fits on such a card.

    `words` choose calls: those whose names hold one of them. `json_file` keeps what it has of other
    calls. A line says what was compiled and with which compilers; then follows a line for each
    kernel that differs; for each, where words chose them or there is nothing to compare with.

    Raises RuntimeError in the simulator and where the compiler libraries are missing, ValueError
    where no call is meant.
    """
    _require()
    names = [name for name in calls() if not words or any(word in name for word in words)]
    if not names:
        raise ValueError(f"no call has {' or '.join(words)} in its name")
    jobs = jobs or os.cpu_count() or 1
    if capability is not None:
        return fits.run(capability, names, jobs)
    now, used = dict(_compiled(names, jobs)), versions_of(*COMPILERS)
    if json_file is not None:
        _write(json_file, now, used)
    print(
        f"{len(names)} calls, {sum(map(len, now.values()))} kernels; compiled by {in_a_list(used)}"
    )
    return _compared(now, used, show_all=bool(words))


def _compared(now: Kernels, used: dict[str, str], show_all: bool) -> bool:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    if used != committed["compilers"]:
        print(f"not compared: those committed were compiled by {in_a_list(committed['compilers'])}")
        print(table(HEAD, rows(now)))
        return True
    found = changes({name: committed["calls"].get(name, []) for name in now}, now)
    if show_all:
        print(table(HEAD, rows(now)))
    print(f"{len(found)} differ from those committed" if found else "all are as committed")
    if found:
        print(table(["call", "kernel", *SHOWN], found))
    return not found


def _require() -> None:
    if SIMULATED:
        raise RuntimeError("the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM")
    runtime.require_numba_cuda("machine-code")
    if (library := runtime.missing_compiler()) is not None:
        raise RuntimeError(f"{library} was not found: pip install 'numbsparse[cu13]'")


def _compiled(names: list[str], jobs: int) -> Iterable[tuple[str, list[Kernel]]]:
    """Each call's kernels, in the order of their launches."""
    if jobs == 1:
        _begin()
        yield from ((name, kernels_of(name)) for name in shown(names, "compiled"))
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(names)), context, _begin) as pool:
        found = pool.map(kernels_of, names)
        for name in shown(names, "compiled"):
            yield name, next(found)


def _begin() -> None:
    global _found
    _found = stand_in.install()


def kernels_of(name: str) -> list[Kernel]:
    """In a process whose card is not there."""
    call = calls()[name]()
    _found.clear()
    stand_in.forget()
    call()
    return [{"kernel": each.name, **description(each.cubin)} for each in _found]


def _write(file: Path, now: Kernels, used: dict[str, str]) -> None:
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = (before["calls"] if before.get("compilers") == used else {}) | now
    in_order = {name: found[name] for name in calls() if name in found}
    write_json(file, {"compilers": used, "calls": in_order}, 3)


def rows(kernels: Kernels) -> list[list[str]]:
    """A line for each."""
    return [
        [name, each["kernel"], *(f"{each[what]:,}" for what in SHOWN), each["hash"]]
        for name, found in kernels.items()
        for each in found
    ]


def changes(before: Kernels, now: Kernels) -> list[list[str]]:
    """A line for each kernel whose machine code is another; its name may change."""
    return [
        [call, *_change(then, each)]
        for call, found in now.items()
        for then, each in zip_longest(before[call], found)
        if then is None or each is None or then["hash"] != each["hash"]
    ]


def _change(then: Kernel | None, now: Kernel | None) -> list[str]:
    if then is None or now is None:
        there = now or then or {}
        word = "new" if then is None else "gone"
        return [f"{there['kernel']}: {word}", *(f"{there[what]:,}" for what in SHOWN)]
    pairs = [(then[what], now[what]) for what in SHOWN]
    return [now["kernel"], *(f"{a:,}" if a == b else f"{a:,} to {b:,}" for a, b in pairs)]
