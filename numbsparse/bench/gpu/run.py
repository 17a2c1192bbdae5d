"""Run sections of the GPU's benchmark, print them, and keep them as JSON and as a picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from numbsparse.bench.figure import draw_speed_up, matplotlib_figure
from numbsparse.bench.gpu.ahead import compile_ahead
from numbsparse.bench.gpu.measure import Row
from numbsparse.bench.gpu.options import Options
from numbsparse.bench.gpu.results import Results, load, save
from numbsparse.bench.gpu.sections import SECTIONS
from numbsparse.bench.gpu.show import CELLS, HEADINGS, line
from numbsparse.bench.machine import describe
from numbsparse.device import SIMULATED, require

DEFAULT = Options()


def run(
    only: Iterable[str] = (),
    options: Options = DEFAULT,
    *,
    json_file: Path | None = None,
    png: Path | None = None,
) -> Results:
    """Print the sections, all or those in `only`, a line a row, and give them back.

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
        began = time.perf_counter()
        command = f"python -m numbsparse bench --place cuda --only {name}"
        if options.kernels != DEFAULT.kernels:
            command += f" --kernels {options.kernels}"
        section: dict[str, Any] = {"machine": machine, "command": command, "took": 0.0, "rows": []}
        print(f"\n{name}: {HEADINGS[name]}", flush=True)
        counted, write = _with_progress(name, SECTIONS[name](options))
        for row in counted:
            section["rows"].append(row)
            section["took"] = time.perf_counter() - began
            write(line(name, row, section["rows"]))
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


def _with_progress(name: str, rows: Iterator[Row]) -> tuple[Iterator[Row], Callable[[str], None]]:
    """The rows, and how to print: above a count of them, on a terminal where tqdm is installed."""
    if sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            return iter(tqdm(rows, desc=name, unit="row", leave=False)), tqdm.write
    return rows, partial(print, flush=True)
