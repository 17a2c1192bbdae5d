"""The results that are committed, what they say of a rung, and how pages say it."""

from pathlib import Path
from typing import Any

from numbsparse import bench
from numbsparse.bench.results import Results, Row, first, load, where
from numbsparse.kernels.matmul import RUNGS

RESULTS = Path(bench.__file__).parent / "results"
MEMORY, CACHE = "device memory, read", "L2 cache, read (17 MB)"
PIPES = {  # the limit of the arithmetic of each dtype, by instruction
    "fma": "float32 multiply-add",
    "mma": "mma.sync {}, operands in registers",
    "wgmma": "wgmma {}, operands in shared memory",
}
CPU_SHAPE = {"features": 4096, "batch": 512, "density": 0.1, "block_size": 32, "dtype": "float32"}


def on_gpu() -> Results:
    """The committed results of the GPU's benchmark, by section."""
    return load(RESULTS / "cuda.json")


def on_changing() -> Results:
    """The committed results of the GPU's benchmark on layouts that change, by section."""
    return load(RESULTS / "changing.json")


def on_cpu() -> dict[str, Any]:
    """The committed section of the CPU's benchmark."""
    return load(RESULTS / "cpu.json")["cpu"]


def profiled() -> Results:
    """The committed readings of the profiler and of the counting simulator, by section."""
    return load(RESULTS / "profile.json")


def in_section(results: Results, name: str, **wanted: Any) -> list[Row]:
    """The rows of a section that say this; none, where it was not measured."""
    return where(results[name]["rows"], **wanted) if name in results else []


def limits() -> dict[str, float]:
    """What the card can do at most, in bytes or operations a second, by name."""
    return {limit["limit"]: limit["rate"] for limit in in_section(on_gpu(), "limits")}


def shape_of(row: Row) -> str:
    features = f"{row['features']} x {row['features']}"
    return f"{features}, B = {row['block_size']}, batch {row['batch']}"


def rows_of(name: str) -> list[Row]:
    """The ladder's rows of the first shape where `auto` takes a rung, or where it is."""
    if name == "k0_cpu":
        return where(on_cpu()["rows"], **CPU_SHAPE)
    rows: list[Row] = on_gpu()["ladder"]["rows"]
    measured = [row for row in rows if name in row["seconds"]]
    shapes = [shape_of(row) for row in where(measured, auto=name) or measured]
    return [row for row in rows if shape_of(row) in shapes[:1]]


def seconds_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """What a rung took for a product, if it was measured."""
    row = first(rows, product=product, dtype=dtype)
    return None if row is None else row["seconds"].get(name)


def rate_of(name: str, rows: list[Row], product: str, dtype: str) -> float | None:
    """Its operations a second over kept blocks, if it was measured."""
    row = first(rows, product=product, dtype=dtype)
    return row["flops"] / row["seconds"][name] if row and name in row["seconds"] else None


def gain_of(name: str, rows: list[Row], dtype: str) -> float | None:
    """How many times as fast forward as the best rung before it on the GPU, at the same shape."""
    names = list(RUNGS)
    before = (seconds_of(other, rows, "forward", dtype) for other in names[: names.index(name)])
    own, others = seconds_of(name, rows, "forward", dtype), [each for each in before if each]
    return min(others) / own if own and others else None


def teraflops(rate: float | None) -> str:
    """Three digits at most, and no more than two behind the point."""
    if rate is None:
        return "-"
    rate /= 1e12
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def ratio(number: float | None) -> str:
    """How many times, to a tenth."""
    return f"{number:.1f}" if number else "-"


def speeds_of(name: str, rows: list[Row], product: str) -> str:
    """TFLOP/s in float32 / float16."""
    rates = [rate_of(name, rows, product, dtype) for dtype in ("float32", "float16")]
    return " / ".join(map(teraflops, rates))
