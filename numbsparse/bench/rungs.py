"""What is known of a rung: its idea, its length, what was measured of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from numbsparse.bench.gpu.results import Results, load
from numbsparse.kernels.matmul import RUNGS

RESULTS = Path(__file__).parent / "results"
CPU_SHAPE = {"features": 4096, "batch": 512, "density": 0.1, "block_size": 32, "dtype": "float32"}

Row = dict[str, Any]


def idea_of(module: ModuleType) -> str:
    """The first sentence of its docstring, without the rung's number."""
    return (module.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")


def lines_of(module: ModuleType) -> int:
    """Lines that say something, of a rung's file or of its folder's files."""
    path = Path(module.__file__ or "")
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def on_gpu() -> Results:
    """The committed results of the GPU's benchmark, by section."""
    return load(RESULTS / "cuda.json")


def on_cpu() -> dict[str, Any]:
    """The committed results of the CPU's benchmark."""
    return json.loads((RESULTS / "cpu.json").read_text(encoding="utf-8"))


def profiled() -> Results:
    """The committed readings of the profiler and of the counting simulator, by section."""
    return load(RESULTS / "profile.json")


def rows_of(name: str) -> list[Row]:
    """The ladder's rows at the first shape that a rung was measured at."""
    if name == "k0_cpu":
        return [row for row in on_cpu()["rows"] if CPU_SHAPE.items() <= row.items()]
    rows: list[Row] = on_gpu()["ladder"]["rows"]
    for row in rows:
        if name in row["seconds"]:
            return [other for other in rows if shape_of(other) == shape_of(row)]
    return []


def seconds_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """What a rung took for a product, if it was measured."""
    row = _row(rows, product, dtype)
    return None if row is None else row["seconds"].get(name)


def rate_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """Its operations a second over kept blocks, if it was measured."""
    row, seconds = _row(rows, product, dtype), seconds_of(name, rows, product, dtype)
    return row["flops"] / seconds if row is not None and seconds else None


def gain_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """How many times as fast as the best of the rungs before it on the GPU, at the same shape."""
    names = list(RUNGS)
    before = (seconds_of(other, rows, product, dtype) for other in names[: names.index(name)])
    others, own = [seconds for seconds in before if seconds], seconds_of(name, rows, product, dtype)
    return min(others) / own if own and others else None


def shape_of(row: Row) -> str:
    features = f"{row['features']} x {row['features']}"
    return f"{features}, B = {row['block_size']}, batch {row['batch']}"


def teraflops(rate: float | None) -> str:
    """Three digits at most, and no more than two behind the point."""
    if rate is None:
        return "-"
    rate /= 1e12
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def _row(rows: list[Row], product: str, dtype: str) -> Row | None:
    wanted = {"product": product, "dtype": dtype}
    return next((row for row in rows if wanted.items() <= row.items()), None)
