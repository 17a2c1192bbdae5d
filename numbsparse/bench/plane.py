"""A map of the whole plane: our products beside the peers' at every size, batch and density.

A point is a layout's features, block size and density, a batch and a dtype; each of its products is
a row, checked and timed. All points of a place are in one fixed random order, so that any number of
them is spread over the whole plane; a run goes on where the file ends, for as long as it is given.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import product as every
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from numbsparse.bench.contestants import CUBLAS, ON_CPU, OURS, TRITON
from numbsparse.bench.measure import Case, in_time
from numbsparse.bench.problem import BLOCK_SIZES, NUMBERS, matrices
from numbsparse.bench.results import Row, card_of
from numbsparse.bench.timing import require_times
from numbsparse.files import known_as, write_json
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.machine import describe

Found = TypeVar("Found")
VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS = {"cuda": 0.02, "cpu": 0.002}  # what a product is timed for
AHEAD = 64  # products that a process compiles, between two rounds of measuring
SAVED = 10.0  # seconds between two writings of the file, when it is said how many there are


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
        sizes=(*((n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 12288)), (4096, 14336)),
        batches=(
            *(1, 8, 16, 32, 48, 64, 65, 96, 128, 192, 256, 384, 512, 768),
            *(1024, 2048, 4096, 8192),
        ),
        block_sizes=BLOCK_SIZES,
        densities=(0.01, 0.02, 0.05, 0.1, 0.25, 0.5),
        numbers=NUMBERS,
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

    def case(self, place: str, kernels: str = "auto") -> Case:
        """Ours beside the peers of the place; of the dense product, those alone who compute it."""
        problem, plane = matrices(*self[:-1], place=place), PLANES[place]
        if self.density < 1 or plane.dense is None:
            return Case(problem, self.product, kernels, plane.beside, self._asdict())
        return Case(problem, self.product, "", (plane.dense,))

    @property
    def dense(self) -> "Point":
        """The dense product of as many features and rows."""
        return self._replace(block_size=32, density=1.0)


COLUMNS = [*Point._fields, "rung", "microseconds", "faults"]


def run(
    place: str,
    json_file: Path | None,
    minutes: float,
    jobs: int = 1,
    dtype: str | None = None,
    cards: int = 1,
    kernels: str = "auto",
    join: Iterable[Path] = (),
) -> tuple[str, list[Row]]:
    """Go on with the map for so long; the machine, and all rows.

    `jobs` processes compile ahead for each of so many GPUs; `dtype` leaves the other ones out.
    `kernels` are "auto", or names with commas: ours is the fastest of these that serve. Before, the
    products that this map lacks are taken from the maps of `join`.
    """
    if cards > 1 and place == "cpu":
        raise ValueError(f"{cards} cards: the CPU's map takes one process")
    if dtype not in (None, *(dtypes := dict(PLANES[place].numbers))):
        raise ValueError(f"dtype takes {', '.join(dtypes)} with place={place}, got {dtype}")
    here = ["auto", *(name for name, of in RUNGS.items() if of == place)]
    if unknown := [name for name in kernels.split(",") if name not in here]:
        raise ValueError(f"kernels takes {', '.join(here)} with place={place}, got {unknown[0]}")
    (machine, rows), written = known(place, json_file, kernels), time.perf_counter()
    for file in join:
        other, more = known(place, file, kernels)
        if not more:
            raise ValueError(f"{file} holds no map to join")
        if card_of(other) != card_of(machine or other):
            raise ValueError(f"{file} is of {card_of(other)}, this map of {card_of(machine)}")
        there, machine = set(map(point_of, rows)), machine or other
        rows += [row for row in more if point_of(row) not in there]
    if minutes == 0 and not rows:
        raise ValueError(f"minutes=0 takes the file of a map to read, got {json_file}, without one")
    if place == "cuda" and minutes > 0:
        require_times()
    machine = describe(place) if minutes > 0 else machine
    content = {"machine": machine, "command": _command(place, kernels)}
    how = (place, list(rows), minutes * 60, jobs, dtype, cards, kernels)
    for row in on_each(cards, partial(measured, *how)) if cards > 1 else measured(*how):
        rows.append(row)
        if time.perf_counter() > written + SAVED:
            _write(json_file, content, rows)
            print(f"{len(rows)} products", flush=True)
            written = time.perf_counter()
    if minutes > 0 or join:
        _write(json_file, content, rows)
    return machine, rows


def known(place: str, json_file: Path | None, kernels: str = "auto") -> tuple[str, list[Row]]:
    """Where earlier runs were, and their rows."""
    if json_file is None or not json_file.exists():
        return "", []
    with known_as("map of the plane", json_file):
        content = json.loads(json_file.read_text(encoding="utf-8"))
        if content["columns"] != COLUMNS:  # new rows are written below these
            raise ValueError(f"its columns are {content['columns']}")
        rows = [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]
        machine, command = content["machine"], content["command"]
    if command != (own := _command(place, kernels)):
        raise ValueError(f"{json_file} holds another map than that of `{own}`: of `{command}`")
    return machine, rows


def _command(place: str, kernels: str) -> str:
    forced = "" if kernels == "auto" else f" --kernels {kernels}"
    return f"python -m numbsparse plane --place {place}{forced}"


def _write(json_file: Path | None, content: dict[str, Any], rows: list[Row]) -> None:
    if json_file is not None and rows:
        lines = {"columns": COLUMNS, "rows": [list(row.values()) for row in rows]}
        write_json(json_file, content | lines, 2)


def points(place: str) -> Iterator[Point]:
    """All points in an order of their own, the products of a layout, batch and dtype in a row.

    Each pass is over all of the picture, block sizes, densities and batches, of a dtype: with
    features that no pass before had there. Behind a product comes the dense one that is beside it,
    where that is timed once for all layouts.
    """
    plane, rng = PLANES[place], np.random.default_rng(0)
    cells = list(every(plane.block_sizes, plane.densities, plane.batches))
    of_cell = [rng.permutation(len(plane.sizes)) for _ in cells]
    before: set[Point] = set()
    for turn, numbers in every(range(len(plane.sizes)), plane.numbers):
        for i in rng.permutation(len(cells)):
            (size, density, batch), features = cells[i], plane.sizes[of_cell[i][turn]]
            if any(n % size for n in features):
                continue
            for product in plane.products:
                point = Point(features, size, density, batch, *numbers, product)
                yield point
                if plane.dense and point.dense not in before:
                    before.add(point.dense)
                    yield point.dense


def measured(
    place: str,
    rows: list[Row],
    seconds: float,
    jobs: int = 1,
    dtype: str | None = None,
    cards: int = 1,
    kernels: str = "auto",
    card: int = 0,
) -> Iterator[Row]:
    """The rows that are not there yet, until the time is over; other processes compile ahead.

    Each of several cards has its own block sizes and batches: hardly any kernel serves two.
    """
    done = {point_of(row) for row in rows}
    own = set(list(every(PLANES[place].block_sizes, PLANES[place].batches))[card::cards])
    left = (
        point
        for point in points(place)
        if point not in done
        and (point.block_size, point.batch) in own
        and dtype in (None, point.dtype)
    )
    cases = lambda of: [of.case(place, kernels)]  # noqa: E731
    for point in in_time(left, cases, seconds, jobs, AHEAD * jobs):
        yield _row(point, place, kernels)


def _row(point: Point, place: str, kernels: str) -> Row:
    """A point, the rung that `ops` or the clock chose, and microseconds by name; where wrong or
    failed, why."""
    case = point.case(place, kernels)
    found = case.measured(SECONDS[place])
    own = [found["auto"]] if kernels == "auto" else kernels.split(",")
    microseconds = {name: float(f"{s * 1e6:.3g}") for name, s in found["seconds"].items()}
    of_own = {name: microseconds.pop(name) for name in own if name in microseconds}
    rung = min(of_own, key=lambda name: of_own[name], default=own[0])
    if of_own:
        microseconds[OURS] = of_own[rung]
    rung = rung if case.kernels else None
    faults = {name: why for name, why in found["not_timed"].items() if name in (OURS, *own)}
    return {**point._asdict(), "rung": rung, "microseconds": microseconds, "faults": faults}


def point_of(row: Row) -> Point:
    """The product that a row is of."""
    values = [row[name] for name in Point._fields]
    return Point(tuple(values[0]), *values[1:])


def on_each(cards: int, work: Callable[[int], Iterable[Found]]) -> Iterator[Found]:
    """What `work(card)` yields for each card, as it comes; a process sees its own GPU alone.

    A process that dies ends its own part: the others go on.
    """
    spawn, before = get_context("spawn"), os.environ.get(VISIBLE)
    names = before.split(",") if before else [str(card) for card in range(cards)]
    if len(names) < cards:
        raise ValueError(f"{cards} cards, and {VISIBLE}={before} shows {len(names)}")
    ends: list[Connection] = []
    try:
        for card in range(cards):
            end, sender = spawn.Pipe(duplex=False)
            os.environ[VISIBLE] = names[card]
            spawn.Process(target=_send, args=(sender, work, card)).start()
            sender.close()
            ends.append(end)
    finally:
        os.environ.pop(VISIBLE)
        os.environ.update({VISIBLE: before} if before else {})
    while ends:
        wait(ends)
        for end in [end for end in ends if end.poll()]:
            with suppress(EOFError):
                yield end.recv()
                continue
            ends.remove(end)


def _send(sender: Connection, work: Callable[[int], Iterable[Any]], card: int) -> None:
    for found in work(card):
        sender.send(found)
