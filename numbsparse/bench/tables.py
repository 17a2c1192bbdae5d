"""README's tables and figure, made from the results in `numbsparse/bench/results/`.

`python -m numbsparse bench --place cuda --json numbsparse/bench/results/cuda.json` makes results,
`python -m numbsparse tables README.md` writes the tables between a file's markers, and draws the
picture that it shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numbsparse.bench import lessons
from numbsparse.bench.contestants import FEATURE_MAJOR, OURS
from numbsparse.bench.figure import draw_speed_up
from numbsparse.bench.ladder import idea_at, idea_of, lines_of
from numbsparse.bench.peers import CUBLAS, ON_CPU, TRITON
from numbsparse.bench.results import (
    Results,
    Row,
    on_cpu,
    on_gpu,
    rows_of,
    shape_of,
    speeds_of,
    teraflops,
)
from numbsparse.bench.show import PASSES, beside_batch_major, speed_up
from numbsparse.bench.show import table as _markdown
from numbsparse.kernels.matmul import LADDER, PRODUCTS


def fill(path: Path) -> None:
    """Rewrite what stands between `<!-- ladder -->` and `<!-- /ladder -->`, and the like.

    Draws `speed_up.png` where the file shows it; raises RuntimeError where matplotlib is missing,
    ValueError where the file has no such markers.
    """
    text = path.read_text(encoding="utf-8")
    makers: dict[str, Callable[[], str]] = {
        "ladder": ladder,
        "gpu": gpu,
        "feature_major": feature_major,
        "conv": conv,
        "cpu": cpu,
    }
    makers |= lessons.PARTS
    names = [name for name in makers if f"<!-- {name} -->" in text]
    if not names:
        raise ValueError(f"{path} has no markers <!-- {next(iter(makers))} --> or the like")
    for name in names:
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        found = marked.search(text)
        if found is None:
            raise ValueError(f"{path} has no marker <!-- /{name} --> after <!-- {name} -->")
        before, after = text[: found.start()], text[found.end() :]
        text = f"{before}{found[1]}{makers[name]()}{found[2]}{after}"
    if (shown := re.search(r'src="([^"]*speed_up\.png)"', text)) is not None:
        picture = path.parent / shown[1]
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_speed_up(on_gpu()["headline"], picture)
    path.write_text(text, encoding="utf-8")


def ladder() -> str:
    """A line per rung: its idea, its speed in float32 and float16, its length."""
    cpu_machine, results = on_cpu()["machine"], on_gpu()
    first = results["ladder"]["rows"][0]
    table = []
    for name, module in LADDER.items():
        rows = rows_of(name)
        idea = idea_of(module) if name == "k0_cpu" else idea_at(name, rows)
        speeds = [_measured(name, rows, product) for product in PRODUCTS]
        table.append([_link(name), idea, *speeds, str(lines_of(module))])
    dense = [row | {"flops": first["flops"]} for row in _dense(results)]
    cells = [_measured(CUBLAS, dense, product) for product in PRODUCTS]
    if any(cells):
        table.append(["cuBLAS", "dense; its work on dropped blocks is not counted", *cells, ""])
    header = ["rung", "idea", *(PASSES[product] for product in PRODUCTS), "lines"]
    return (
        "TFLOP/s over kept blocks, float32 (as accurate as a float32 product) / float16; density "
        f"0.1, {shape_of(first)} unless said, {results['ladder']['machine']}. k0_cpu: 4096 x 4096, "
        f"B = 32, batch 512, {cpu_machine}.\n\n{_markdown(header, table)}\n"
    )


def gpu() -> str:
    """A line per dtype and block size at density 0.1: our speed, and over the peers'."""
    results = on_gpu()
    measured = {dtype: results[dtype] for dtype in ("float16", "float32") if dtype in results}
    if not measured:
        return ""
    table = []
    for dtype, section in measured.items():
        rows = [row for row in section["rows"] if _is_of_figure(row)]
        kept = [row for row in rows if f"{row['density']:.1g}" == "0.1"]
        for (size,), cells in sorted(_by_product(kept, "block_size").items()):
            speeds = [_against_peers(cells[product], rows) for product in PRODUCTS]
            table.append([dtype, str(size), *speeds])
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


def feature_major() -> str:
    """A line per dtype, shape and block size: time batch-major, and feature-major beside it."""
    section = on_gpu().get("feature_major")
    if section is None:
        return ""
    table = []
    lines = _by_product(section["rows"], "dtype", "features", "batch", "density", "block_size")
    for (dtype, features, batch, density, size), cells in lines.items():
        shape = f"{features}, {batch}", f"{density:.1g}", str(size)
        both = [_both_ways(cells.get(product)) for product in PRODUCTS]
        table.append([dtype, *shape, *both])
    header = ["dtype", "features, batch", "density", "B", *(PASSES[name] for name in PRODUCTS)]
    return (
        "Microseconds batch-major, and in brackets how many times as long the same product takes "
        "feature-major, measured in turns; random blocks. "
        f"{section['machine']}; `{section['command']}`.\n\n{_markdown(header, table)}\n"
    )


def _both_ways(row: Row | None) -> str:
    if row is None:
        return "-"
    name, turned = row["auto"], f"{row['auto']} {FEATURE_MAJOR}"
    if name not in row["seconds"]:
        return row["not_timed"].get(name, "")
    time, ratio = row["seconds"][name] * 1e6, beside_batch_major(row, turned)
    beside = row["not_timed"].get(turned, "-") if ratio is None else f"{ratio:.2f}"
    return f"{time:.{0 if time >= 100 else 1}f} ({beside})"


def conv() -> str:
    """A line per dtype, taps and block size: our speed, over cuDNN's, and the memory beside."""
    section = on_gpu().get("conv")
    if section is None:
        return ""
    rows = section["rows"]
    table: list[list[str]] = []
    ours = [row for row in rows if OURS in {**row["seconds"], **row["not_timed"]}]
    keys = "dtype", "precision", "taps_along", "block_size"
    for (dtype, precision, k, size), cells in _by_product(ours, *keys).items():
        name = f"{dtype}, tf32" if precision == "high" else dtype
        speeds = [_beside_cudnn(cells.get(product), rows) for product in PRODUCTS]
        extra = max(row["workspace"] / row["input_bytes"] for row in cells.values())
        table.append([name, f"{k} x {k}", str(size), *speeds, f"{extra:.1%}"])
    header = ["dtype", "taps", "B", *(PASSES[product] for product in PRODUCTS), "memory"]
    first = ours[0]
    return (
        f"TFLOP/s over kept blocks; {first['features']} to {first['features']} features, batch "
        f"{first['batch']}, {first['side']} x {first['side']} images, density 0.1, random blocks. "
        "In brackets, times as fast as cuDNN's dense convolution, channels last. Memory beside "
        f"operands and result, of the input. {section['machine']}; `{section['command']}`.\n\n"
        f"{_markdown(header, table)}\n"
    )


def _beside_cudnn(row: Row | None, rows: list[Row]) -> str:
    if row is None:
        return "-"
    if OURS not in row["seconds"]:
        return row["not_timed"][OURS]
    rate, times = row["flops"] / row["seconds"][OURS], speed_up(row, OURS, rows)
    return f"{teraflops(rate)} ({f'{times:.1f}' if times else '-'})"


def cpu() -> str:
    """A line per shape and product on the CPU: our time, and the peers' as multiples of it."""
    results = on_cpu()
    rows = []
    for row in results["rows"]:
        own = row["seconds"]["k0_cpu"]
        times = [
            f"{row['seconds'][peer] / own:.1f}" if peer in row["seconds"] else "" for peer in ON_CPU
        ]
        shape = f"{row['features']}, {row['batch']}"
        size, density = str(row["block_size"]), f"{row['density']:g}"
        rows.append([shape, density, size, PASSES[row["product"]], f"{own * 1e3:.2f}", *times])
    header = ["hidden, batch", "density", "B", "pass", "ms", *(f"{peer}, times" for peer in ON_CPU)]
    return (
        f"Milliseconds, and how many times as long each peer takes; {results['machine']}.\n\n"
        f"{_markdown(header, rows)}\n"
    )


def _by_product(rows: list[Row], *keys: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """For each line of a table its rows."""
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in keys), {})[row["product"]] = row
    return lines


def _dense(results: Results) -> list[Row]:
    """cuBLAS's rows, as accurate as the ladder's."""
    sections = [results[dtype]["rows"] for dtype in ("float16", "float32") if dtype in results]
    rows = [row for section in sections for row in section]
    return [row for row in rows if CUBLAS in row["seconds"] and _is_of_figure(row)]


def _is_of_figure(row: Row) -> bool:
    """README shows float16, and float32 at full accuracy."""
    return row["dtype"] != "bfloat16" and row["precision"] == "highest"


def _measured(name: str, rows: list[Row], product: str) -> str:
    """Speeds, where there is one."""
    speeds = speeds_of(name, rows, product)
    return "" if speeds == "- / -" else speeds


def _against_peers(row: Row, rows: list[Row]) -> str:
    """Speed (times cuBLAS, times Triton)."""
    name = row["auto"]
    if name not in row["seconds"]:
        return row["not_timed"].get(name, "")
    seconds = row["seconds"][name]
    dense = speed_up(row, name, rows)
    times = [f"{dense:.1f}" if dense else "-"]
    times.append(f"{row['seconds'][TRITON] / seconds:.1f}" if TRITON in row["seconds"] else "-")
    return f"{teraflops(row['flops'] / seconds)} ({', '.join(times)})"


def _link(name: str) -> str:
    """A rung is a file, or a folder of them."""
    path = Path(LADDER[name].__file__ or "")
    file = f"{name}/" if path.name == "__init__.py" else path.name
    return f"[{name}](numbsparse/kernels/matmul/{file})"
