"""Pictures: speed-up by density, as the launch post of 2017 has it, and the maps of the plane.

They need matplotlib, which is asked for here alone.
"""

import json
from collections.abc import Callable
from hashlib import sha256
from itertools import product as every
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from numbsparse.bench.contestants import CUSPARSE, TRITON
from numbsparse.bench.plane import PLANES, Point
from numbsparse.bench.results import PASSES, Results, Row, card_of, speed_up, where
from numbsparse.draw import matplotlib_figure
from numbsparse.pages.mapped import FAR, ours, speed_ups, times_the_roofline

# Colours that readers with any kind of colour vision tell apart (Okabe and Ito, 2008).
COLOURS = {"forward": "#0072b2", "input_grad": "#009e73", "weight_grad": "#d55e00"}
TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
PEERS = {TRITON: ("torch BSR (Triton)", "--"), CUSPARSE: ("cuSPARSE CSR", ":")}


def draw_headline(results: Results, path: Path) -> None:
    """Write the picture of that section.

    Raises RuntimeError where it was not measured, ImportError where matplotlib is missing.
    """
    if "headline" not in results:
        raise RuntimeError("the figure takes the section headline: add it to --only")
    figures, section = matplotlib_figure(), results["headline"]
    rows = section["rows"]
    kinds = list(dict.fromkeys((row["dtype"], row["precision"]) for row in rows))
    figure = figures.Figure(figsize=(4.4 * len(kinds), 4.2), layout="constrained")
    axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        _draw_panel(axis, [row for row in rows if (row["dtype"], row["precision"]) == kind])
    axes[0].set_ylabel("times as fast as cuBLAS, dense")
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles, labels, loc="upper left", frameon=False, fontsize=8.5)
    first = rows[0]
    figure.suptitle(
        f"{first['features']} x {first['features']} weights in {first['block_size']} x "
        f"{first['block_size']} blocks, batch {first['batch']}; "
        f"{card_of(section['machine'])}",
        fontsize=10,
    )
    figure.savefig(path, **of_rows(rows))


def of_rows(rows: list[Row]) -> dict[str, Any]:
    """How a picture is saved: it carries a digest of the results that it was drawn from."""
    digest = sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()
    return {"dpi": 150, "metadata": {"Description": digest}}


def _draw_panel(axis: Any, rows: list[Row]) -> None:
    """One dtype: a line a product and contestant."""
    axis.axhline(1, color="#888888", linewidth=1)
    below = {"xytext": (-2, -4), "textcoords": "offset points", "ha": "right", "va": "top"}
    axis.annotate("cuBLAS", (1, 1), xycoords=("axes fraction", "data"), color="#666666", **below)
    ends: list[float] = []
    for product, colour in COLOURS.items():
        own, name = _points(rows, product), PASSES[product]
        axis.plot(*own, "o-", color=colour, label=name, linewidth=2, markersize=4)
        ends += own[1][-1:]
    for peer, (name, style) in PEERS.items():
        for product, colour in COLOURS.items():
            axis.plot(*_points(rows, product, peer), style, color=colour, linewidth=1.2, alpha=0.8)
        axis.plot([], [], style, color="#666666", linewidth=1.2, label=name)
    densities = sorted({float(f"{row['density']:.2g}") for row in rows})
    if ends:
        last = min(row["density"] for row in rows)
        place = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
        axis.annotate(f"{max(ends):.0f}x", (last, max(ends)), weight="bold", **place)
    axis.set(xscale="log", yscale="log", xlabel="density (kept blocks / all blocks)")
    axis.set_xticks(densities, [f"{density:g}" for density in densities], rotation=45)
    axis.minorticks_off()
    axis.invert_xaxis()
    axis.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axis.set_ylim(0.2, 200)
    axis.grid(color="#e5e5e5", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    first = rows[0]
    precise = {"highest": ", as accurate as float32", "high": ", tf32"}
    axis.set_title(first["dtype"] + (precise[first["precision"]] if "32" in first["dtype"] else ""))


def _points(rows: list[Row], product: str, peer: str = "") -> tuple[list[float], list[float]]:
    """Densities, and the speed-up of a peer or of our rung where it was right."""
    found = []
    for row in where(rows, product=product):
        name = peer or row["auto"]
        if name in row["seconds"] and (times := speed_up(row, name, rows)) is not None:
            found.append((row["density"], times))
    return [density for density, _ in found], [times for _, times in found]


class Kind(NamedTuple):
    """What a map shows of its products: of a cell the median."""

    title: str
    label: str  # of the bar beside it
    colours: str
    ends: tuple[float, ...]  # of the colours, and what is marked between them
    crossed: Callable[[float], bool]


BESIDE_PEERS = Kind(
    "How many times as fast as the fastest other library: the median of a cell's products; "
    "x: slower at one or more",
    "times as fast (red: slower)",
    "RdBu",
    (1 / 4, 1 / 2, 1, 2, 4),
    lambda times: times < 1,
)
ROOFLINE = Kind(
    "How many times as long as its roofline: the median of a cell's products; "
    f"x: more than {FAR:g} times at one or more",
    "times the roofline",
    "Oranges",
    (1, 1.5, 2, 3, 4, 6),
    lambda times: times > FAR,
)


def draw_map(place: str, machine: str, rows: list[Row], path: Path) -> None:
    """By batch and density, a panel for each block size and dtype: blue where we are faster than
    every peer, red where one is, crossed where one is at some of the products."""
    found = [(point, times) for point, times, _ in speed_ups(place, rows)]
    _draw_cells(place, machine, found, BESIDE_PEERS).savefig(path, **of_rows(rows))


def draw_roofline(place: str, machine: str, rows: list[Row], path: Path) -> None:
    """The same of how many times as long as its roofline a product takes."""
    found = list(times_the_roofline(ours(rows)).items())
    _draw_cells(place, machine, found, ROOFLINE).savefig(path, **of_rows(rows))


def _draw_cells(place: str, machine: str, found: list[tuple[Point, float]], of: Kind) -> Any:
    """A cell's median over features and products; grey where nobody measured."""
    from matplotlib.colors import LogNorm

    plane = PLANES[place]
    kinds = [kind for kind in plane.numbers if any(point[4:6] == kind for point, _ in found)]
    shape = max(len(kinds), 1), len(plane.block_sizes)
    figure = matplotlib_figure().Figure(figsize=(1.9 * shape[1] + 0.7, 2.1 * shape[0] + 0.9))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    colours: dict[str, Any] = {"cmap": of.colours, "norm": LogNorm(of.ends[0], of.ends[-1])}
    image = None
    for (i, kind), (j, size) in every(enumerate(kinds), enumerate(plane.block_sizes)):
        cells = np.full((len(plane.densities), len(plane.batches)), np.nan)
        panel = panels[i, j]
        panel.set_facecolor("#b0b0b0")  # not measured
        for (a, density), (b, batch) in every(enumerate(plane.densities), enumerate(plane.batches)):
            cell = size, density, batch, *kind
            if here := [times for point, times in found if point[1:6] == cell]:
                cells[a, b] = median(here)
                if any(map(of.crossed, here)):
                    panel.plot(b, a, "x", color="black", markersize=3, markeredgewidth=0.7)
        image = panel.imshow(cells, origin="lower", aspect="auto", **colours)
        named = _named(plane.batches)
        panel.set_xticks(named, [plane.batches[b] for b in named], rotation=90, fontsize=8)
        panel.set_yticks(range(len(plane.densities)), [f"{d:g}" for d in plane.densities])
        precise = {"highest": "", "high": ", tf32"}[kind[1]]
        panel.set_title(f"{kind[0]}{precise}, B = {size}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("batch")
    for panel in panels[:, 0]:
        panel.set_ylabel("density")
    if image is not None:
        bar = figure.colorbar(
            image, ax=panels, ticks=of.ends, extend="both", fraction=0.03, pad=0.01
        )
        bar.minorticks_off()
        bar.ax.set_yticklabels([f"{tick:g}" for tick in of.ends])
        bar.set_label(of.label)
    figure.suptitle(f"{of.title}\n{len(found)} products, {card_of(machine)}", fontsize=10)
    return figure


def _named(batches: tuple[int, ...]) -> list[int]:
    """Places of batches that have room for their number: of many, powers of two, not adjacent."""
    if len(batches) <= 10:
        return list(range(len(batches)))
    named: list[int] = []
    for place, batch in enumerate(batches):
        if batch & (batch - 1) == 0 and (not named or place > named[-1] + 1):
            named.append(place)
    return named
