"""What the runs of scaling.py say: a table, and bits against parameters, arithmetic and time."""

from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

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
from scaling_models import Model

HEAD = (
    *("text", "parameters", "model", "hidden", "density", "path", "characters", "learning rate"),
    *("test bits a character", "runs", "seconds", "GiB"),
)


# Colours that readers with any kind of colour vision tell apart (Okabe and Ito, 2008).
COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#0072b2", "#f0e442")
OTHER = "#555555"
BESIDE = 0.05  # bits: lines that end closer together share a number


class Kind(NamedTuple):
    """What runs that differ in their seed alone share."""

    text: str
    size: int
    characters: int
    model: Model


def table(results: Iterable[Result]) -> list[str]:
    """Lines of Markdown: a row a model, with mean and sample standard deviation over its seeds.

    Runs that diverged are counted and have no part in the mean.
    """
    results = list(results)
    rows = [HEAD, ("---",) * len(HEAD)]
    rows += [_row(kind, runs) for kind, runs in groups(results).items()]
    return [*map(line, rows), "", *map(line, searches(results)), "", counted(results)]


def report(results: Iterable[Result]) -> list[str]:
    """The shorter table of a README: of one text, the largest models first, the best of a size."""
    results = list(results)
    text = Counter(run["config"]["text"] for run in results).most_common(1)[0][0]
    rows = []
    for kind, runs in groups(results).items():
        if kind.text == text:
            row, bits = _row(kind, runs), bits_of_all(runs)
            rank = kind.characters, -kind.size, mean(bits) if bits else inf
            rows.append((rank, (*row[1:6], row[7], row[6], *row[8:11])))
    head = (*HEAD[1:6], HEAD[7], HEAD[6], *HEAD[8:11])
    lines = [head, ("---",) * len(head), *(row for _, row in sorted(rows))]
    own = [run for run in results if run["config"]["text"] == text]
    rates = tried(own, lambda c: (c["size"], Model(**c["model"]).name, c["characters"]), "final")
    usual = Counter(length for _, _, length in rates).most_common(1)
    said = "; ".join(
        f"{size:,} {name}{'' if length == usual[0][0] else f', {length / 1e6:g} million'}: {bits}"
        for (size, name, length), bits in rates.items()
    )
    return [*map(line, lines), "", *([said, ""] if said else []), counted(results)]


def searches(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """A row for each model: the learning rates that were tried, with validation bits."""
    rates = tried(results, lambda c: (c["text"], c["size"], Model(**c["model"]).name))
    rows: list[tuple[str, ...]] = [
        ("text", "as large as dense", "model", "learning rates: validation bits")
    ]
    rows += [("---",) * 4]
    return rows + [
        (text[:6], f"{size:,}", name, said) for (text, size, name), said in rates.items()
    ]


def kind_of(config: Any) -> Kind:
    model = Model(**config["model"])
    return Kind(config["text"], config["size"], config["characters"], model)


def groups(results: Iterable[Result]) -> dict[Kind, list[Result]]:
    """The long runs at the best rate, by what they share, in order of size."""
    found = chosen(results, kind_of)
    return dict(sorted(found.items(), key=lambda item: (*item[0][:3], item[0].model.name)))


def _row(kind: Kind, runs: list[Result]) -> tuple[str, ...]:
    bits, one = bits_of_all(runs), runs[0]
    seconds = [run["train_seconds"] for run in runs if test_of(run) is not None]
    path, peak = one.get("mean_path"), one["peak_bytes"]
    return (
        kind.text[:6],
        f"{one['parameters'] / 1e6:.2f} million",
        kind.model.name,
        f"{one['hidden']:,}",
        f"{one['density']:.1%}",
        f"{path:.2f}" if path else "",
        f"{kind.characters / 1e6:,g} million",
        f"{one['config']['lr']:g}",
        mean_and_spread(bits),
        f"{len(bits)} of {len(runs)}",
        f"{mean(seconds):.0f}" if seconds else "",
        f"{peak / 2**30:.2f}" if peak else "",
    )


def draw(file: Path, results: Iterable[Result]) -> None:
    """Test bits, mean and range over the seeds, against three costs; and learning curves."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError:
        print("no picture: pip install matplotlib")
        return
    results = list(results)
    kinds = of_one_text(results)
    if not kinds:
        print("no picture: no long run is done")
        return
    figure = Figure(figsize=(15, 8), layout="constrained")
    panels = figure.subplots(2, 3).ravel()
    most = max(kinds, key=lambda kind: len(kinds[kind])).characters
    costs: list[tuple[str, Callable[[Result], float], bool]] = [
        (f"million parameters, after {most / 1e6:g} million characters",
         lambda run: run["parameters"] / 1e6, False),
        ("FLOP of training", lambda run: run["flop_per_character"] * _read(run), True),
        ("seconds of training", lambda run: run["train_seconds"], True),
    ]  # fmt: skip
    names = Counter(kind.model.name for kind in kinds)
    several = {name for name, count in names.items() if count > 1} or set(names)
    colours = dict(zip(sorted(several), COLOURS, strict=False))
    for axes, (label, cost, every_length) in zip(panels, costs, strict=False):
        for name in sorted(several):
            for length in sorted({kind.characters for kind in kinds}):
                alike = [runs for kind, runs in kinds.items()
                         if (kind.model.name, kind.characters) == (name, length)]  # fmt: skip
                if alike and (every_length or length == most):
                    label_of = name if length == most else None
                    _points(axes, alike, cost, label_of, colours.get(name, OTHER))
        axes.set(xlabel=label, xscale="log")
        low, high = axes.get_xlim()
        if high < 3 * low:  # of one size: a logarithm's ticks would stand one over the other
            axes.set(xscale="linear", xlim=(0, 1.5 * high))
    first = max(kinds, key=lambda kind: sum(k[:3] == kind[:3] for k in kinds))
    of_size = {kind: runs for kind, runs in kinds.items() if kind[:3] == first[:3]}
    longest = max(kinds, key=lambda kind: (kind.characters, kind[:3] == first[:3]))
    read = {k: r for k, r in kinds.items() if k.size == longest.size and k.model.name in several}
    _curves(panels[3], read, longest.characters, colours)
    _rates(panels[4], [run for run in results if run["config"]["text"] == first.text], colours)
    _each(panels[5], of_size, colours)
    for axes in panels[:5]:
        axes.set_ylabel("bits per character")
        if axes.lines:
            axes.legend(fontsize=7)
    for axes in panels:
        axes.grid(alpha=0.3)
        if axes.get_xscale() == "log":
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
    figure.savefig(file, dpi=110)


def of_one_text(results: Iterable[Result]) -> dict[Kind, list[Result]]:
    """The long runs that have bits, of the text that most of them read."""
    kinds = groups(run for run in results if test_of(run) is not None)
    texts = Counter(kind.text for kind, runs in kinds.items() for _ in runs)
    return {kind: runs for kind, runs in kinds.items() if kind.text == texts.most_common(1)[0][0]}


def _read(run: Result) -> int:
    return int(run["config"]["characters"])


def _points(
    axes: Any,
    alike: list[list[Result]],
    cost: Callable[[Result], float],
    name: str | None,
    colour: str,
) -> None:
    """Of models that differ in their size alone: a line, if there are several, and the ranges."""
    points = []
    for runs in alike:
        bits = [run["test"] for run in runs]
        points.append((mean(map(cost, runs)), mean(bits), min(bits), max(bits)))
    x, middle, low, high = zip(*sorted(points), strict=True)
    axes.plot(x, middle, "o-" if len(x) > 2 else "o", markersize=4, color=colour, label=name)
    axes.vlines(x, low, high, color=colour)
    if name is None:
        read = f"{_read(alike[0][0]) / 1e6:g} million"
        place = {"xytext": (-7, 0), "textcoords": "offset points", "ha": "right", "va": "center"}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(read, (x[0], middle[0]), fontsize=8, color=colour, bbox=box, **place)


def _curves(
    axes: Any, alike: dict[Kind, list[Result]], longest: int, colours: dict[str, str]
) -> None:
    """Validation bits by characters, of models of one size: the mean over the seeds."""
    several = len({kind.characters for kind in alike}) > 1
    for kind, runs in alike.items():
        marks = zip(*(run["curve"] for run in runs), strict=True)
        points = [(mark[0][0] / 1e6, mean(m[3] for m in mark)) for mark in marks]
        name, style = kind.model.name, "-" if kind.characters == longest else "--"
        label = name if style == "--" or not several else f"{name}, {longest / 1e6:g} million"
        colour = colours.get(name, OTHER)
        axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
    axes.set(xlabel=f"million characters read by models of {_millions(alike)}", xscale="log")


def _millions(alike: dict[Kind, list[Result]]) -> str:
    parameters = mean(runs[0]["parameters"] for runs in alike.values())
    return f"{parameters / 1e6:.1f} million parameters"


def _rates(axes: Any, results: list[Result], colours: dict[str, str]) -> None:
    """Validation bits of the first seed's long runs by learning rate, where there are several."""
    found: dict[tuple[str, int, int], dict[float, Result]] = {}
    for run in results:
        c = run["config"]
        if c["purpose"] == "final" and c["seed"] == 0 and test_of(run) is not None:
            key = Model(**c["model"]).name, c["characters"], c["size"]
            found.setdefault(key, {})[c["lr"]] = run
    several = {key: rates for key, rates in found.items() if len(rates) > 1}
    labelled, ends = set(), dict[tuple[str, float], list[float]]()
    for (name, _, _), rates in sorted(several.items()):
        points = [(lr, run["validation"]) for lr, run in sorted(rates.items())]
        label, colour = None if name in labelled else name, colours.get(name, OTHER)
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=4, label=label)
        parameters = next(iter(rates.values()))["parameters"] / 1e6
        ends.setdefault((f"{parameters:.0f}", points[-1][0]), []).append(points[-1][1])
        labelled.add(name)
    for (number, lr), bits in ends.items():  # one number for lines that end together
        for end in bits if max(bits) - min(bits) > BESIDE else [mean(bits)]:
            above = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center"}
            axes.annotate(number, (lr, end), fontsize=8, **above)
    axes.set(xlabel="learning rate; beside a line, million parameters", xscale="log")


def _each(axes: Any, alike: dict[Kind, list[Result]], colours: dict[str, str]) -> None:
    """Test bits of each run of models of one size, the best model on top."""
    worst_first = sorted(alike.items(), key=lambda item: -mean(run["test"] for run in item[1]))
    for y, (kind, runs) in enumerate(worst_first):
        bits = [run["test"] for run in runs]
        colour = colours.get(kind.model.name, OTHER)
        axes.plot(bits, [y] * len(bits), "o", color=colour, markersize=4)
    names = [kind.model.name for kind, _ in worst_first]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set(xlabel=f"bits per character of {_millions(alike)}")
