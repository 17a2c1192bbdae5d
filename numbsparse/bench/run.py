"""Run sections of the benchmark, print them, and keep them as JSON and as a picture."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from numbsparse import files
from numbsparse.bench.contestants import FEATURE_MAJOR, MATMUL, contestants_of
from numbsparse.bench.figure import draw_speed_up, matplotlib_figure
from numbsparse.bench.machine import describe
from numbsparse.bench.measure import Options
from numbsparse.bench.problem import forget_numbers
from numbsparse.bench.results import Results, Row, load, save
from numbsparse.bench.sections import CASES, SECTIONS, Case, rows
from numbsparse.bench.show import CELLS, HEADINGS, line
from numbsparse.device import SIMULATED, require

DEFAULT = Options()
MOST_PROCESSES = 8
PATIENCE = 60.0  # seconds; what is not compiled by then is compiled where it is timed


def run(
    only: Iterable[str] = (),
    options: Options = DEFAULT,
    *,
    json_file: Path | None = None,
    png: Path | None = None,
) -> Results:
    """Print the GPU's sections, all or those in `only`, a line a row, and give them back.

    With `json_file` each row is put there when it is measured, so that a run that is broken off
    leaves what it has; sections of earlier runs stay. With `png` the figure of the section
    "headline" is drawn, of this run or from `json_file`.

    Raises RuntimeError where there is no GPU, or matplotlib is missing for `png`, ValueError where
    `json_file` holds something else.
    """
    if SIMULATED:
        raise RuntimeError("the simulator's times mean nothing: unset NUMBA_ENABLE_CUDASIM")
    require()
    if png is not None:
        matplotlib_figure()  # before the measuring: it may be missing
    if json_file is not None:
        load(json_file)  # the same: it may be another program's
    machine = describe("cuda")
    print(f"{machine}\nMedians of CUDA-graph replays, random data. {CELLS}.", flush=True)
    names = list(only or SECTIONS)
    print(f"\nkernels compiled in {compile_ahead(names, options):.0f} s", flush=True)
    results: Results = {}
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
    if png is not None:
        known = (load(json_file) if json_file is not None else {}) | results
        if "headline" not in known:
            raise RuntimeError("the figure takes the section headline: add it to --only")
        draw_speed_up(known["headline"], png)
        print(f"the figure is in {png}")
    return results


def run_cpu(options: Options = DEFAULT, *, json_file: Path | None = None) -> list[Row]:
    """Print the table of the CPU; with `json_file` also write its rows there."""
    machine = describe("cpu")
    print(f"{machine}\n{HEADINGS['cpu']}")
    *_, section = _growing("cpu", {"machine": machine}, options)
    if json_file is not None:
        text = json.dumps({"machine": machine, "rows": section["rows"]}, indent=1) + "\n"
        files.write_bytes(json_file, text.encode())
    return section["rows"]


def _growing(name: str, made: dict[str, str], options: Options) -> Iterator[dict[str, Any]]:
    """A section after each of its rows, which is printed."""
    began = time.perf_counter()
    section: dict[str, Any] = {**made, "took": 0.0, "rows": []}
    counted, write = _with_progress(name, rows(name, options))
    for row in counted:
        section["rows"].append(row)
        section["took"] = time.perf_counter() - began
        write(line(name, row, section["rows"]))
        yield section


def _with_progress(name: str, rows: Iterator[Row]) -> tuple[Iterator[Row], Callable[[str], None]]:
    """The rows, and how to print: above a count of them, on a terminal where tqdm is installed."""
    if sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            return iter(tqdm(rows, desc=name, unit="row", leave=False)), tqdm.write
    return rows, partial(print, flush=True)


def compile_ahead(names: Iterable[str], options: Options) -> float:
    """Compile what the sections will time on several cores, before anything is; the seconds.

    A kernel of the upper rungs takes seconds to compile, on one core. Other processes call each
    once, and leave it in the cache on disk, where the benchmark finds it.
    """
    began = time.perf_counter()
    names = [name for name in names if name in CASES]
    count = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)
    if names and not options.quick and count > 1:
        spawn = get_context("spawn")
        parts = [
            spawn.Process(target=_part, args=(names, options, i, count), daemon=True)
            for i in range(count)
        ]
        for process in parts:
            process.start()
        for process in parts:
            process.join(max(0.0, began + PATIENCE - time.perf_counter()))
            process.kill()
    return time.perf_counter() - began


def _part(names: list[str], options: Options, part: int, parts: int) -> None:
    """Every `parts`-th case of the sections, from the one numbered `part` on."""
    seen: set[Any] = set()
    for name in names:
        for case in CASES[name](options):
            problem, product, kernels, others, _ = case
            own = tuple(other for other in others if other in (FEATURE_MAJOR, MATMUL))
            what = product, kernels, own, problem.dtype, problem.precision, problem.block_size
            key = *what, problem.batch, problem.side, problem.taps_along
            if kernels and key not in seen:
                seen.add(key)
                if len(seen) % parts == part:
                    _call(case._replace(others=own))


def _call(case: Case) -> None:
    """Each of ours, once."""
    with suppress(Exception):  # the benchmark itself will say what is wrong
        for make in contestants_of(*case[:-1]).values():
            make(case.problem, case.product).call()
    forget_numbers()
