"""The rungs: idea, length, reads, and the table of them that `python -m numbsparse ladder` prints.

A formula, with the rung's tiles, gives the values of x and w that are read for each value of
y = x @ w. Index arrays and edges are left out. `counted` in `profile.json` counts the same in the
simulator; the tests hold one against the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import fill
from types import ModuleType
from typing import Any, NamedTuple

from numbsparse import device
from numbsparse.bench.problem import random
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
from numbsparse.kernels import ladder as taught
from numbsparse.kernels.matmul import (
    LADDER,
    PRODUCTS,
    RUNGS,
    k2_shared,
    k3_registers,
    k4_pipelined,
    k5_tensor_core,
)
from numbsparse.kernels.matmul.k6_hopper.plan import TILES, steps_of
from numbsparse.kernels.matmul.k7_small_blocks.strip_plan import WARP_COLUMNS, steps_in_strips
from numbsparse.kernels.parts.tiles import WIDTH
from numbsparse.layout import Layout

STRIP_ROWS, STRIP_WARPS, GROUP = 64, 16, 32  # of k7_small_blocks on compute capability 9.0
BLOCK_SIZES = (4, 8, 16, 32, 64, 128)
DTYPES = ("float16", "bfloat16", "float32", "float64")
PAGE = 100  # characters in a line
INDENT = "    "
COLUMNS = (7, 10, 9, 11, 8, 8, 9)
HEADINGS = """\
                         reads per output   TFLOP/s over kept blocks  times the
rung              lines    global   shared    forward      dx      dw  best before\
"""


def idea_of(module: ModuleType) -> str:
    """The first sentence of its docstring, without the rung's number."""
    return (module.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")


def idea_at(name: str, rows: list[Row]) -> str:
    """Its idea, and what it was measured with where that is not the ladder's shape."""
    idea = idea_of(LADDER[name])
    if name == "k0_cpu":
        return f"{idea} ({shape_of(rows[0])}, float32)"
    usual = shape_of(on_gpu()["ladder"]["rows"][0])
    return f"{idea} ({shape_of(rows[0])})" if rows and shape_of(rows[0]) != usual else idea


def lines_of(module: ModuleType) -> int:
    """Lines that say something, of a rung's file or of its folder's files."""
    path = Path(module.__file__ or "")
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


class Reads(NamedTuple):
    """Values read per output, from each memory, by an average output."""

    from_global: float
    from_shared: float


def reads_at(name: str, row: dict[str, Any], dtype: str) -> Reads | None:
    """Of a rung at the shape of a row of the benchmark's ladder."""
    layout = random(row["features"], row["block_size"], 0.1)  # as the benchmark's
    return reads(name, layout, row["block_size"], row["batch"], dtype)


def reads(name: str, layout: Layout, size: int, batch: int, dtype: str) -> Reads | None:
    """Of the forward product; None where there is no formula (the CPU, float32 of two rungs)."""
    K = layout.n_blocks / layout.shape[1] * size  # products of an average output
    if name in taught.NAMES:
        return _of_step(taught.step(name), layout, size, K)
    if name == "k1_naive":
        return Reads(2 * K, 0)
    if name == "k2_shared":
        return Reads(2 * K / min(size, k2_shared.MOST), 2 * K)
    if name in ("k3_registers", "k4_pipelined"):
        tile: Any = k3_registers.tile_of(size, batch)
        if name == "k4_pipelined":
            tile = k4_pipelined.line_tiles(size, batch, 4 if dtype == "float32" else 2)[0]
        return Reads(K / tile.BM + K / tile.BN, K / tile.TM + K / tile.TN)
    if name == "k5_tensor_core":
        arithmetic = "highest" if dtype == "float32" else dtype
        BM, BN, _, _ = tile = k5_tensor_core.line_tiles(size, batch, arithmetic)[0]
        from_shared = K / (BM // tile.warps) + K / BN
        return Reads(K / min(BM, batch) + K / BN, from_shared * _filled_up(batch, BM))
    if name == "k8_small_batch":
        each = K / batch + K / min(size, WIDTH)
        return Reads(each, each)
    if dtype == "float32":
        return None
    if name == "k6_hopper":
        return _of_hopper(layout, size, batch, K)
    return _of_small_blocks(layout, size, K) if name == "k7_small_blocks" else None


def arriving(name: str, layout: Layout, size: int, batch: int, dtype: str) -> float | None:
    """Values per output that come from the L2 cache: what a cluster asks for once comes to each."""
    found = reads(name, layout, size, batch, dtype)
    if found is None:
        return None
    K, again = layout.n_blocks / layout.shape[1] * size, 0.0
    if name == "k6_hopper":
        rows, cluster = TILES[size].ROWS, TILES[size].CLUSTER
        again = K / min(rows, batch) - K / min(rows * cluster, batch)
    elif name in taught.NAMES and hasattr(module := taught.step(name), "CLUSTER"):
        again = K / module.BM - K / (module.BM * module.CLUSTER)
    return found.from_global + again


def _of_step(step: Any, layout: Layout, size: int, K: float) -> Reads:
    """By the tiles that a step names: BM x BN, of a warp WM rows, of a thread TM x TN."""
    if hasattr(step, "plan"):
        _, _, inputs, *_ = step.plan(layout.index, step.BN // size)
        w = K / (step.BM * getattr(step, "CLUSTER", 1))
        return Reads(len(inputs) / layout.shape[1] + w, K / size + K / step.WM)
    BN = getattr(step, "BN", size)
    tiles = K / BN + K / step.BM
    if hasattr(step, "WM"):
        return Reads(tiles, K / BN + K / step.WM)
    if hasattr(step, "BK"):
        return Reads(tiles, K / getattr(step, "TN", 1) + K / getattr(step, "TM", 1))
    return Reads(2 * K, 0)


def _of_hopper(layout: Layout, size: int, batch: int, K: float) -> Reads:
    """x once for all columns of a group that meet it, w once for the rows of a cluster."""
    tile = TILES[size]
    records, _, _ = steps_of(layout.index, False, tile, False)
    tiles_of_x = int((records[:, tile.SHARES] & 255).sum())
    x = tiles_of_x * tile.DEPTH / (layout.shape[1] * size)
    from_shared = (K / size + K / 64) * _filled_up(batch, 64)
    return Reads(x + K / min(tile.ROWS * tile.CLUSTER, batch), from_shared)


def _filled_up(batch: int, rows: int) -> float:
    """How many rows are computed for each one of the batch, in tiles of so many."""
    return -(-batch // rows) * rows / batch


def _of_small_blocks(layout: Layout, size: int, K: float) -> Reads:
    """x once for all columns of a strip, in groups of features; w once for its rows."""
    width = STRIP_WARPS * WARP_COLUMNS
    kept, _, _ = steps_in_strips(layout.index, size, False, width, GROUP, 16 // size)
    groups = layout.n_blocks / (kept * (width // size) * (GROUP // size))  # of all strips
    x = groups * GROUP / (layout.shape[1] * size)
    return Reads(x + K / STRIP_ROWS, K / size + K / STRIP_ROWS)


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
        lines = _numbers(name, rows, own), _indented(idea_at(name, rows)), _indented(here)
        parts.append("\n".join(lines))
    notes = [
        fill(f"[{i}] {reason}", PAGE, subsequent_indent=INDENT)
        for i, reason in enumerate(reasons, 1)
    ]
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else []), _foot()])


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
        PAGE,
    )


def _foot() -> str:
    results = on_gpu()["ladder"]
    card, versions = (part.strip() for part in results["machine"].split(";", 1))
    cpu = on_cpu()["machine"].partition(";")[0]
    first = shape_of(results["rows"][0])
    return fill(
        f"Measured on an {card} ({versions}), {first} unless said, by `{results['command']}`; "
        f"k0_cpu on an {cpu}. Here: {_machine()}. The lessons are in numbsparse/kernels/README.md.",
        PAGE,
    )


def _machine() -> str:
    if device.SIMULATED:
        return "the simulator of a GPU"
    if device.why_unavailable() is None:
        return device.describe()
    return "no GPU"


def _indented(text: str) -> str:
    return fill(text, PAGE, initial_indent=INDENT, subsequent_indent=INDENT)
