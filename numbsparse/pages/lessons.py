"""The parts of `numbsparse/kernels/README.md` that follow from code and measurements.

Each stands between its markers there, and `python -m numbsparse tables` writes it.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from numbsparse.bench.results import PASSES, Row, card_of, first, table
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.layout import Layout
from numbsparse.pages import committed
from numbsparse.pages.committed import (
    CACHE,
    MEMORY,
    gain_of,
    in_section,
    on_gpu,
    profiled,
    ratio,
    rows_of,
    seconds_of,
    shape_of,
    speeds_of,
    teraflops,
)
from numbsparse.pages.ladder import figures_of_steps, lines_of, speeds_in_steps
from numbsparse.pages.opened import opened_for
from numbsparse.pages.profile import WAITS
from numbsparse.pages.reads import bytes_of, reads, reads_at

BEFORE = {
    "k1_naive": None,
    "k3_registers": "k1_naive",
    "k5_tensor_core": "k3_registers",
    "k6_hopper": "k5_tensor_core",
    "k7_small_blocks": "k3_registers",
    "k8_small_batch": "k6_hopper",
    "k9_dense_tiles": "k7_small_blocks",
}
"""Each rung of the lessons, and the one that its table stands beside, at its own shape."""

DTYPES = ("float32", "float16")
MOST_WAITS = 3
COMPARED = (
    "global read requests",
    "global read sectors",
    "global write sectors",
    "shared read wavefronts",
    "shared write wavefronts",
)


def machine() -> str:
    """Where the numbers of the lessons come from."""
    sections = profiled()
    commands = {on_gpu()["ladder"]["command"], *(part["command"] for part in sections.values())}
    card = card_of(sections["small"]["machine"])
    return (
        f"Speeds: {on_gpu()['ladder']['machine']}. Profiler: {card}. "
        f"Commands: {', '.join(f'`{command}`' for command in sorted(commands))}.\n"
    )


def limits() -> str:
    """What the card can do at most, as the benchmark measures it."""
    section = on_gpu()["limits"]
    cells = [[row["limit"], f"{row['rate'] / 1e12:.3g} T{row['unit']}"] for row in section["rows"]]
    card = card_of(section["machine"])
    return f"{card}; `{section['command']}`.\n\n{table(['at most', 'a second'], cells)}"


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
        f"32 kept; {card_of(sections['small']['machine'])}.\n\n{table(['rung', *COMPARED], cells)}"
    )


def steps() -> str:
    """The taught steps: what each adds, reads and reaches."""
    cells = []
    for found in figures_of_steps():
        lines, new, from_global, from_shared, *speeds, gain, roof = found.numbers
        link = f"[{found.name}](ladder/{found.name}.py)"
        both, counts = f"{lines} / {new}" if new else lines, f"{from_global} / {from_shared}"
        cells.append([link, found.idea, both, counts, " / ".join(speeds), gain, roof])
    heads = ["step", "idea", "lines / new", "reads per output, global / shared"]
    heads += ["TFLOP/s at B = 32 / 64 / 128", "times the one before", "roofline, B = 32"]
    section = on_gpu()["steps"]
    shape = "8192 x 8192, batch 8192, density 0.1; float32 to s07, then float16"
    rungs = ("k3_registers", "float32"), ("k5_tensor_core", "float16"), ("k6_hopper", "float16")
    reached = [f"{of[0]} {' / '.join(map(teraflops, speeds_in_steps(*of)))}" for of in rungs]
    return (
        f"{shape}. {section['machine']}; `{section['command']}`. TFLOP/s of rungs in the same run: "
        f"{', '.join(reached)}.\n\n{table(heads, cells)}"
    )


def opened() -> str:
    """A line for each rung on a GPU: what a reader opens for one product of it."""
    cells = []
    for name in BEFORE:
        found, rows = opened_for(name), rows_of(name)
        gains = " / ".join(ratio(gain_of(name, rows, dtype)) for dtype in DTYPES)
        counts = str(found.files), f"{found.lines:,}", f"{found.with_parts:,}"
        cells.append([name, str(found.own), *counts, gains])
    heads = ["rung", "own files", "files opened", "lines opened", "with the parts"]
    return table([*heads, "times the best before, float32 / float16"], cells)


def figures(name: str) -> str:
    """What is known of a rung, beside the one before: reads, speed, what the profiler says."""
    before = BEFORE[name]
    names = [before, name] if before else [name]
    rows = rows_of(name)
    if not rows:
        return "Not yet timed.\n"
    cells = [["lines of code", *(f"{lines_of(of):,}" for of in names)]]
    cells.append(["values read per output, global / shared", *(_formula(of, rows) for of in names)])
    counts = [_counted(of) for of in names]
    if all(counts):
        formulas, counted = zip(*counts, strict=True)
        cells.append(["the same at the small shape of the counts", *formulas])
        cells.append(["counted there, index arrays too", *counted])
    for product in PRODUCTS:
        speeds = [speeds_of(of, rows, product) for of in names]
        if before:
            speeds[1] += f" ({_gains(before, name, rows, product)})"
        cells.append([f"{PASSES[product]}, TFLOP/s, float32 / float16", *speeds])
    text = f"{shape_of(rows[0])}, density {rows[0]['density']:.1g}.\n\n{table(['', *names], cells)}"
    readings = [reading for of in names if (reading := _reading(of, rows)) is not None]
    if not readings:
        return text
    heads = ["the profiler, forward", *(f"{row['rung']}, {row['dtype']}" for row in readings)]
    cells = [["microseconds of this run / as timed", *(_microseconds(rows, r) for r in readings)]]
    cells += [[label, *map(said, readings)] for label, said in READ.items()]
    return f"{text}\n{table(heads, cells)}"


def _formula(name: str, rows: list[Row]) -> str:
    found = reads_at(name, rows[0], "float16")
    return " / ".join(f"{count:,.0f}" for count in found) if found else ""


def _counted(name: str) -> tuple[str, str] | None:
    """Values read per output, by formula and as counted; of rungs that read no memory unseen."""
    row = first(in_section(profiled(), "counted"), rung=name)
    if row is None:
        return None
    size, batch, dtype = row["block_size"], row["batch"], row["dtype"]
    layout = Layout(np.ones((row["in_features"] // size, row["out_features"] // size)))
    nbytes = batch * row["out_features"] * np.dtype(dtype).itemsize
    counts = (row["readings"][f"{memory} read bytes"] / nbytes for memory in ("global", "shared"))
    both = reads(name, layout, size, batch, dtype) or (), counts
    formula, counted = (" / ".join(f"{count:.1f}" for count in each) for each in both)
    return formula, counted


def _gains(before: str, name: str, rows: list[Row], product: str) -> str:
    """How many times as fast, in float32 and in float16."""
    gains = []
    for dtype in DTYPES:
        one, other = (seconds_of(of, rows, product, dtype) for of in (before, name))
        gains.append(ratio(one / other if one and other else None))
    return "x " + " / x ".join(gains)


def _reading(name: str, rows: list[Row]) -> Row | None:
    """What the profiler read of a rung at the shape of the lesson."""
    sections, shape = profiled(), {key: rows[0][key] for key in ("batch", "block_size")}
    read = [row for dtype in DTYPES for row in in_section(sections, dtype, rung=name, **shape)]
    return first(read, in_features=rows[0]["features"])


def _microseconds(timed: list[Row], row: Row) -> str:
    """Of a reading; `timed` are the rows of the benchmark at the same shape."""
    benchmarks = seconds_of(row["rung"], timed, "forward", row["dtype"])
    both = row["readings"]["seconds"], benchmarks or 0
    return " / ".join(f"{1e6 * seconds:,.0f}" for seconds in both)


def _from_l2(row: Row) -> str:
    nbytes = row["batch"] * row["out_features"] * np.dtype(row["dtype"]).itemsize
    return f"{row['readings']['L2 to L1 bytes'] / nbytes:.0f}"


def _moved(row: Row) -> str:
    return " / ".join(f"{nbytes / 1e6:,.0f}" for nbytes in bytes_of(row["readings"]))


def _moving(row: Row) -> str:
    rates, moved = committed.limits(), bytes_of(row["readings"])
    return " / ".join(
        f"{n / rates[of] * 1e6:,.0f}" for n, of in zip(moved, (CACHE, MEMORY), strict=True)
    )


def _instructions(row: Row) -> str:
    weights = row["density"] * row["in_features"] * row["out_features"]
    count = 32 * row["readings"]["instructions"] / (weights * row["batch"])
    return f"{count:.2f}" if count < 1 else f"{count:.1f}" if count < 10 else f"{count:.0f}"


def _share(key: str, row: Row) -> str:
    return f"{row['readings'][key]:.0f} %"


def _waits(row: Row) -> str:
    """The most frequent, as warps that wait while one goes on."""
    own = {what: row["readings"][f"waits for {what}"] for what in WAITS if what != "its turn"}
    longest = sorted(own, key=lambda what: -own[what])[:MOST_WAITS]
    return ", ".join(f"{what} {own[what]:.1f}" for what in longest if own[what] >= 0.05)


READ: dict[str, Callable[[Row], str]] = {
    "values per output that came from L2": _from_l2,
    "MB from L2 / over the bus of memory": _moved,
    "microseconds these take at least": _moving,
    "instructions of a thread per product": _instructions,
    "issue slots in use": partial(_share, "issue"),
    "pipe of integers (ALU)": partial(_share, "alu"),
    "pipe of multiply-adds (FMA)": partial(_share, "fma"),
    "tensor cores": partial(_share, "tensor"),
    "data path of L1 and shared memory": partial(_share, "L1 data"),
    "L2 cache": partial(_share, "L2"),
    "device memory": partial(_share, "memory"),
    "warps on a multiprocessor, of 64": lambda row: f"{row['readings']['warps active'] * 0.64:.0f}",
    "registers of a thread": lambda row: f"{row['readings']['registers']}",
    "for each warp that goes on, how many wait for what": _waits,
}
"""What the profiler read of a rung, line by line."""


def profiled_steps() -> str:
    """The same of the taught steps, a line for each: what was moved, then the rest."""
    rows, labels = in_section(profiled(), "steps"), [of for of in READ if of != "device memory"]
    took = {"microseconds of this run": lambda row: f"{row['readings']['seconds'] * 1e6:,.0f}"}
    parts = took | {of: READ[of] for of in labels[:3]}, {of: READ[of] for of in labels[3:]}
    return "\n".join(
        table(
            ["step", *part], [[row["rung"], *(say(row) for say in part.values())] for row in rows]
        )
        for part in parts
    )


PARTS: dict[str, Callable[[], str]] = {
    **{part.__name__: part for part in (machine, limits, counts, steps, profiled_steps, opened)},
    **{name: partial(figures, name) for name in BEFORE},
}
