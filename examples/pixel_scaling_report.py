"""What the runs of pixel_scaling.py say: tables, learning curves, and who leads on which."""

from collections import Counter
from collections.abc import Iterable
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from pixel_pictures import write_samples
from pixel_scaling_plan import Model, Size
from pixel_scaling_run import samples_of
from runs_report import (
    Result,
    bits_of_all,
    chosen,
    counted,
    line,
    mean_and_spread,
    test_of,
    tried,
)

HEAD = (
    *("parameters", "model", "filters", "blocks a stage", "density", "learning rate", "images"),
    *("test bits a dimension", "runs", "ms a step", "GiB"),
)


class Kind(NamedTuple):
    """What runs that differ in their seed alone share."""

    size: Size
    images: int
    model: Model


def of_one_data(results: Iterable[Result]) -> list[Result]:
    """Those that saw the images that most of them saw: others cannot be compared."""
    results = list(results)
    seen = Counter(run["config"]["data"] for run in results)
    return [run for run in results if run["config"]["data"] == seen.most_common(1)[0][0]]


def kinds_of(results: Iterable[Result]) -> dict[Kind, list[Result]]:
    """The long runs at the best rate: the largest first, and dense models before sparse ones."""
    found = chosen(
        of_one_data(results), lambda c: Kind(Size(**c["size"]), c["images"], Model(**c["model"]))
    )
    return dict(sorted(found.items(), key=lambda item: (-item[0].size.filters, item[0].model)))


def table(results: Iterable[Result]) -> list[str]:
    """Lines of Markdown: a row a model, with mean and sample standard deviation over its seeds."""
    results = list(results)
    rows = [HEAD, ("---",) * len(HEAD)]
    steps = fastest(results)
    rows += [_row(kind, runs, steps) for kind, runs in kinds_of(results).items()]
    lines = [*map(line, rows), ""]
    for purpose, runs in (("search", "Short runs"), ("final", "Long runs of the first seed")):
        rates = tried(
            of_one_data(results),
            lambda c: (Size(**c["size"]), Model(**c["model"]), c["images"]),
            purpose,
        )
        said = "; ".join(f"{size} {model.name}: {bits}" for (size, model, _), bits in rates.items())
        lines += [f"{runs}: {said}", ""] if said else []
    return [*lines, counted(results)]


def fastest(results: Iterable[Result]) -> dict[tuple[Size, Model], float]:
    """Milliseconds a step, of each model's run in which they were fewest, whatever its rate."""
    found: dict[tuple[Size, Model], float] = {}
    for run in results:
        key = Size(**run["config"]["size"]), Model(**run["config"]["model"])
        found[key] = min(found.get(key, inf), 1000 * run["train_seconds"] / run["steps"])
    return found


def _row(kind: Kind, runs: list[Result], steps: dict[tuple[Size, Model], float]) -> tuple[str, ...]:
    one = runs[0]
    bits, peak = bits_of_all(runs), one["peak_bytes"]
    return (
        f"{one['parameters'] / 1e6:.2f} million",
        kind.model.name,
        str(one["filters"]),
        str(one["blocks"]),
        f"{one['density']:.0%}",
        f"{one['config']['lr']:g}",
        f"{kind.images:,}",
        mean_and_spread(bits),
        f"{len(bits)} of {len(runs)}",
        f"{steps[kind.size, kind.model]:.1f}",
        f"{peak / 2**30:.2f}" if peak else "",
    )


def draw(file: Path, results: Iterable[Result]) -> None:
    """Validation bits by images and by seconds at each size, mean and range; and by photograph."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    kinds = {
        kind: [run for run in runs if test_of(run) is not None]
        for kind, runs in kinds_of(results).items()
    }
    kinds = {kind: runs for kind, runs in kinds.items() if runs}
    if not kinds:
        print("no picture: no long run is done")
        return
    sizes = list(dict.fromkeys(kind.size for kind in kinds))
    figure = Figure(figsize=(11, 3.4 * len(sizes)), layout="constrained")
    for size, row in zip(sizes, figure.subplots(len(sizes), 3, squeeze=False), strict=True):
        alike = {kind: runs for kind, runs in kinds.items() if kind.size == size}
        usual = max(alike, key=lambda kind: len(alike[kind])).images
        colours = {model: f"C{i}" for i, model in enumerate(sorted({k.model for k in alike}))}
        units = (("thousand images seen", 1000), ("seconds", 1))
        for axes, (column, (label, unit)) in zip(row, enumerate(units), strict=False):
            for kind, runs in alike.items():
                curves = [[(mark[column] / unit, mark[3]) for mark in run["curve"]] for run in runs]
                longer = "" if kind.images == usual else f", {kind.images:,} images"
                name = kind.model.name + longer
                _curve(axes, curves, "--" if longer else "-", name, colours[kind.model])
            axes.set(xlabel=label, ylabel="validation bits a dimension")
            axes.legend(fontsize=8)
        row[0].set_title(f"{size}: {_parameters(alike)} million parameters", fontsize=10)
        usual_ones = {kind: runs for kind, runs in alike.items() if kind.images == usual}
        _leads(row[2], usual_ones, colours)
        for axes in row:
            axes.grid(alpha=0.3)
    figure.savefig(file, dpi=110)


def draw_samples(file: Path, results: Iterable[Result]) -> None:
    """What the models drew that drew something, a strip each."""
    drew = {
        f"{kind.size} {kind.model.name}": samples_of(run["samples"])
        for kind, runs in kinds_of(results).items()
        for run in runs
        if run["samples"]
    }
    if drew:
        write_samples(file, drew)


def _parameters(alike: dict[Kind, list[Result]]) -> str:
    return f"{mean(runs[0]['parameters'] for runs in alike.values()) / 1e6:.1f}"


def _curve(
    axes: Any, curves: list[list[tuple[float, float]]], style: str, name: str, colour: str
) -> None:
    """Mean and range of curves of (x, bits), but for their first quarter."""
    marks = list(zip(*curves, strict=True))[len(curves[0]) // 4 :]
    x = [mean(at for at, _ in mark) for mark in marks]
    bits = [[bits for _, bits in mark] for mark in marks]
    axes.plot(x, [*map(mean, bits)], style, color=colour, label=name)
    axes.fill_between(x, [*map(min, bits)], [*map(max, bits)], color=colour, alpha=0.25)


def title_of(photograph: str) -> str:
    """The name of a file without its ending, cut to what stands beside an axis."""
    return Path(photograph.partition(" ")[2]).stem[:14]


def _leads(axes: Any, alike: dict[Kind, list[Result]], colours: dict[Model, str]) -> None:
    """Test bits of each photograph less those of the dense model of the same seed."""
    dense = {
        run["config"]["seed"]: run["by_photograph"]
        for kind, runs in alike.items()
        for run in runs
        if kind.model == Model()
    }
    names: list[str] = list(next(iter(dense.values()), {}))
    for i, (kind, runs) in enumerate(alike.items()):
        for run in runs:
            other = dense.get(run["config"]["seed"])
            if other and kind.model != Model():
                off = [run["by_photograph"][name] - other[name] for name in names]
                places = [at + 0.15 * (i - 1.5) for at in range(len(names))]
                axes.plot(off, places, "o", color=colours[kind.model], markersize=4)
    axes.axvline(0, color=colours[Model()])
    axes.set_yticks(range(len(names)), [title_of(name) for name in names], fontsize=8)
    axes.set(xlabel="test bits beyond the dense model's")
