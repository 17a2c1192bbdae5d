"""A map of the whole plane: our products beside the peers' at every size, batch and density.

A point is a layout's features, block size and density, a batch and a dtype; each of its products is
a row, checked and timed. All points of a place are in one fixed random order, so that any number of
them is spread over the whole plane; a run goes on where the file ends, for as long as it is given.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from itertools import product as every
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from numbsparse import files, patterns
from numbsparse.bench.contestants import OURS
from numbsparse.bench.figure import matplotlib_figure
from numbsparse.bench.machine import describe
from numbsparse.bench.measure import measure
from numbsparse.bench.peers import CUBLAS, ON_CPU, TRITON
from numbsparse.bench.problem import Problem, forget_numbers
from numbsparse.bench.results import Row
from numbsparse.device import SIMULATED, require
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.layout import Layout

SECONDS = {"cuda": 0.02, "cpu": 0.002}  # what a product is timed for
AHEAD = 8  # runs of a process, between two rounds of measuring
SAVED = 20.0  # seconds between two writings of the file
ENDS = 1 / 4, 4  # of the picture's colours


class Plane(NamedTuple):
    """What is crossed, and who is beside us.

    `dense` is timed once for all layouts of as many features, on a GPU, where times are steady.
    """

    sizes: tuple[tuple[int, int], ...]  # features in and out
    batches: tuple[int, ...]
    block_sizes: tuple[int, ...]
    densities: tuple[float, ...]
    numbers: tuple[tuple[str, str], ...]  # dtype and precision
    products: tuple[str, ...]
    dense: str | None
    beside: tuple[str, ...]


PLANES = {
    "cuda": Plane(
        sizes=(*((n, n) for n in (1024, 2048, 4096, 8192, 12288)), (4096, 14336)),
        batches=(
            *(1, 8, 16, 32, 48, 64, 65, 96, 128, 192, 256, 384, 512, 768),
            *(1024, 2048, 4096, 8192),
        ),
        block_sizes=(8, 16, 32, 64, 128),
        densities=(0.01, 0.02, 0.05, 0.1, 0.25, 0.5),
        numbers=(
            *(("float16", "highest"), ("bfloat16", "highest")),
            *(("float32", "highest"), ("float32", "high")),
        ),
        products=PRODUCTS,
        dense=CUBLAS,
        beside=(TRITON,),
    ),
    "cpu": Plane(
        sizes=tuple((n, n) for n in (320, 768, 1536, 3072)),
        batches=(1, 4, 24, 100, 400),
        block_sizes=(4, 8, 16, 32, 64),
        densities=(0.05, 0.2, 0.5),
        numbers=(("float32", "highest"),),
        products=("forward",),
        dense=None,
        beside=ON_CPU,
    ),
}


class Point(NamedTuple):
    """A product of the map; of density 1 the dense one alone."""

    features: tuple[int, int]
    block_size: int
    density: float
    batch: int
    dtype: str
    precision: str
    product: str


def run(
    place: str, json_file: Path | None, png: Path | None, minutes: float, jobs: int = 1
) -> None:
    """Go on with the map for so long, say where we are slower than a peer, and draw it."""
    if place == "cuda" and minutes > 0:
        if SIMULATED:
            raise RuntimeError("the simulator's times mean nothing: unset NUMBA_ENABLE_CUDASIM")
        require()
    if png is not None:
        matplotlib_figure()  # before the measuring: it may be missing
    (machine, rows), written = known(json_file), time.perf_counter()
    machine = describe(place) if minutes > 0 or not machine else machine
    content = {"machine": machine, "command": f"python -m numbsparse plane --place {place}"}
    for row in measured(place, list(rows), minutes * 60, jobs):
        rows.append(row)
        if time.perf_counter() > written + SAVED:
            _write(json_file, content, rows)
            written = time.perf_counter()
    if minutes > 0:
        _write(json_file, content, rows)
    print(summary(place, rows))
    if png is not None:
        draw(place, content, rows, png)
        print(f"the picture is in {png}")


def known(json_file: Path | None) -> tuple[str, list[Row]]:
    """Where earlier runs were, and their rows."""
    if json_file is None or not json_file.exists():
        return "", []
    try:
        content = json.loads(json_file.read_text(encoding="utf-8"))
        rows = [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]
        return content["machine"], rows
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{json_file} holds no map of the plane: {error!r}") from error


def _write(json_file: Path | None, content: dict[str, Any], rows: list[Row]) -> None:
    if json_file is None or not rows:
        return
    columns = json.dumps(list(rows[0]))
    lines = ",\n".join(json.dumps(list(row.values())) for row in rows)
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in content.items())
    text = f'{{{head}"columns": {columns},\n"rows": [\n{lines}\n]}}\n'
    files.write_bytes(json_file, text.encode())


def points(place: str) -> Iterator[list[Point]]:
    """All points, the products of a layout, batch and dtype at a time, in an order of their own.

    Each pass is over all of the picture, block sizes, densities and batches, of a dtype: with
    features that no pass before had there.
    """
    plane, rng = PLANES[place], np.random.default_rng(0)
    cells = list(every(plane.block_sizes, plane.densities, plane.batches))
    of_cell = [rng.permutation(len(plane.sizes)) for _ in cells]
    for turn, numbers in every(range(len(plane.sizes)), plane.numbers):
        for i in rng.permutation(len(cells)):
            (size, density, batch), features = cells[i], plane.sizes[of_cell[i][turn]]
            if all(n % size == 0 for n in features):
                yield [
                    Point(features, size, density, batch, *numbers, product)
                    for product in plane.products
                ]


def measured(place: str, rows: list[Row], seconds: float, jobs: int = 1) -> Iterator[Row]:
    """The rows that are not there yet, until the time is over; other processes compile ahead."""
    end, done = time.perf_counter() + seconds, {_point_of(row) for row in rows}
    ahead = chain.from_iterable(_runs(place, some) for some in points(place))
    with _compilers(jobs) as compile_all:
        while some := list(islice(ahead, AHEAD * jobs)):
            these = [run._replace(points=[p for p in run.points if p not in done]) for run in some]
            compile_all(place, [run for run in these if run.points], end)
            for run in these:
                layout = _layout(run.points[0]) if run.points else None
                for point in run.points:
                    if time.perf_counter() > end:
                        return
                    if point not in done:
                        done.add(point)
                        yield _row(point, layout, place, run, SECONDS[place])
                forget_numbers()


class Run(NamedTuple):
    """Products of one layout and batch, and who computes them; `ours` is "auto" or nothing."""

    points: list[Point]
    ours: str
    others: tuple[str, ...]


def _runs(place: str, some: list[Point]) -> list[Run]:
    """Ours beside its peers, and the dense product that is timed for all layouts."""
    plane = PLANES[place]
    dense = [Run([dense_of(point) for point in some], "", (plane.dense,))] if plane.dense else []
    return [Run(some, "auto", plane.beside), *dense]


@contextmanager
def _compilers(jobs: int) -> Iterator[Any]:
    """What compiles kernels in so many processes, for all that follow to find."""
    if jobs < 2:
        yield lambda *_: None
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:

        def compile_all(place: str, runs: list[Run], end: float) -> None:
            left = end - time.perf_counter()
            list(pool.map(_compile, [place] * len(runs), runs, [left] * len(runs)))

        yield compile_all


def _compile(place: str, run: Run, seconds: float) -> None:
    """Compute these once."""
    end, layout = time.perf_counter() + seconds, _layout(run.points[0])
    for point in run.points:
        if time.perf_counter() < end:
            _row(point, layout, place, run, 0.0)
    forget_numbers()


def dense_of(point: Point) -> Point:
    """The dense product of as many features and rows."""
    return point._replace(block_size=32, density=1.0)


def _layout(point: Point) -> Layout:
    rows, columns = (n // point.block_size for n in point.features)
    return Layout(patterns.random(rows, columns, point.density, seed=1))


def _row(point: Point, layout: Any, place: str, run: Run, seconds: float) -> Row:
    """A point, the rung that `ops` took, and microseconds by name; where wrong or failed, why."""
    problem = Problem(
        layout, point.block_size, point.batch, point.dtype, point.precision, place=place
    )
    found = measure(problem, point.product, run.ours, run.others, seconds)
    microseconds = {
        OURS if name == found["auto"] else name: float(f"{seconds * 1e6:.3g}")
        for name, seconds in found["seconds"].items()
    }
    rung = found["auto"] if run.ours else None
    faults = {name: why for name, why in found["not_timed"].items() if name in (OURS, rung)}
    return {**point._asdict(), "rung": rung, "microseconds": microseconds, "faults": faults}


def _point_of(row: Row) -> Point:
    values = [row[name] for name in Point._fields]
    return Point(tuple(values[0]), *values[1:])


def speed_ups(place: str, rows: list[Row]) -> list[tuple[Point, float, str]]:
    """(point, how many times as fast as the best peer, which one) wherever both were timed."""
    of_point = {_point_of(row): row["microseconds"] for row in rows}
    found = []
    for point, microseconds in of_point.items():
        peers = dict(microseconds)
        ours = peers.pop(OURS, None)
        if PLANES[place].dense:
            peers |= of_point.get(dense_of(point), {})
        if ours is not None and peers:
            best = min(peers, key=peers.__getitem__)
            found.append((point, peers[best] / ours, best))
    return found


def summary(place: str, rows: list[Row], most: int = 20) -> str:
    """How the speed-ups are spread, by block size and density, and where we lose most."""
    found = speed_ups(place, rows)
    lines = [f"{len(found)} products beside the fastest peer of each"]
    faults = [row for row in rows if row["faults"]]
    lines += [f"  not right: {_point_of(row)}: {row['faults']}" for row in faults]
    for size, density in every(PLANES[place].block_sizes, PLANES[place].densities):
        ratios = [ratio for point, ratio, _ in found if point[1:3] == (size, density)]
        if ratios:
            lost = sum(ratio < 1 for ratio in ratios)
            lines.append(
                f"  B = {size}, density {density:g}: median {median(ratios):.2f} times the best "
                f"peer, least {min(ratios):.2f}, slower at {lost} of {len(ratios)}"
            )
    for point, ratio, peer in sorted(found, key=lambda each: each[1])[:most]:
        if ratio < 1:
            lines.append(f"  {ratio:.2f} of {peer}: {' '.join(map(str, point))}")
    return "\n".join(lines)


def draw(place: str, content: dict[str, Any], rows: list[Row], png: Path) -> None:
    """A panel for each block size and dtype: the median over features and products, by batch and
    density; blue where we are faster than every peer, red where one is, crossed where one is at
    some of the products; grey where nobody measured."""
    from matplotlib.colors import LogNorm

    plane, found = PLANES[place], speed_ups(place, rows)
    kinds = [kind for kind in plane.numbers if any(p[4:6] == kind for p, *_ in found)]
    shape = max(len(kinds), 1), len(plane.block_sizes)
    figure = matplotlib_figure().Figure(figsize=(3.3 * shape[1], 2.6 * shape[0] + 0.8))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(*shape, squeeze=False, sharex=True, sharey=True)
    norm, image = LogNorm(*ENDS), None
    for (i, kind), (j, size) in every(enumerate(kinds), enumerate(plane.block_sizes)):
        cells = np.full((len(plane.densities), len(plane.batches)), np.nan)
        panel = panels[i, j]
        panel.set_facecolor("#b0b0b0")  # not measured
        for (a, density), (b, batch) in every(enumerate(plane.densities), enumerate(plane.batches)):
            here = [r for p, r, _ in found if p[1:6] == (size, density, batch, *kind)]
            if here:
                cells[a, b] = median(here)
                if min(here) < 1:
                    panel.plot(b, a, "x", color="black", markersize=3, markeredgewidth=0.7)
        image = panel.imshow(cells, cmap="RdBu", norm=norm, origin="lower", aspect="auto")
        panel.set_xticks(range(len(plane.batches)), plane.batches, rotation=90, fontsize=7)
        panel.set_yticks(range(len(plane.densities)), [f"{d:g}" for d in plane.densities])
        precise = {"highest": "", "high": ", tf32"}[kind[1]]
        panel.set_title(f"{kind[0]}{precise}, B = {size}", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("batch")
    for panel in panels[:, 0]:
        panel.set_ylabel("density")
    if image is not None:
        ticks = [1 / 4, 1 / 2, 1, 2, 4]
        bar = figure.colorbar(image, ax=panels, ticks=ticks, extend="both", fraction=0.02, pad=0.01)
        bar.minorticks_off()
        bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
        bar.set_label("times as fast")
    machine = content["machine"].partition(";")[0]
    figure.suptitle(
        f"How many times as fast as the fastest peer, the median of the products of a cell; "
        f"x: slower at some\n{len(found)} products, {machine}",
        fontsize=10,
    )
    figure.savefig(png, dpi=150)
