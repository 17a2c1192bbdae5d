"""README's tables and figure, made from the results in `numbsparse/bench/results/`.

`python -m numbsparse bench --place cuda --json numbsparse/bench/results/cuda.json` makes results,
`python -m numbsparse tables README.md` writes the tables between a file's markers, and draws the
picture that it shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from numbsparse.bench.figure import draw_speed_up
from numbsparse.bench.gpu.peers import CUBLAS, TRITON
from numbsparse.bench.gpu.results import load
from numbsparse.bench.gpu.show import speed_up
from numbsparse.kernels.matmul import LADDER, PRODUCTS

RESULTS = Path(__file__).parent / "results"
CPU_SHAPE = {"features": 4096, "batch": 512, "density": 0.1, "block_size": 32, "dtype": "float32"}
PASSES = {"forward": "forward", "input_grad": "input-gradient", "weight_grad": "weight-gradient"}

Row = dict[str, Any]


def fill(path: Path) -> None:
    """Rewrite what stands between `<!-- ladder -->` and `<!-- /ladder -->`, and the like.

    Draws `speed_up.png` where the file shows it; raises RuntimeError where matplotlib is missing.
    """
    text = path.read_text(encoding="utf-8")
    for name, table in (("ladder", ladder()), ("gpu", gpu()), ("cpu", cpu())):
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        found = marked.search(text)
        if found is None:
            raise ValueError(f"{path} has no markers <!-- {name} --> and <!-- /{name} -->")
        before, after = text[: found.start()], text[found.end() :]
        text = f"{before}{found[1]}{table}{found[2]}{after}"
    if (shown := re.search(r'src="([^"]*speed_up\.png)"', text)) is not None:
        picture = path.parent / shown[1]
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_speed_up(load(RESULTS / "cuda.json")["headline"], picture)
    path.write_text(text, encoding="utf-8")


def ladder() -> str:
    """A line per rung: its idea, its speed in float32 and float16, its length."""
    on_cpu, results = _load("cpu"), load(RESULTS / "cuda.json")
    on_gpu = results["ladder"]["rows"]
    first = _shape(on_gpu[0])
    table = []
    for name, module in LADDER.items():
        idea = (module.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")
        rows = _on_cpu(on_cpu["rows"]) if name == "k0_cpu" else _home(name, on_gpu)
        if name != "k0_cpu" and rows and (shape := _shape(rows[0])) != first:
            idea += f" ({shape})"
        speeds = [_speeds(rows, product, name) for product in PRODUCTS]
        path = Path(module.__file__ or "")
        table.append([_link(name, path), idea, *speeds, str(_lines(path))])
    dense = [row | {"flops": on_gpu[0]["flops"]} for row in _dense(results)]
    cells = [_speeds(dense, product, CUBLAS) for product in PRODUCTS]
    if any(cells):
        table.append(["cuBLAS", "dense; its work on dropped blocks is not counted", *cells, ""])
    header = ["rung", "idea", *(PASSES[product] for product in PRODUCTS), "lines"]
    return (
        "TFLOP/s over kept blocks, float32 (as accurate as a float32 product) / float16; density "
        f"0.1, {first} unless said, {results['ladder']['machine']}. k0_cpu: 4096 x 4096, B = 32, "
        f"batch 512, {on_cpu['machine']}.\n\n{_markdown(header, table)}\n"
    )


def gpu() -> str:
    """A line per dtype and block size at density 0.1: our speed, and over the peers'."""
    results = load(RESULTS / "cuda.json")
    measured = {dtype: results[dtype] for dtype in ("float16", "float32") if dtype in results}
    if not measured:
        return ""
    table = []
    for dtype, section in measured.items():
        rows = [row for row in section["rows"] if _is_of_figure(row)]
        kept = [row for row in rows if f"{row['density']:.1g}" == "0.1"]
        for size in sorted({row["block_size"] for row in kept}):
            cells = {row["product"]: row for row in kept if row["block_size"] == size}
            table.append(
                [dtype, str(size), *(_against_peers(cells[product], rows) for product in PRODUCTS)]
            )
    header = ["dtype", "B", *(PASSES[product] for product in PRODUCTS)]
    section = next(iter(measured.values()))
    first = section["rows"][0]
    shape = f"{first['features']} x {first['features']}, batch {first['batch']}"
    command = f"python -m numbsparse bench --place cuda --only {','.join(measured)}"
    return (
        f"TFLOP/s over kept blocks; {shape}, density 0.1, random blocks. In brackets, "
        "times as fast as cuBLAS's dense product and as torch's BSR kernels (Triton). "
        f"{section['machine']}; `{command}`.\n\n{_markdown(header, table)}\n"
    )


def cpu() -> str:
    """A line per shape and product on the CPU: our time, and the peers' as multiples of it."""
    results = _load("cpu")
    peers = ["NumPy dense", "NumPy by block", "SciPy BSR", "torch BSR"]
    rows = []
    for row in results["rows"]:
        own = row["seconds"]["k0_cpu"]
        times = [
            f"{row['seconds'][peer] / own:.1f}" if peer in row["seconds"] else "" for peer in peers
        ]
        shape = f"{row['features']}, {row['batch']}"
        size, density = str(row["block_size"]), f"{row['density']:g}"
        rows.append([shape, density, size, PASSES[row["product"]], f"{own * 1e3:.2f}", *times])
    header = ["hidden, batch", "density", "B", "pass", "ms", *(f"{peer}, times" for peer in peers)]
    return (
        f"Milliseconds, and how many times as long each peer takes; {results['machine']}.\n\n"
        f"{_markdown(header, rows)}\n"
    )


def _load(place: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{place}.json").read_text(encoding="utf-8"))


def _on_cpu(rows: list[Row]) -> list[Row]:
    """The rows of the ladder's shape on the CPU."""
    return [row for row in rows if CPU_SHAPE.items() <= row.items()]


def _home(name: str, rows: list[Row]) -> list[Row]:
    """The rows of the first shape that a rung was measured at."""
    for row in rows:
        if name in row["seconds"]:
            return [other for other in rows if _shape(other) == _shape(row)]
    return []


def _dense(results: dict[str, Any]) -> list[Row]:
    """cuBLAS's rows, as accurate as the ladder's."""
    sections = [results[dtype]["rows"] for dtype in ("float16", "float32") if dtype in results]
    rows = [row for section in sections for row in section]
    return [row for row in rows if CUBLAS in row["seconds"] and _is_of_figure(row)]


def _is_of_figure(row: Row) -> bool:
    """README shows float16, and float32 at full accuracy."""
    return row["dtype"] != "bfloat16" and row["precision"] == "highest"


def _speeds(rows: list[Row], product: str, name: str) -> str:
    """float32 / float16, those that were measured."""
    speeds = []
    for dtype in ("float32", "float16"):
        wanted = {"product": product, "dtype": dtype}
        of = [row for row in rows if wanted.items() <= row.items() and name in row["seconds"]]
        speeds.append(_teraflops(of[0]["flops"] / of[0]["seconds"][name]) if of else "-")
    return "" if speeds == ["-", "-"] else " / ".join(speeds)


def _against_peers(row: Row, rows: list[Row]) -> str:
    """Speed (times cuBLAS, times Triton)."""
    name = row["auto"]
    if name not in row["seconds"]:
        return row["not_timed"].get(name, "")
    seconds = row["seconds"][name]
    dense = speed_up(row, name, rows)
    times = [f"{dense:.1f}" if dense else "-"]
    times.append(f"{row['seconds'][TRITON] / seconds:.1f}" if TRITON in row["seconds"] else "-")
    return f"{_teraflops(row['flops'] / seconds)} ({', '.join(times)})"


def _teraflops(rate: float) -> str:
    """Three digits at most, and no more than two behind the point."""
    rate /= 1e12
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def _shape(row: Row) -> str:
    features = f"{row['features']} x {row['features']}"
    return f"{features}, B = {row['block_size']}, batch {row['batch']}"


def _link(name: str, path: Path) -> str:
    """A rung is a file, or a folder of them."""
    file = f"{name}/" if path.name == "__init__.py" else path.name
    return f"[{name}](numbsparse/kernels/matmul/{file})"


def _lines(path: Path) -> int:
    """Lines that say something, of a rung's file or of its folder's files."""
    files = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
    texts = (file.read_text(encoding="utf-8") for file in files)
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
