"""The parts of `numbsparse/kernels/README.md` that follow from code and measurements.

Each stands between its markers there, and `python -m numbsparse tables` writes it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from numbsparse.bench import steps
from numbsparse.bench.ladder import lines_of, reads, reads_at
from numbsparse.bench.profile import WAITS
from numbsparse.bench.results import (
    Row,
    on_gpu,
    profiled,
    rows_of,
    seconds_of,
    shape_of,
    speeds_of,
)
from numbsparse.bench.show import PASSES, table
from numbsparse.bench.walks import EXAMPLE, picture
from numbsparse.bench.walls import walls
from numbsparse.kernels.matmul import LADDER, PRODUCTS
from numbsparse.layout import Layout

BEFORE = {
    "k1_naive": None,
    "k2_shared": "k1_naive",
    "k3_registers": "k2_shared",
    "k4_pipelined": "k3_registers",
    "k5_tensor_core": "k4_pipelined",
    "k6_hopper": "k5_tensor_core",
    "k7_small_blocks": "k4_pipelined",
    "k8_small_batch": "k6_hopper",
}
"""Each rung of the lessons, and the one that its table stands beside, at its own shape."""

OF_PEAK = {
    "issue": "issue slots in use",
    "alu": "pipe of integers (ALU)",
    "fma": "pipe of multiply-adds (FMA)",
    "tensor": "tensor cores",
    "L1 data": "data path of L1 and shared memory",
    "L2": "L2 cache",
    "memory": "device memory",
    "warps active": "warps on a multiprocessor, of 64",
}
MOST_WAITS = 3
COMPARED = (
    "global read requests",
    "global read sectors",
    "global write sectors",
    "shared read wavefronts",
    "shared write wavefronts",
)


def walks() -> str:
    """The index arrays of the layout that the lessons begin with."""
    return f"```text\n{picture(Layout(EXAMPLE))}\n```\n"


def figures(name: str) -> str:
    """What is known of a rung, beside the one before: reads, speed, what the profiler says."""
    before = BEFORE[name]
    names = [before, name] if before else [name]
    rows = rows_of(name)
    readings = [reading for of in names if (reading := _reading(of, rows)) is not None]
    cells = [["lines of code", *(f"{lines_of(LADDER[of]):,}" for of in names)]]
    cells.append(["values read per output, global / shared", *(_formula(of, rows) for of in names)])
    counts = [_counted(of) for of in names]
    if all(counts):
        cells.append(
            ["the same at the small shape of the counts", *map(_formula_of_counted, names)]
        )
        cells.append(["counted there, index arrays too", *counts])
    for product in PRODUCTS:
        speeds = [speeds_of(of, rows, product) for of in names]
        if before:
            speeds[1] += f" ({_gains(before, name, rows, product)})"
        cells.append([f"{PASSES[product]}, TFLOP/s, float32 / float16", *speeds])
    text = f"{shape_of(rows[0])}, density 0.1.\n\n{table(['', *names], cells)}\n"
    if not readings:
        return text
    heads = ["the profiler, forward", *(f"{row['rung']}, {row['dtype']}" for row in readings)]
    return f"{text}\n{table(heads, _profile(readings, rows))}\n"


def counts() -> str:
    """The small shape: what the simulator counts, and what the profiler reads on the card."""
    sections = profiled()
    cells = []
    for own, read in zip(sections["counted"]["rows"], sections["small"]["rows"], strict=True):
        pairs = [(own["readings"][key], read["readings"][key]) for key in COMPARED]
        cells.append([own["rung"], *(f"{a:,} / {b:,}" for a, b in pairs)])
    shape = sections["small"]["rows"][0]
    return (
        f"Counted / read by the profiler: y = x @ w for {shape['batch']} rows of "
        f"{shape['in_features']} features and {shape['out_features']} outputs, all blocks of 32 x "
        f"32 kept; {_card(sections['small'])}.\n\n{table(['rung', *COMPARED], cells)}\n"
    )


def machine() -> str:
    """Where the numbers of the lessons come from."""
    sections = profiled()
    commands = {on_gpu()["ladder"]["command"], *(part["command"] for part in sections.values())}
    return (
        f"Speeds: {on_gpu()['ladder']['machine']}. Profiler: {_card(sections['small'])}. Commands: "
        f"{', '.join(f'`{command}`' for command in sorted(commands))}.\n"
    )


def limits() -> str:
    """What the card can do at most, as the benchmark measures it."""
    section = on_gpu()["limits"]
    cells = [[row["limit"], f"{row['rate'] / 1e12:.3g} T{row['unit']}"] for row in section["rows"]]
    return f"{_card(section)}; `{section['command']}`.\n\n{table(['at most', 'a second'], cells)}\n"


PARTS: dict[str, Callable[[], str]] = {
    "walks": walks,
    "machine": machine,
    "limits": limits,
    "counts": counts,
    "steps": steps.written,
    "walls": walls,
    **{name: partial(figures, name) for name in BEFORE},
}


def _card(section: Row) -> str:
    return section["machine"].partition(";")[0]


def _formula(name: str, rows: list[Row]) -> str:
    found = reads_at(name, rows[0], "float16")
    return " / ".join(f"{count:,.0f}" for count in found) if found else ""


def _counted(name: str) -> str:
    """Bytes read per output, in values; of rungs that read no memory unseen."""
    row = _row_of_counts(name)
    if row is None:
        return ""
    values = row["batch"] * row["out_features"] * (4 if row["dtype"] == "float32" else 2)
    memories = ("global read bytes", "shared read bytes")
    return " / ".join(f"{row['readings'][key] / values:.1f}" for key in memories)


def _formula_of_counted(name: str) -> str:
    row = _row_of_counts(name)
    assert row is not None
    size = row["block_size"]
    layout = Layout(np.ones((row["in_features"] // size, row["out_features"] // size)))
    found = reads(name, layout, size, row["batch"], row["dtype"])
    return " / ".join(f"{count:.1f}" for count in found or ())


def _row_of_counts(name: str) -> Row | None:
    return next((row for row in profiled()["counted"]["rows"] if row["rung"] == name), None)


def _gains(before: str, name: str, rows: list[Row], product: str) -> str:
    """How many times as fast, in float32 and in float16."""
    gains = []
    for dtype in ("float32", "float16"):
        one, other = (seconds_of(of, rows, product, dtype) for of in (before, name))
        gains.append(f"{one / other:.1f}" if one and other else "-")
    return "x " + " / x ".join(gains)


def _reading(name: str, rows: list[Row]) -> Row | None:
    """What the profiler read of a rung at the shape of the lesson."""
    for section in ("float32", "float16"):
        for row in profiled().get(section, {"rows": []})["rows"]:
            same = row["in_features"] == rows[0]["features"] and row["batch"] == rows[0]["batch"]
            if row["rung"] == name and same and row["block_size"] == rows[0]["block_size"]:
                return row
    return None


def _profile(rows: list[Row], timed: list[Row]) -> list[list[str]]:
    """What was read of each rung; `timed` are the rows of the benchmark at the same shape."""
    cells = [["microseconds of this run / as timed", *(_microseconds(row, timed) for row in rows)]]
    cells += [["values per output that came from L2", *map(_from_l2, rows)]]
    cells.append(["instructions of a thread per product", *map(_instructions, rows)])
    for key, label in OF_PEAK.items():
        cells.append([label, *(_share(row["readings"][key], key) for row in rows)])
    cells.append(["registers of a thread", *(f"{row['readings']['registers']}" for row in rows)])
    cells.append(["for each warp that goes on, how many wait for what", *map(_waits, rows)])
    return cells


def _microseconds(row: Row, timed: list[Row]) -> str:
    benchmarks = seconds_of(row["rung"], timed, "forward", row["dtype"])
    both = row["readings"]["seconds"], benchmarks or 0
    return " / ".join(f"{1e6 * seconds:,.0f}" for seconds in both)


def _from_l2(row: Row) -> str:
    outputs = row["batch"] * row["out_features"]
    size = 4 if row["dtype"] == "float32" else 2
    return f"{row['readings']['L2 to L1 bytes'] / outputs / size:.0f}"


def _share(percent: float, key: str) -> str:
    return f"{percent * 0.64:.0f}" if key == "warps active" else f"{percent:.0f} %"


def _instructions(row: Row) -> str:
    weights = row["density"] * row["in_features"] * row["out_features"]
    count = 32 * row["readings"]["instructions"] / (weights * row["batch"])
    return f"{count:.2f}" if count < 1 else f"{count:.1f}" if count < 10 else f"{count:.0f}"


def _waits(row: Row) -> str:
    """The most frequent, as warps that wait while one goes on."""
    own = {what: row["readings"][f"waits for {what}"] for what in WAITS if what != "its turn"}
    longest = sorted(own, key=lambda what: -own[what])[:MOST_WAITS]
    return ", ".join(f"{what} {own[what]:.1f}" for what in longest if own[what] >= 0.05)
