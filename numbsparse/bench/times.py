"""What `auto` goes by: the factors of `ops.times` and `conv.costs`, fitted to what was drawn.

What the choice costs at other points is drawn and measured by `held_out`.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from itertools import product as every
from math import inf, log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from numbsparse.bench import held_out
from numbsparse.bench.contestants import OURS
from numbsparse.bench.factors import Timed, fitted, fitted_to_choose
from numbsparse.bench.held_out import Found
from numbsparse.bench.measure import Case, measure
from numbsparse.bench.peers import CUDNN
from numbsparse.bench.problem import APART, Problem, random
from numbsparse.bench.timing import require_times
from numbsparse.files import write_json
from numbsparse.kernels import conv
from numbsparse.kernels.conv import costs
from numbsparse.kernels.conv.costs import UNFOLDED
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.machine import describe
from numbsparse.ops import choice, times

SLOW = "k1_naive"  # nowhere the fastest
COUNT = 3000  # of products that are drawn
# Of convolutions.
SIZES = (8, 16, 32, 64)
TAPS = ((3, 1), (3, 1), (3, 1), (3, 2), (5, 1), (1, 2), (1, 1))  # along each axis; the stride
DENSEST = 0.1, 0.25  # of blocks of 8, and of larger ones
MOST = 2**25  # numbers in an operand
FITTED = 16  # convolutions of each block size and numbers
FEW_BLOCKS, SHOWN = 0.1, ("speed_up", "regret")  # in the table
SECONDS = 0.01  # that each takes: with less a GPU that waited for the host is not warmed up


def run(
    json_file: Path | None,
    points: int,
    only: str | None = None,
    minutes: float = inf,
    jobs: int = 1,
    seed: int = 0,
    of_images: bool = False,
) -> None:
    """Fit factors to what is drawn, into a file, or say what the choice costs at random points.

    Of one rung alone, the file keeps the factors of the others; without a file that rung is forced
    at the points, as on a card that has none above it.
    """
    require_times()
    if json_file is not None:
        content = fit(jobs, only, of_images, minutes)
        if only is not None:
            known = json.loads(json_file.read_text(encoding="utf-8"))["factors"]
            content["factors"] = known | content["factors"]
        write_json(json_file, content, 2)
        for module in (times, costs):
            module.measured.cache_clear()
        choice.forget()
    if points:
        rng = np.random.default_rng(seed)
        forced = only if json_file is None else None
        all_drawn = drawn(rng) if of_images else held_out.drawn(rng, forced)
        some = islice(all_drawn, points * len(PRODUCTS))
        found = list(held_out.found(some, minutes * 60, jobs))
        print(held_out.summary(found))
        if of_images:
            print(by_kind(found))


def fit(jobs: int, only: str | None, of_images: bool, minutes: float = inf) -> dict[str, Any]:
    """What `ops.times` or `costs` reads: of drawn ones, that no seed of the command draws."""
    count = FITTED * len(SIZES) * len(APART) * len(conv.PRODUCTS) if of_images else COUNT
    rng = np.random.default_rng([0, 1 if of_images else 2])
    points = islice(drawn(rng) if of_images else held_out.drawn(rng, only, True), count)
    found = list(held_out.found(points, minutes * 60, jobs, *([count] if of_images else [])))
    print(held_out.summary(found, most=0), flush=True)
    return (content_of_images if of_images else content_of)(found)


def content_of(all_found: Iterable[Found]) -> dict[str, Any]:
    """The factors by case, with where they were measured; float32 has its own of each rung."""
    timed = []
    for point, each in enumerate(all_found):
        of, product = each.of.problem, each.of.product
        numbers = product, of.block_size, of.dtype
        sizes = times.sizes_of(*numbers, of.batch, of.layout, each.of.feature_major)
        for name in filter(each.seconds.__contains__, times.OF_RUNG):  # in their order
            case = times.case_of(name, *numbers, of.precision)
            timed.append(Timed(case, times.counts(name, sizes), each.seconds[name] * 1e6, point))
    factors = fitted_to_choose(timed) if timed else {}
    return _told("python -m numbsparse times --json numbsparse/ops/times.json --points 0", factors)


def _told(command: str, factors: dict[str, np.ndarray]) -> dict[str, Any]:
    """Four digits of each."""
    of_case = {
        case: [float(f"{factor:.4g}") for factor in factors[case]] for case in sorted(factors)
    }
    return {"machine": describe("cuda"), "command": command, "factors": of_case}


class Convolution(NamedTuple):
    """A product of a drawn one."""

    problem: Problem
    product: str

    def __str__(self) -> str:
        return f"{self.product} {self.problem}"

    def named(self) -> list[str]:
        """The rungs on this card that serve; of k2 by each one that may multiply."""
        of, (product, size, dtype, precision, *sizes) = self.problem, self.sizes
        case = product, size, dtype, "cuda", of.batch, precision
        call = of.window, of.in_features, of.out_features
        rungs = [name for name, place in conv.RUNGS.items() if place == "cuda" and name != SLOW]
        names = [name for name in rungs if conv.rung(name).unsupported(*case, *call) is None]
        if UNFOLDED in names:
            names.remove(UNFOLDED)
            by = costs.multipliers(product, size, dtype, precision, *sizes)
            names += sorted(f"{UNFOLDED}/{name}" for _, name in by)
        return names

    @property
    def taken(self) -> str:
        """By a call; OURS where that is a product of the ladder: one tap sees each pixel itself."""
        identity = self.problem.window.is_identity
        return OURS if identity else min(self.named(), key=self.expected)

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What `costs` takes of it, from the product on."""
        of = self.problem
        features = of.in_features, of.out_features, of.layout.n_blocks
        sizes = costs.sizes_of(self.product, of.batch, of.window, *features)
        return self.product, of.block_size, of.x.dtype, of.precision, *sizes

    def expected(self, name: str) -> float:
        return costs.microseconds(name, *self.sizes)

    def cases(self) -> list[Case]:
        """Each rung that serves; they have kernels of their own."""
        names = {*self.named(), self.taken}
        return [Case(self.problem, self.product, name, (), {}) for name in sorted(names)]

    def measured(self) -> Found:
        """Each rung that serves, beside cuDNN's dense convolution."""
        names, of = sorted({*self.named(), self.taken}), self.problem
        row = measure(of, self.product, ",".join(names), seconds=SECONDS)
        features = of.in_features, of.out_features
        all_blocks = partial(random, features, of.block_size, 1, of.taps_along)
        dense = replace(of, given=all_blocks)
        beside = measure(dense, self.product, "", (CUDNN,), seconds=SECONDS)
        faults = row["not_timed"] | beside["not_timed"]
        return Found(self, row["seconds"], self.taken, beside["seconds"], np.nan, faults)


def drawn(rng: np.random.Generator) -> Iterator[Convolution]:
    """Products without end; block sizes and numbers, which have kernels of their own, in turn."""
    for size, numbers in cycle(every(SIZES, APART)):
        unit = max(size, 32)
        n_in, n_out = (int(2 ** rng.uniform(6, 10)) // unit * unit for _ in range(2))
        side, (taps, stride) = int(2 ** rng.uniform(3, log2(65))), TAPS[rng.integers(len(TAPS))]
        batch = min(int(2 ** rng.uniform(0, log2(65))), MOST // (side**2 * max(n_in, n_out)))
        density = 2 ** rng.uniform(-5.6, log2(DENSEST[size > 8]))
        density = max(density, size**2 / (n_in * n_out))  # a block at least
        how = *numbers, "cuda", side, taps, stride
        problem = Problem(partial(random, (n_in, n_out), size, density, taps), size, batch, *how)
        yield from (Convolution(problem, product) for product in conv.PRODUCTS)


def by_kind(all_found: Iterable[Found]) -> str:
    """Of each dtype and precision: beside cuDNN, and what the choice of a rung costs."""
    lines, kinds = [], dict[str, list[Found]]()
    for each in all_found:
        of = each.of.problem
        if each.speed_up == each.speed_up:
            kinds.setdefault(f"{of.dtype} {of.precision}", []).append(each)
    for numbers, some in sorted(kinds.items()):
        ratios, regrets = (np.array([getattr(of, what) for of in some]) for what in SHOWN)
        few = np.array([of.of.problem.layout.density <= FEW_BLOCKS for of in some])
        lines.append(
            f"{numbers}: {len(some)} products, {(ratios < 1).sum()} lost, least {ratios.min():.2f},"
            f" median {np.median(ratios):.2f}, at density {FEW_BLOCKS} below 1.5 "
            f"{(ratios[few] < 1.5).sum()} of {few.sum()}, choice over 1.05 {(regrets > 1.05).sum()}"
        )
    return "\n".join(lines)


def content_of_images(all_found: Iterable[Found]) -> dict[str, Any]:
    """The factors by case, with where they were measured."""
    timed: dict[tuple[str, ...], list[tuple[str, tuple[float, ...]]]] = {}
    for each in all_found:
        product, size, dtype, precision, *sizes = each.of.sizes
        for name in filter(OURS.__ne__, each.seconds):
            case = costs.case_of(name, product, size, dtype, precision)
            row = *costs.counts(name, product, size, dtype, *sizes), each.seconds[name] * 1e6
            timed.setdefault(tuple(case.split()[:2]), []).append((case, row))
    factors: dict[str, np.ndarray] = {}
    for of_rung in timed.values():
        cases, rows = zip(*of_rung, strict=True)
        counts, took = np.split(np.array(rows), [-1], 1)
        factors |= fitted(cases, counts, took)
    file = "numbsparse/kernels/conv/costs.json"
    return _told(f"python -m numbsparse times --conv --json {file} --points 0", factors)
