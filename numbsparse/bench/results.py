"""The benchmark's rows: files of JSON that keep them, lines of text, and tables of Markdown.

Each section of a file stands with the machine and the command that it was made with. Sections
may be run one at a time: what a file holds of the others is kept.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numbsparse import files
from numbsparse.bench.contestants import CUBLAS, CUDNN, FEATURE_MAJOR, NUMPY

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]
SAME: tuple[str, ...] = ("product", "dtype", "precision", "features", "batch")
IMAGES = ("side", "taps_along")
PASSES = {"forward": "forward", "input_grad": "input-gradient", "weight_grad": "weight-gradient"}
CELLS = (
    "A line: features x batch, B, density; of each contestant time and TFLOP/s over kept blocks; "
    "in brackets, times as fast as the dense product, or, where none was timed, as the first one"
)


def load(path: Path) -> Results:
    """Sections by name: {"machine", "command", "took": seconds, "rows"}.

    ValueError where the file holds something else.
    """
    if not path.exists():
        return {}
    with files.known_as("file of the benchmark's results", path):
        return dict(json.loads(path.read_text(encoding="utf-8"))["sections"])


def save(path: Path, sections: Results) -> None:
    """Put sections into a file, in the place of those of the same names."""
    merged = load(path) | sections
    files.write_json(path, {"sections": {name: merged[name] for name in sorted(merged)}}, 4)


def card_of(machine: str) -> str:
    """The GPU or CPU of a machine's description, without the versions of what runs there."""
    return machine.partition(";")[0]


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that say this."""
    return [row for row in rows if wanted.items() <= row.items()]


def first(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The first of them."""
    return next(iter(where(rows, **wanted)), None)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def line(row: Row, rows: list[Row]) -> str:
    """One row of a section; `rows` are those before it, which it may be compared with."""
    if "limit" in row:
        return f"  {row['limit']:40} {row['rate'] / 1e12:8.2f} T{row['unit']}"
    cells = [f"{name} {_time(s)}{_beside(row, rows, name)}" for name, s in row["seconds"].items()]
    cells += [f"{name} {why}" for name, why in row.get("not_timed", {}).items()]
    if "workspace" in row:
        cells.append(f"memory {row['workspace'] / row['input_bytes']:.1%} of the input")
    return f"  {_label(row)} {'; '.join(cells)}"


def _label(row: Row) -> str:
    """What was measured."""
    if "host" in row:
        return row["host"] + (f", {row['cache']} cache:" if "cache" in row else ":")
    what = f"{row['dtype']} {row['precision']}" if row["dtype"] == "float32" else row["dtype"]
    if "hidden" in row:
        shape = f"{row['hidden']:5} hidden, {row['batch']} x {row['steps']} steps"
        return f"{what:15} {shape} {row['density']:.2g}:"
    shape = f"B {row['block_size']:<3} {row['density']:<6.2g}"
    if "side" in row:
        shape = f"{row['taps_along']} x {row['taps_along']} {shape}"
    else:
        shape = f"{row['features']:5} x {row['batch']:<4} {shape}"
    label = row.get("layout", "")
    return f"{what:15} {shape} {label}{label and ' '}{row['product']:11}"


def speed_up(row: Row, name: str, rows: list[Row]) -> float | None:
    """How many times as fast as the dense product of that shape: NumPy's, cuBLAS's, cuDNN's."""
    dense, same = (CUDNN, (*SAME, *IMAGES)) if "side" in row else (CUBLAS, SAME)
    if NUMPY in row["seconds"]:  # beside us in every row
        dense, rows = NUMPY, [row]
    timed = [other for other in rows if dense in other["seconds"]]
    other = first(timed, **{key: row[key] for key in same}) if timed else None
    return other["seconds"][dense] / row["seconds"][name] if other else None


def beside_batch_major(row: Row, name: str) -> float | None:
    """Time of a rung feature-major, against its time batch-major."""
    rung, seconds = name.removesuffix(f" {FEATURE_MAJOR}"), row["seconds"]
    if rung == name or not {name, rung} <= seconds.keys():
        return None
    return seconds[name] / seconds[rung]


def _beside(row: Row, rows: list[Row], name: str) -> str:
    """What CELLS says of a contestant behind its time; of an LSTM its memory, not its speed."""
    if "host" in row:
        return ""
    seconds, (one, *_) = row["seconds"], row["seconds"]
    text = f" {row['flops'] / seconds[name] / 1e12:.3g}" if "flops" in row else ""
    if "hidden" in row:
        text = f" {row['bytes'][name] / 2**30:.2f} GiB"
    times = speed_up(row, name, rows)
    if times is None and name != one:
        times = seconds[one] / seconds[name]
    return text if times is None else f"{text} ({times:.2f}x)"


def _time(seconds: float) -> str:
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.2f} s"
