"""Run sections of the benchmark, print them, and keep them as JSON."""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numbsparse.bench.measure import Options, compile_ahead
from numbsparse.bench.results import Results, load, save
from numbsparse.bench.sections import CASES, SECTIONS, heading, rows
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
    place: str = "cuda",
) -> Results:
    """Print a place's sections, all or those in `only`, a line a row, and give them back.

    With `json_file` each row is put there when it is measured, so that a run that is broken off
    leaves what it has; sections of earlier runs stay, and are given back, too.

    Raises RuntimeError where there is no GPU, ValueError where `json_file` holds something else.
    """
    if place == "cuda":
        require_times()
    results = {} if json_file is None else load(json_file)
    machine, names = describe(place), list(only or (SECTIONS if place == "cuda" else ("cpu",)))
    print(f"{machine}\nMedians; on a GPU of graph replays. Random data. {CELLS}.", flush=True)
    jobs, began = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2), time.perf_counter()
    if jobs > 1 and place == "cuda" and not options.quick:
        ahead = (case for name in names if name in CASES for case in CASES[name](options))
        compile_ahead(ahead, jobs, PATIENCE)
        print(f"\nkernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    for name in names:
        command = f"python -m numbsparse bench --place {place}"
        command += f" --only {name}" if place == "cuda" else ""
        if options.kernels != DEFAULT.kernels:
            command += f" --kernels {options.kernels}"
        print(f"\n{name}: {heading(name)}", flush=True)
        section: dict[str, Any] = {"machine": machine, "command": command, "took": 0.0, "rows": []}
        began = time.perf_counter()
        for row in rows(name, options):
            section["rows"].append(row)
            section["took"] = time.perf_counter() - began
            print(line(row, section["rows"]), flush=True)
            if json_file is not None:
                save(json_file, {name: section})
        print(f"{name} took {section['took']:.0f} s", flush=True)
        results[name] = section
    return results
