"""Tables and a figure of BENCHMARKS.md, made from the results in `numbsparse/bench/results/`.

`python -m numbsparse bench --place cuda --json numbsparse/bench/results/cuda.json` makes results,
`python -m numbsparse tables BENCHMARKS.md` writes the tables between a file's markers, and draws
the picture that it shows.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numbsparse.bench.contestants import CUBLAS, FEATURE_MAJOR, ON_CPU, OURS, TRITON
from numbsparse.bench.results import PASSES, Row, beside_batch_major, speed_up, where
from numbsparse.bench.results import table as _markdown
from numbsparse.kernels.matmul import LADDER, PRODUCTS
from numbsparse.pages import lessons
from numbsparse.pages.committed import (
    in_section,
    on_changing,
    on_cpu,
    on_gpu,
    ratio,
    rows_of,
    shape_of,
    speeds_of,
    teraflops,
)
from numbsparse.pages.figure import draw_headline
from numbsparse.pages.ladder import file_of, idea_at, idea_of, lines_of

HEADS = [PASSES[product] for product in PRODUCTS]


def fill(path: Path) -> None:
    """Rewrite what stands between `<!-- ladder -->` and `<!-- /ladder -->`, and the like.

    Draws `speed_up.png` where the file shows it; raises ImportError where matplotlib is missing,
    ValueError where the file has no such markers.
    """
    text = path.read_text(encoding="utf-8")
    makers: dict[str, Callable[[], str]] = {
        make.__name__: make for make in (ladder, gpu, feature_major, conv, changing, edits, cpu)
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
        draw_headline(on_gpu(), picture)
    path.write_text(text, encoding="utf-8")


def ladder() -> str:
    """A line per rung: its idea, its speed in float32 and float16, its length."""
    cpu_machine, section = on_cpu()["machine"], on_gpu()["ladder"]
    first = section["rows"][0]
    lines = []
    for name, module in LADDER.items():
        rows = rows_of(name)
        idea = idea_of(module) if name == "k0_cpu" else idea_at(name, rows)
        lines.append([_link(name), idea, *_measured(name, rows), str(lines_of(name))])
    dense = [row | {"flops": first["flops"]} for row in _of_figure() if CUBLAS in row["seconds"]]
    if any(cells := _measured(CUBLAS, dense)):
        lines.append(["cuBLAS", "dense; its work on dropped blocks is not counted", *cells, ""])
    return (
        "TFLOP/s over kept blocks, float32 (as accurate as a float32 product) / float16; density "
        f"0.1, {shape_of(first)} unless said, {section['machine']}. k0_cpu: 4096 x 4096, "
        f"B = 32, batch 512, {cpu_machine}.\n\n"
        f"{_markdown(['rung', 'idea', *HEADS, 'lines'], lines)}"
    )


def gpu() -> str:
    """A line per dtype and block size at density 0.1: our speed, and over the peers'."""
    rows = _of_figure()
    if not rows:
        return ""
    kept = [row for row in rows if f"{row['density']:.1g}" == "0.1"]
    lines = [
        [dtype, str(size)] + [_speed(cells[of], cells[of]["auto"], rows, TRITON) for of in PRODUCTS]
        for (dtype, size), cells in sorted(_by_product(kept, "dtype", "block_size").items())
    ]
    dtypes = dict.fromkeys(row["dtype"] for row in rows)
    first, machine = rows[0], on_gpu()[rows[0]["dtype"]]["machine"]
    return (
        f"TFLOP/s over kept blocks; {first['features']} x {first['features']}, batch "
        f"{first['batch']}, density 0.1, random blocks. In brackets, times as fast as cuBLAS's "
        f"dense product and as torch's BSR kernels (Triton). {machine}; `python -m numbsparse "
        f"bench --place cuda --only {','.join(dtypes)}`.\n\n"
        f"{_markdown(['dtype', 'B', *HEADS], lines)}"
    )


def feature_major() -> str:
    """A line per dtype, shape and block size: time batch-major, and feature-major beside it."""
    section, lines = on_gpu().get("feature_major"), []
    if section is None:
        return ""
    keys = "dtype", "features", "batch", "density", "block_size"
    for key, cells in _by_product(section["rows"], *keys).items():
        dtype, features, batch, density, size = key
        both = [_both_ways(cells.get(product)) for product in PRODUCTS]
        lines.append([dtype, f"{features}, {batch}", f"{density:.1g}", str(size), *both])
    return (
        "Microseconds batch-major, and in brackets how many times as long the same product takes "
        "feature-major, measured in turns; random blocks. "
        f"{section['machine']}; `{section['command']}`.\n\n"
        f"{_markdown(['dtype', 'features, batch', 'density', 'B', *HEADS], lines)}"
    )


def conv() -> str:
    """A line per dtype, taps and block size: our speed, over cuDNN's, and the memory beside."""
    section, lines = on_gpu().get("conv"), []
    if section is None:
        return ""
    rows = section["rows"]
    ours = [row for row in rows if OURS in {**row["seconds"], **row["not_timed"]}]
    keys = "dtype", "precision", "taps_along", "block_size"
    for (dtype, precision, k, size), cells in _by_product(ours, *keys).items():
        name = f"{dtype}, tf32" if precision == "high" else dtype
        speeds = [_speed(cells.get(product), OURS, rows) for product in PRODUCTS]
        extra = max(row["workspace"] / row["input_bytes"] for row in cells.values())
        lines.append([name, f"{k} x {k}", str(size), *speeds, f"{extra:.1%}"])
    first = ours[0]
    return (
        f"TFLOP/s over kept blocks; {first['features']} to {first['features']} features, batch "
        f"{first['batch']}, {first['side']} x {first['side']} images, density 0.1, random blocks. "
        "In brackets, times as fast as cuDNN's dense convolution, channels last. Memory beside "
        f"operands and result, of the input. {section['machine']}; `{section['command']}`.\n\n"
        f"{_markdown(['dtype', 'taps', 'B', *HEADS, 'memory'], lines)}"
    )


def changing() -> str:
    """A line per shape and product: gates and layouts made on the GPU, as shares of the time."""
    section = on_changing()["changing"]
    lines: dict[tuple[Any, ...], list[str]] = {}
    for row in section["rows"]:
        name, (base, *others) = row["layout"], row["seconds"].values()
        of = f"{row['features']}, {row['batch']}", str(row["block_size"])
        key = row["dtype"], *of, PASSES[row["product"]]
        if name == "gates:":
            cells = [f"{1e6 * base:.1f}", *(f"{other / base:.2f}" for other in others)]
            lines[key] = [*cells, "-"]
        elif name == "made on the GPU:":
            lines[key][4] = f"{others[0] / base:.2f}"
    head = ["dtype", "features, batch", "B", "pass", "no gates, us", "all one", "half zero"]
    head += ["half zero, known", "made on the GPU"]
    return (
        "Density 0.1, random blocks. Gates and layouts made on the GPU: times as long as without. "
        f"{section['machine']}; `{section['command']}`.\n\n"
        + _markdown(head, [[*key, *cells] for key, cells in lines.items()])
    )


def edits() -> str:
    """A line per edit, for a layer that was pruned, and for layouts that are new."""
    results, found = on_changing(), dict[str, dict[str, float]]()
    if "edits" not in results:
        return ""
    for row in results["edits"]["rows"]:
        found[row["host"]] = row["seconds"]
    for row in where(results["changing"]["rows"], layout="a new layout:"):
        own = found.setdefault(f"the first product of {row['n_blocks']:,} blocks, at most", {})
        name, took = PASSES[row["product"]], row["seconds"]["not used before"]
        own[name] = max(own.get(name, 0.0), took)
    lines = [
        [what, "; ".join(f"{name} {1e3 * s:.3g}" for name, s in seconds.items())]
        for what, seconds in found.items()
    ]
    section = results["edits"]
    return (
        "Milliseconds, medians, in float32; blocks of 32, and of 8 on the CPU. First products, in "
        f"both dtypes, of 1 to 8,192 rows. {section['machine']}; `{section['command']}`.\n\n"
        f"{_markdown(['what', 'ms'], lines)}"
    )


def cpu() -> str:
    """A line per shape and product on the CPU: our time, and the peers' as multiples of it."""
    results, lines = on_cpu(), []
    for row in results["rows"]:
        seconds, own = row["seconds"], row["seconds"]["k0_cpu"]
        times = [f"{seconds[peer] / own:.1f}" if peer in seconds else "" for peer in ON_CPU]
        shape = f"{row['features']}, {row['batch']}", f"{row['density']:g}", str(row["block_size"])
        lines.append([*shape, PASSES[row["product"]], f"{own * 1e3:.2f}", *times])
    header = ["hidden, batch", "density", "B", "pass", "ms", *(f"{peer}, times" for peer in ON_CPU)]
    return (
        f"Milliseconds, and how many times as long each peer takes; {results['machine']}.\n\n"
        f"{_markdown(header, lines)}"
    )


def _of_figure() -> list[Row]:
    """What was measured in float16, and in float32 at full accuracy, which BENCHMARKS.md shows."""
    results = on_gpu()
    return [
        row
        for dtype in ("float16", "float32")
        for row in in_section(results, dtype, dtype=dtype, precision="highest")
    ]


def _by_product(rows: list[Row], *keys: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """For each line of a table its rows."""
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in keys), {})[row["product"]] = row
    return lines


def _measured(name: str, rows: list[Row]) -> list[str]:
    """Speeds of each product, where there is one."""
    speeds = [speeds_of(name, rows, product) for product in PRODUCTS]
    return ["" if said == "- / -" else said for said in speeds]


def _speed(row: Row | None, name: Any, rows: list[Row], *peers: str) -> str:
    """Speed (times the dense product, times each of the peers)."""
    if row is None:
        return "-"
    seconds = row["seconds"]
    if name not in seconds:
        return row["not_timed"].get(name, "")
    others = (seconds[peer] / seconds[name] if peer in seconds else None for peer in peers)
    times = map(ratio, (speed_up(row, name, rows), *others))
    return f"{teraflops(row['flops'] / seconds[name])} ({', '.join(times)})"


def _both_ways(row: Row | None) -> str:
    if row is None:
        return "-"
    name, by_feature = row["auto"], f"{row['auto']} {FEATURE_MAJOR}"
    if name not in row["seconds"]:
        return row["not_timed"].get(name, "")
    time, times = row["seconds"][name] * 1e6, beside_batch_major(row, by_feature)
    beside = row["not_timed"].get(by_feature, "-") if times is None else f"{times:.2f}"
    return f"{time:.{0 if time >= 100 else 1}f} ({beside})"


def _link(name: str) -> str:
    """A rung is a file, or a folder of them."""
    path = file_of(name)
    file = f"{name}/" if path.name == "__init__.py" else path.name
    return f"[{name}](numbsparse/kernels/matmul/{file})"
