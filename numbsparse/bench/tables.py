"""README's tables, made from the results in `numbsparse/bench/results/`.

`python -m numbsparse bench --place cpu --json numbsparse/bench/results/cpu.json` makes a result,
`python -m numbsparse tables README.md` writes the tables between a file's markers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from numbsparse.kernels.matmul import LADDER, PRODUCTS

RESULTS = Path(__file__).parent / "results"
CPU_SHAPE = {"features": 4096, "batch": 512, "density": 0.1, "block_size": 32, "dtype": "float32"}
GPU_SHAPE = CPU_SHAPE | {"batch": 4096}
PASSES = {"forward": "forward", "input_grad": "input-gradient", "weight_grad": "weight-gradient"}


def fill(path: Path) -> None:
    """Rewrite what stands between `<!-- ladder -->` and `<!-- /ladder -->`, and the like."""
    text = path.read_text(encoding="utf-8")
    for name, table in (("ladder", ladder()), ("cpu", cpu())):
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        found = marked.search(text)
        if found is None:
            raise ValueError(f"{path} has no markers <!-- {name} --> and <!-- /{name} -->")
        before, after = text[: found.start()], text[found.end() :]
        text = f"{before}{found[1]}{table}{found[2]}{after}"
    path.write_text(text, encoding="utf-8")


def ladder() -> str:
    """A line per rung: its idea, its speed, its length."""
    results = {place: _load(place) for place in ("cpu", "cuda")}
    rows = []
    for name, module in LADDER.items():
        idea = (module.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".")
        place, shape = ("cpu", CPU_SHAPE) if name == "k0_cpu" else ("cuda", GPU_SHAPE)
        if "float32" not in getattr(module, "DTYPES", ["float32"]):
            shape, idea = shape | {"dtype": "float16"}, f"{idea} (float16)"
        speeds = [_speed(results[place], shape, product, name) for product in PRODUCTS]
        path = Path(module.__file__ or "")
        link = f"[{name}](numbsparse/kernels/matmul/{path.name})"
        lines = sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
        rows.append([link, idea, *speeds, str(lines)])
    for dtype in ("float32", "float16"):
        shape = GPU_SHAPE | {"dtype": dtype}
        peer = [_speed(results["cuda"], shape, product, "cuBLAS dense") for product in PRODUCTS]
        idea = f"dense, its work on dropped blocks not counted ({dtype})"
        rows.append(["cuBLAS", idea, *peer, ""])
    header = ["rung", "idea", *(PASSES[product] for product in PRODUCTS), "lines"]
    return (
        "GFLOP/s over kept blocks; hidden 4096, B = 32, density 0.1, float32 unless said; k0_cpu "
        f"with batch 512 on {results['cpu']['machine']}; the GPU's rungs with batch 4096 on "
        f"{results['cuda']['machine']}.\n\n{_markdown(header, rows)}\n"
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


def _speed(results: dict[str, Any], shape: dict[str, Any], product: str, name: str) -> str:
    for row in results["rows"]:
        if row["product"] == product and shape.items() <= row.items() and name in row["seconds"]:
            return f"{row['flops'] / row['seconds'][name] / 1e9:,.0f}"
    return ""


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
