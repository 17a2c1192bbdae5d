"""The products on the CPU against their peers, as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numbsparse import files
from numbsparse.bench.cpu.contestants import contestants_of
from numbsparse.bench.cpu.problem import PRODUCTS, QUICK_SHAPES, SHAPES, Problem, Shape
from numbsparse.bench.cpu.timing import times
from numbsparse.bench.machine import describe


def run(*, quick: bool = False, json_file: Path | None = None) -> list[dict[str, Any]]:
    """Print the table; with `json_file` also write its rows there."""
    machine = describe("cpu")
    print(
        f"{machine}\nmedian time per call; in brackets, how many times as fast the first column is"
    )
    rows = []
    for shape in QUICK_SHAPES if quick else SHAPES:
        size = f"density {shape.density}, B {shape.block_size}, float32"
        print(f"\n{shape}, {size}", flush=True)
        for row in measure(shape, "float32", seconds=0.01 if quick else 1.0):
            rows.append(row)
            print(_line(row), flush=True)
    if json_file is not None:
        text = json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
        files.write_bytes(json_file, text.encode())
    return rows


def measure(shape: Shape, dtype: str, seconds: float) -> Iterator[dict[str, Any]]:
    """A row per product: the seconds of each contestant, or what is wrong with its result."""
    problem = Problem(shape, dtype)
    for product in PRODUCTS:
        contestants = contestants_of(problem, product)
        exact = problem.exact(product)
        faults = {
            name: problem.check(product, host(call()), exact)
            for name, (call, host) in contestants.items()
        }
        right = {name: contestants[name][0] for name in contestants if faults[name] is None}
        seconds_of: dict[str, Any] = times(right, seconds=seconds)
        yield {
            "product": product,
            "dtype": dtype,
            **vars(shape),
            "flops": problem.flops,
            "seconds": seconds_of,
            "wrong": {name: fault for name, fault in faults.items() if fault is not None},
        }


def _line(row: dict[str, Any]) -> str:
    first, cells = None, []
    for name, seconds in row["seconds"].items():
        if first is None:
            first = seconds
            cells.append(f"{name} {_time(seconds)} {row['flops'] / seconds / 1e9:7.0f} GFLOP/s")
        else:
            cells.append(f"{name} {_time(seconds)} ({seconds / first:5.1f}x)")
    cells += [f"{name} {fault}" for name, fault in row["wrong"].items()]
    return f"  {row['product']:12} " + "   ".join(cells)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:8.3f} ms"
