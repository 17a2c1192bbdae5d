"""The benchmark's JSON, and what the committed files say of the rungs.

Each section stands with the machine and the command that it was made with. Sections may be run one
at a time: what a file holds of the others is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numbsparse import files
from numbsparse.kernels.matmul import RUNGS

RESULTS = Path(__file__).parent / "results"
CPU_SHAPE = {"features": 4096, "batch": 512, "density": 0.1, "block_size": 32, "dtype": "float32"}

Row = dict[str, Any]
Results = dict[str, dict[str, Any]]


def load(path: Path) -> Results:
    """Sections by name: {"machine", "command", "took": seconds, "rows"}.

    ValueError where the file holds something else, as the CPU's results.
    """
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))["sections"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no results of the GPU's benchmark: {error!r}") from error


def save(path: Path, sections: Results) -> None:
    """Put sections into a file, in the place of those of the same names; written whole."""
    merged = load(path) | sections
    text = ",\n".join(f"{json.dumps(name)}: {_section(merged[name])}" for name in sorted(merged))
    files.write_bytes(path, f'{{"sections": {{\n{text}\n}}}}\n'.encode())


def _section(section: dict[str, Any]) -> str:
    """A line for each row, so that a change of one is a change of one line."""
    about = {key: value for key, value in section.items() if key != "rows"}
    head = "".join(f"\n {json.dumps(key)}: {json.dumps(value)}," for key, value in about.items())
    rows = ",\n".join("  " + json.dumps(_rounded(row)) for row in section["rows"])
    return f'{{{head}\n "rows": [\n{rows}\n ]}}'


def _rounded(value: Any) -> Any:
    """Numbers to the five digits that a measurement has at most; sizes as they are."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def on_gpu() -> Results:
    """The committed results of the GPU's benchmark, by section."""
    return load(RESULTS / "cuda.json")


def on_cpu() -> dict[str, Any]:
    """The committed results of the CPU's benchmark."""
    return json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))


def profiled() -> Results:
    """The committed readings of the profiler and of the counting simulator, by section."""
    return load(RESULTS / "profile.json")


def in_section(results: Results, name: str, **wanted: Any) -> list[Row]:
    """The rows of a section that say this; none, where it was not measured."""
    return where(results[name]["rows"], **wanted) if name in results else []


def where(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """The rows that say this."""
    return [row for row in rows if wanted.items() <= row.items()]


def first(rows: Iterable[Row], **wanted: Any) -> Row | None:
    """The first of them."""
    return next(iter(where(rows, **wanted)), None)


def rows_of(name: str) -> list[Row]:
    """The ladder's rows at the first shape that a rung was measured at."""
    if name == "k0_cpu":
        return where(on_cpu()["rows"], **CPU_SHAPE)
    rows: list[Row] = on_gpu()["ladder"]["rows"]
    shapes = [shape_of(row) for row in rows if name in row["seconds"]]
    return [row for row in rows if shape_of(row) in shapes[:1]]


def seconds_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """What a rung took for a product, if it was measured."""
    row = first(rows, product=product, dtype=dtype)
    return None if row is None else row["seconds"].get(name)


def rate_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """Its operations a second over kept blocks, if it was measured."""
    row = first(rows, product=product, dtype=dtype)
    return row["flops"] / row["seconds"][name] if row and name in row["seconds"] else None


def gain_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """How many times as fast as the best of the rungs before it on the GPU, at the same shape."""
    names = list(RUNGS)
    before = (seconds_of(other, rows, product, dtype) for other in names[: names.index(name)])
    others, own = [seconds for seconds in before if seconds], seconds_of(name, rows, product, dtype)
    return min(others) / own if own and others else None


def shape_of(row: Row) -> str:
    features = f"{row['features']} x {row['features']}"
    return f"{features}, B = {row['block_size']}, batch {row['batch']}"


def card_of(section: Row) -> str:
    """The machine, without the versions."""
    return section["machine"].partition(";")[0]
