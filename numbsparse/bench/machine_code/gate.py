"""Compile the kernels of all calls, on all cores, and hold them against those committed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from numbsparse.bench.machine import version_of
from numbsparse.bench.machine_code.calls import calls
from numbsparse.bench.machine_code.cubin import description
from numbsparse.bench.markdown import table
from numbsparse.device import SIMULATED, runtime, stand_in

COMMITTED = Path(__file__).parents[1] / "results" / "machine_code.json"
COMPILERS = ("numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
SHOWN = ("instructions", "registers", "stack")

Kernel = dict[str, Any]
Kernels = dict[str, list[Kernel]]

_found: list[stand_in.Compiled] = []


def run(words: Sequence[str] = (), *, json_file: Path | None = None, jobs: int = 0) -> bool:
    """Compile for compute capability 9.0, which takes no GPU; whether all is as committed.

    `words` choose calls: those whose names hold one of them. `json_file` keeps what it has of other
    calls. A line says what was compiled and with which compilers; then follows a line for each
    kernel that differs, or, where there is nothing to compare with, for each.

    Raises RuntimeError in the simulator and where the compiler libraries are missing, ValueError
    where no call is meant.
    """
    _require()
    names = [name for name in calls() if not words or any(word in name for word in words)]
    if not names:
        raise ValueError(f"no call has {' or '.join(words)} in its name")
    now, used = dict(_compiled(names, jobs or os.cpu_count() or 1)), compilers()
    if json_file is not None:
        _write(json_file, now, used)
    print(f"{len(names)} calls, {sum(map(len, now.values()))} kernels; compiled by {_told(used)}")
    return _compared(now, used)


def _compared(now: Kernels, used: dict[str, str]) -> bool:
    committed = json.loads(COMMITTED.read_text())
    if used != committed["compilers"]:
        print(f"not compared: those committed were compiled by {_told(committed['compilers'])}")
        print(table(["call", "kernel", *SHOWN, "hash"], rows(now)))
        return True
    found = changes({name: committed["calls"].get(name, []) for name in now}, now)
    print(f"{len(found)} differ from those committed" if found else "all are as committed")
    if found:
        print(table(["call", "kernel", *SHOWN], found))
    return not found


def _require() -> None:
    if SIMULATED:
        raise RuntimeError("the simulator compiles nothing: unset NUMBA_ENABLE_CUDASIM")
    if find_spec("numba_cuda") is None:
        raise RuntimeError("machine-code takes numba-cuda: pip install 'numbsparse[cu13]'")
    if (library := runtime.missing_compiler()) is not None:
        raise RuntimeError(f"{library} was not found: pip install 'numbsparse[cu13]'")


def compilers() -> dict[str, str]:
    """The packages on which machine code depends, by version."""
    return {name: number for name in COMPILERS if (number := version_of(name))}


def _told(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def _compiled(names: list[str], jobs: int) -> Iterable[tuple[str, list[Kernel]]]:
    """Each call's kernels, in the order of their launches."""
    context = get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(names)), context, _begin) as pool:
        found: Iterable[Any] = pool.map(kernels_of, names)
        with suppress(ImportError):
            from tqdm import tqdm

            found = tqdm(found, total=len(names), desc="compiled", leave=False)
        yield from zip(names, found, strict=True)


def _begin() -> None:
    global _found
    _found = stand_in.install()


def kernels_of(name: str) -> list[Kernel]:
    """In a process whose card is not there."""
    _found.clear()
    stand_in.forget()
    calls()[name].run()
    return [{"kernel": each.name, **description(each.cubin)} for each in _found]


def _write(file: Path, now: Kernels, used: dict[str, str]) -> None:
    before = json.loads(file.read_text()) if file.exists() else {}
    found = (before["calls"] if before.get("compilers") == used else {}) | now
    in_order = {name: found[name] for name in calls() if name in found}
    file.write_text(_as_json(in_order, used))


def _as_json(kernels: Kernels, used: dict[str, str]) -> str:
    """A line for each kernel, so that a diff names those that changed."""
    of_calls = ",\n".join(
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(k)}" for k in found) + "\n  ]"
        for name, found in kernels.items()
    )
    return f'{{\n "compilers": {json.dumps(used)},\n "calls": {{\n{of_calls}\n }}\n}}\n'


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
