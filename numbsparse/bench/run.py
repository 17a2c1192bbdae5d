"""Run sections of the benchmark, print them, and keep them as JSON and as a picture."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from numbsparse.bench.measure import Options, compile_ahead
from numbsparse.bench.results import Results, Row, load, save, write
from numbsparse.bench.sections import CASES, HEADINGS, SECTIONS, rows
from numbsparse.bench.show import CELLS, line
from numbsparse.bench.timing import require_times
from numbsparse.machine import describe

DEFAULT = Options()
MOST_PROCESSES = 8
PATIENCE = 60.0  # seconds; what is not compiled by then is compiled where it is timed


def run(
    only: Iterable[str] = (),
    options: Options = DEFAULT,
    *,
    json_file: Path | None = None,
) -> Results:
    """Print the GPU's sections, all or those in `only`, a line a row, and give them back.

    With `json_file` each row is put there when it is measured, so that a run that is broken off
    leaves what it has; sections of earlier runs stay, and are given back, too.

    Raises RuntimeError where there is no GPU, ValueError where `json_file` holds something else.
    """
    require_times()
    results = {} if json_file is None else load(json_file)
    machine = describe("cuda")
    print(f"{machine}\nMedians of CUDA-graph replays, random data. {CELLS}.", flush=True)
    names, began = list(only or SECTIONS), time.perf_counter()
    jobs = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)
    if jobs > 1 and not options.quick:
        ahead = (case for name in names if name in CASES for case in CASES[name](options))
        compile_ahead(ahead, jobs, PATIENCE)
    print(f"\nkernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for name in names:
        command = f"python -m numbsparse bench --place cuda --only {name}"
        if options.kernels != DEFAULT.kernels:
            command += f" --kernels {options.kernels}"
        print(f"\n{name}: {HEADINGS[name]}", flush=True)
        for section in _growing(name, {"machine": machine, "command": command}, options):
            if json_file is not None:
                save(json_file, {name: section})
        print(f"{name} took {section['took']:.0f} s", flush=True)
        results[name] = section
    return results


def run_cpu(options: Options = DEFAULT, *, json_file: Path | None = None) -> list[Row]:
    """Print the table of the CPU; with `json_file` also write its rows there."""
    machine = describe("cpu")
    print(f"{machine}\n{HEADINGS['cpu']}")
    *_, section = _growing("cpu", {"machine": machine}, options)
    if json_file is not None:
        write(json_file, {"machine": machine, "rows": section["rows"]}, 2)
    return section["rows"]


def _growing(name: str, made: dict[str, str], options: Options) -> Iterator[dict[str, Any]]:
    """A section after each of its rows, which is printed."""
    began = time.perf_counter()
    section: dict[str, Any] = {**made, "took": 0.0, "rows": []}
    for row in rows(name, options):
        section["rows"].append(row)
        section["took"] = time.perf_counter() - began
        print(line(name, row, section["rows"]), flush=True)
        yield section
