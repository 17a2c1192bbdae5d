"""The rows as text."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from numbsparse.bench.gpu.contestants import FEATURE_MAJOR
from numbsparse.bench.gpu.peers import CUBLAS, CUDNN

Row = dict[str, Any]

HEADINGS = {
    "limits": "the card's own limits",
    "headline": "the launch post's figure; in brackets, times as fast as cuBLAS, dense",
    "float16": "every block size; in brackets, times as fast as cuBLAS, dense",
    "float32": "every block size; in brackets, times as fast as cuBLAS, dense",
    "ladder": "in brackets, how many times as fast as the rung before",
    "steps": "the taught ladder; in brackets, how many times as fast as the one before",
    "layouts": "in brackets, the time a block against as many random blocks",
    "sweep": "in brackets, the time a block and row of the batch against the unchanged case",
    "feature_major": "activations as `w @ x` has them; in brackets, the time against batch-major",
    "lstm": "forward and backward over a sequence; in brackets, how many times ours",
    "conv": "beside cuDNN, dense and channels last; in brackets, times as fast",
    "host": "what the host's side costs",
}
SAME: tuple[str, ...] = ("product", "dtype", "precision", "features", "batch")
CELLS = "A line: features x batch, B, density; of each contestant time and TFLOP/s over kept blocks"


def line(section: str, row: Row, rows: list[Row]) -> str:
    """One row of a section; `rows` are those before it, which it may be compared with."""
    if section == "limits":
        return f"  {row['limit']:40} {row['rate'] / 1e12:8.2f} T{row['unit']}"
    if section == "host":
        cells = [f"{name} {_time(seconds)}" for name, seconds in row["seconds"].items()]
        cache = f", {row['cache']} cache" if "cache" in row else ""
        return f"  {row['host']}{cache}: " + ", ".join(cells)
    what = f"{row['dtype']} {row['precision']}" if row["dtype"] == "float32" else row["dtype"]
    if section == "lstm":
        return f"  {what:15} {_lstm(row)}"
    if section == "conv":
        return f"  {what:15} {_conv(row, rows)}"
    label = row.get("layout", row.get("changed", ""))
    size = (
        f"{row['features']:5} x {row['batch']:<4} B {row['block_size']:<3} {row['density']:<6.2g}"
    )
    cells = [_cell(name, row, rows) for name in (*row["seconds"], *row["not_timed"])]
    if section in ("ladder", "steps"):
        cells = [cell + gain for cell, gain in zip(cells, _gains(row), strict=True)]
    return f"  {what:15} {size} {label}{label and ' '}{row['product']:11} " + "; ".join(cells)


def speed_up(row: Row, name: str, rows: list[Row]) -> float | None:
    """How many times as fast as cuBLAS's dense product of the same features, batch and dtype."""
    for other in rows:
        if CUBLAS in other["seconds"] and all(other[key] == row[key] for key in SAME):
            return other["seconds"][CUBLAS] / row["seconds"][name]
    return None


def per_block(row: Row) -> float | None:
    """Seconds of our rung for a block and a row of the batch."""
    seconds = row["seconds"].get(row["auto"])
    return seconds and seconds / row["flops"]


def relative(row: Row, rows: list[Row]) -> float | None:
    """Time a block, against the random layout of the section or the unchanged case."""
    if "layout" not in row and "changed" not in row:
        return None
    same, wanted = SAME, {"layout": f"random for {row.get('layout')}"}
    if "changed" in row:
        same, wanted = SAME[:3], {"changed": ""}
    for other in rows:
        if wanted.items() <= other.items() and all(other[key] == row[key] for key in same):
            one, base = per_block(row), per_block(other)
            return one / base if one and base else None
    return None


def beside_batch_major(row: Row, name: str) -> float | None:
    """Time of a rung feature-major, against its time batch-major."""
    rung, seconds = name.removesuffix(f" {FEATURE_MAJOR}"), row["seconds"]
    if rung == name or not {name, rung} <= seconds.keys():
        return None
    return seconds[name] / seconds[rung]


def _cell(name: str, row: Row, rows: list[Row]) -> str:
    if name in row["not_timed"]:
        return f"{name} {row['not_timed'][name]}"
    seconds = row["seconds"][name]
    cell = f"{name} {_time(seconds)} {row['flops'] / seconds / 1e12:.1f}"
    if (times := speed_up(row, name, rows)) is not None:
        cell += f" ({times:.2g}x)" if times < 10 else f" ({times:.0f}x)"
    ratio = relative(row, rows) if name == row["auto"] else beside_batch_major(row, name)
    if ratio is not None:
        cell += f" ({ratio:.2f})"
    return cell


def _lstm(row: Row) -> str:
    """Time and memory of each contestant, and what one recurrent step of ours takes."""
    cells = []
    ours = row["seconds"].get("numbsparse"), row["bytes"].get("numbsparse")
    for name, seconds in row["seconds"].items():
        cell = f"{name} {_time(seconds)} {row['bytes'][name] / 2**30:.2f} GiB"
        if name != "numbsparse" and None not in ours:
            cell += f" ({seconds / ours[0]:.1f}x, {row['bytes'][name] / ours[1]:.1f}x)"
        cells.append(cell)
    cells += [f"{name} {why}" for name, why in row["not_timed"].items()]
    cells += [f"{name} {_time(seconds)}" for name, seconds in row["step"].items()]
    shape = f"{row['hidden']:5} hidden, {row['batch']} x {row['steps']} steps {row['density']:.2g}"
    return f"{shape}: " + "; ".join(cells)


def _conv(row: Row, rows: list[Row]) -> str:
    """Time of each, how much faster it is than cuDNN, and the memory that ours takes beside."""
    cells = []
    for name, seconds in row["seconds"].items():
        cell = f"{name} {_time(seconds)} {row['flops'] / seconds / 1e12:.0f}"
        if (dense := beside_cudnn(row, rows)) is not None:
            cell += f" ({dense / seconds:.2g}x)"
        cells.append(cell)
    cells += [f"{name} {why}" for name, why in row["not_timed"].items()]
    if "workspace" in row:
        cells.append(f"memory {row['workspace'] / row['input_bytes']:.1%} of the input")
    k, size = row["taps_along"], f"B {row['block_size']:<3}"
    return f"{k} x {k} {size} {row['density']:<6.2g} {row['product']:11} " + "; ".join(cells)


def beside_cudnn(row: Row, rows: list[Row]) -> float | None:
    """Seconds of cuDNN's dense convolution of the same images and taps."""
    same = ("product", "dtype", "precision", "batch", "side", "features", "taps_along")
    for other in rows:
        if CUDNN in other["seconds"] and all(other[key] == row[key] for key in same):
            return None if other is row else other["seconds"][CUDNN]
    return None


def _gains(row: Row) -> list[str]:
    """How many times as fast as the rung before each is."""
    times = list(row["seconds"].values())
    gains = [f" ({one / other:.2g}x)" for one, other in pairwise(times)]
    return ["", *gains][: len(times)] + [""] * len(row["not_timed"])


def _time(seconds: float) -> str:
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.2f} s"
