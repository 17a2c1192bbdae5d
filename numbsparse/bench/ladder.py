"""The table of rungs that `python -m numbsparse ladder` prints."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill
from typing import NamedTuple

from numbsparse import device
from numbsparse.bench.results import (
    Row,
    gain_of,
    on_cpu,
    on_gpu,
    rate_of,
    rows_of,
    shape_of,
    teraflops,
)
from numbsparse.bench.rungs import idea_of, lines_of, reads_at
from numbsparse.kernels.matmul import LADDER, PRODUCTS, RUNGS

BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")
WIDTH = 100
INDENT = "    "
COLUMNS = (7, 10, 9, 11, 8, 8, 9)
HEADINGS = """\
                         reads per output   TFLOP/s over kept blocks  times the
rung              lines    global   shared    forward      dx      dw  best before\
"""


class Reach(NamedTuple):
    """What a rung computes on this machine, and why not more."""

    takes: str  # block sizes and dtypes: here, or where it runs
    why_not: str  # empty: all that it takes anywhere it takes here


def table(dtype: str = "float16") -> str:
    """A few lines for each rung, up to 100 columns wide.

    Parameters
    ----------
    dtype : "float16" or "float32", of the speeds and the reads
    """
    parts, reasons = [_head(dtype), HEADINGS], list[str]()
    for name in LADDER:
        rows, own = rows_of(name), "float32" if name == "k0_cpu" else dtype
        here, why_not = reach_of(name)
        if why_not:
            reasons += [why_not] if why_not not in reasons else []
            here += f"; not {'more' if here.startswith('here') else 'here'}: "
            here += f"[{reasons.index(why_not) + 1}]"
        lines = _numbers(name, rows, own), _indented(_idea(name, rows)), _indented(here)
        parts.append("\n".join(lines))
    notes = [
        fill(f"[{i}] {reason}", WIDTH, subsequent_indent=INDENT)
        for i, reason in enumerate(reasons, 1)
    ]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), _foot()])


def _idea(name: str, rows: list[Row]) -> str:
    """What a rung does, and what it was measured with where that is not the ladder's shape."""
    idea = idea_of(LADDER[name])
    if name == "k0_cpu":
        return f"{idea} ({shape_of(rows[0])}, float32)"
    usual = shape_of(on_gpu()["ladder"]["rows"][0])
    return f"{idea} ({shape_of(rows[0])})" if rows and shape_of(rows[0]) != usual else idea


def _numbers(name: str, rows: list[Row], dtype: str) -> str:
    counts = reads_at(name, rows[0], dtype) if rows and RUNGS[name] == "cuda" else None
    cells = [f"{lines_of(LADDER[name]):,}"]
    cells += [f"{count:,.0f}" for count in counts] if counts else ["-", "-"]
    cells += [teraflops(rate_of(name, rows, product, dtype)) for product in PRODUCTS]
    gain = gain_of(name, rows, "forward", dtype)
    cells.append(f"{gain:.1f}" if gain else "-")
    return f"{name:16}" + "".join(map(str.rjust, cells, COLUMNS))


def reach_of(name: str) -> Reach:
    """What `unsupported` of a rung answers here, for a forward product of one row."""
    module, place = LADDER[name], RUNGS[name]
    sizes = getattr(module, "BLOCK_SIZES", BLOCK_SIZES)
    dtypes = getattr(module, "DTYPES", DTYPES)
    if place == "cuda" and (reason := device.why_unavailable()) is not None:
        return Reach(f"takes {_takes(sizes, dtypes)}", reason)
    refused = {
        (size, dtype): module.unsupported("forward", size, dtype, place)
        for size in sizes
        for dtype in dtypes
    }
    served = [case for case, reason in refused.items() if reason is None]
    reasons = "; ".join(dict.fromkeys(filter(None, refused.values())))
    if not served:
        return Reach(f"takes {_takes(sizes, dtypes)}", reasons)
    own_sizes, own_dtypes = (dict.fromkeys(part) for part in zip(*served, strict=True))
    return Reach(f"here: {_takes(own_sizes, own_dtypes)}", reasons)


def _takes(sizes: Iterable[int], dtypes: Iterable[str]) -> str:
    return f"B = {', '.join(map(str, sizes))} in {', '.join(dtypes)}"


def _head(dtype: str) -> str:
    return fill(
        f"The ladder: y = x @ w (forward), dx = dy @ w.T and dw = x.T @ dy, in {dtype}. Reads are "
        "values of x and w for each value of y, by the formula at the head of each rung; speeds "
        "were measured at density 0.1. The last column is of the forward product.",
        WIDTH,
    )


def _foot() -> str:
    results = on_gpu()["ladder"]
    card, versions = (part.strip() for part in results["machine"].split(";", 1))
    cpu = on_cpu()["machine"].partition(";")[0]
    first = shape_of(results["rows"][0])
    return fill(
        f"Measured on an {card} ({versions}), {first} unless said, by `{results['command']}`; "
        f"k0_cpu on an {cpu}. Here: {_machine()}. The lessons are in numbsparse/kernels/README.md.",
        WIDTH,
    )


def _machine() -> str:
    if device.SIMULATED:
        return "the simulator of a GPU"
    if device.why_unavailable() is None:
        return device.describe()
    return "no GPU"


def _indented(text: str) -> str:
    return fill(text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
