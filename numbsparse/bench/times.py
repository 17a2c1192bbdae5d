"""What `auto` goes by: times of products on the grid of `ops.times`, factors of `conv.costs`.

The factors, by which a rung of convolutions is chosen, are fitted to drawn ones.

What the choice costs at other points is drawn and measured by `held_out`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from itertools import product as every
from math import inf, log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from numbsparse.bench import held_out
from numbsparse.bench.contestants import named
from numbsparse.bench.held_out import Found
from numbsparse.bench.measure import Case, measure
from numbsparse.bench.peers import CUDNN
from numbsparse.bench.problem import APART, BLOCK_SIZES, Problem, matrices, random
from numbsparse.bench.results import Row
from numbsparse.bench.timing import require_times
from numbsparse.files import write_json
from numbsparse.kernels import conv
from numbsparse.kernels.conv import costs
from numbsparse.kernels.conv.costs import UNFOLDED
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.machine import describe
from numbsparse.ops import choice, times

FEATURES = (128, 512, 1024, 2048, 4096, 8192)
DENSITIES = (0.02, 0.1, 0.3)
BATCHES = (1, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 8192)
SLOW = "k1_naive"  # nowhere the fastest, of products and of convolutions
PLAIN = "k3_registers"  # nowhere but with blocks of 8
# Of convolutions.
SIZES = (8, 16, 32, 64)
TAPS = ((3, 1), (3, 1), (3, 1), (3, 2), (5, 1), (1, 2))  # along each axis, and the stride
DENSEST = 0.1, 0.25  # of blocks of 8, and of larger ones
MOST = 2**25  # numbers in an operand
FITTED = 16  # convolutions of each block size and numbers
SECONDS = 0.01  # that each takes: with less a GPU that waited for the host is not warmed up
LAUNCH = 2.0  # microseconds that one takes at least
USUAL = 4.0, 8.0, 1.0, 0.3, 0.5  # factors: most are within some times of these
HOLD, ALIKE = 0.03, 1.0  # how much those of a rung are held there, and its cases' to each other


def run(
    json_file: Path | None,
    points: int,
    only: str | None = None,
    minutes: float = inf,
    jobs: int = 1,
    seed: int = 0,
    of_images: bool = False,
) -> None:
    """Measure the grid into a file, or say what the choice costs at so many random points.

    Of one rung alone, the file keeps the times of the others; without a file that rung is forced at
    the points, as on a card that has none above it. Of convolutions, the file has no times: the
    factors that fit some.
    """
    require_times()
    if json_file is not None:
        content = fit(jobs) if of_images else grid(FEATURES, DENSITIES, BATCHES, only)
        if only is not None:
            content["microseconds"] = _added(json_file, content["microseconds"], only)
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


def _added(json_file: Path, found: dict[str, Any], only: str) -> dict[str, Any]:
    """The times in the file, with those of one rung as they are found now."""
    known = json.loads(json_file.read_text(encoding="utf-8"))["microseconds"]
    for case, of_rung in found.items():
        others = {name: times for name, times in known.get(case, {}).items() if name != only}
        known[case] = others | of_rung
    return known  # type: ignore[no-any-return]


def grid(
    features: tuple[int, ...],
    densities: tuple[float, ...],
    batches: tuple[int, ...],
    only: str | None = None,
) -> dict[str, Any]:
    """What `ops.times` reads: microseconds, None where a rung does not serve."""
    shape = len(features), len(densities), len(batches)
    found: dict[str, dict[str, np.ndarray]] = {}
    for (i, width), (j, density) in every(enumerate(features), enumerate(densities)):
        for size, numbers, (k, batch) in every(BLOCK_SIZES, APART, enumerate(batches)):
            some = max(density, (size / width) ** 2)  # a block at least
            problem = matrices(width, size, some, batch, *numbers)
            for product in PRODUCTS:
                of_rung = found.setdefault(times.case_of(product, size, *numbers), {})
                for name, seconds in timed(problem, product, only)["seconds"].items():
                    of_rung.setdefault(name, np.full(shape, np.nan))[i, j, k] = seconds
        print(f"{width} features, density {density}", flush=True)
    return {
        "machine": describe("cuda"),
        "command": "python -m numbsparse times --json numbsparse/ops/times.json --points 0",
        "features": features,
        "densities": densities,
        "batches": batches,
        "microseconds": {
            case: {  # three digits of each
                name: [None if s != s else float(f"{s * 1e6:.3g}") for s in array.ravel().tolist()]
                for name, array in of_rung.items()
            }
            for case, of_rung in found.items()
        },
    }


def timed(problem: Problem, product: str, only: str | None = None) -> Row:
    """Of each rung that may be the fastest, and is timed for that; or of one, as it is."""
    left_out = [SLOW] if problem.block_size == 8 else [SLOW, PLAIN]
    left_out += [times.DENSE] if problem.in_features > times.WIDE else []
    serving = [name for name in named(problem, product, "all") if name in RUNGS]
    names = [name for name in serving if name not in left_out and only in (None, name)]
    return measure(problem, product, ",".join(names), seconds=0.0)


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
        return [Case(self.problem, self.product, name, (), {}) for name in self.named()]

    def measured(self) -> Found:
        """Each rung that serves, beside cuDNN's dense convolution."""
        names, of = self.named(), self.problem
        row = measure(of, self.product, ",".join(names), seconds=SECONDS)
        features = of.in_features, of.out_features
        all_blocks = partial(random, features, of.block_size, 1, of.taps_along)
        dense = replace(of, given=all_blocks)
        beside = measure(dense, self.product, "", (CUDNN,), seconds=SECONDS)
        chosen, faults = min(names, key=self.expected), row["not_timed"] | beside["not_timed"]
        return Found(self, row["seconds"], chosen, beside["seconds"], np.nan, faults)


def fit(jobs: int) -> dict[str, Any]:
    """What `costs` reads: of drawn ones, that no seed of the command draws."""
    count = FITTED * len(SIZES) * len(APART) * len(conv.PRODUCTS)
    points = islice(drawn(np.random.default_rng([0, 1])), count)
    found = list(held_out.found(points, inf, jobs, count))
    print(held_out.summary(found, most=0), flush=True)
    return content(found)


def drawn(rng: np.random.Generator) -> Iterator[Convolution]:
    """Products without end; block sizes and numbers, which have kernels of their own, in turn."""
    for size, numbers in cycle(every(SIZES, APART)):
        unit = max(size, 32)
        n_in, n_out = (int(2 ** rng.uniform(6, 10)) // unit * unit for _ in range(2))
        side, (taps, stride) = int(2 ** rng.uniform(2, 6)), TAPS[rng.integers(len(TAPS))]
        batch = min(int(2 ** rng.uniform(0, 7)), MOST // (side**2 * max(n_in, n_out)))
        density = 2 ** rng.uniform(-5.6, log2(DENSEST[size > 8]))
        density = max(density, size**2 / (n_in * n_out))  # a block at least
        how = *numbers, "cuda", side, taps, stride
        problem = Problem(partial(random, (n_in, n_out), size, density, taps), size, batch, *how)
        yield from (Convolution(problem, product) for product in conv.PRODUCTS)


def by_kind(all_found: Iterable[Found]) -> str:
    """How many times as fast as cuDNN, of each block size and numbers."""
    kinds: dict[tuple[str, int], list[float]] = {}
    for each in all_found:
        of = each.of.problem
        if each.speed_up == each.speed_up:
            kind = f"{of.dtype} {of.precision}", of.block_size
            kinds.setdefault(kind, []).append(each.speed_up)
    return "\n".join(
        f"{numbers} B={size}: {len(ratios)} products, least {min(ratios):.2f}, a tenth below "
        f"{np.quantile(ratios, 0.1):.2f}, median {np.median(ratios):.2f}, not slower at "
        f"{np.mean(np.array(ratios) >= 1):.0%}"
        for (numbers, size), ratios in sorted(kinds.items())
    )


def content(all_found: Iterable[Found]) -> dict[str, Any]:
    """The factors by case, with where they were measured."""
    timed: dict[tuple[str, ...], list[tuple[str, tuple[float, ...]]]] = {}
    for each in all_found:
        product, size, dtype, precision, *sizes = each.of.sizes
        for name, seconds in each.seconds.items():
            case = costs.case_of(name, product, size, dtype, precision)
            row = *costs.counts(name, product, size, dtype, *sizes), seconds * 1e6
            timed.setdefault(tuple(case.split()[:2]), []).append((case, row))
    factors: dict[str, np.ndarray] = {}
    for of_rung in timed.values():
        cases, rows = zip(*of_rung, strict=True)
        factors |= fitted(cases, *np.split(np.array(rows), [-1], 1))
    return {
        "machine": describe("cuda"),
        "command": "python -m numbsparse times --conv --json numbsparse/kernels/conv/costs.json "
        "--points 0",
        "factors": {
            case: [float(f"{factor:.4g}") for factor in factors[case]] for case in sorted(factors)
        },
    }


def fitted(cases: Sequence[str], counts: np.ndarray, times: np.ndarray) -> dict[str, np.ndarray]:
    """Factors by case, whose sums of (points, counts) are nearest to (points, 1) times.

    Cases are of one rung: what few points tell of one, others with its numbers or its block size
    tell too. A factor is that of the rung, times one for the numbers and one for the size, which
    are held near 1. All are positive, and that of launches, the first, is LAUNCH or more. What no
    point tells stays near what is USUAL. Distances are in logarithms.
    """
    (kind,) = {tuple(case.split()[:2]) for case in cases}
    numbers, sizes = (sorted(set(words)) for words in zip(*map(parts_of, cases), strict=True))
    each = [" ".join((*kind, *of)) for of in every(numbers, sizes)]  # those not timed, too
    words = numbers + sizes
    shared = np.array([[1] + [word in parts_of(case) for word in words] for case in each])
    own = np.array([each.index(case) for case in cases])
    n_counts, n_words = counts.shape[1], 1 + len(words)
    least = np.where(np.arange(n_counts) == 0, LAUNCH, 0.0)
    hold = np.where(np.arange(n_words) == 0, HOLD, ALIKE)[:, None]

    def factors(logs: np.ndarray) -> np.ndarray:
        return np.maximum(np.exp(shared @ logs.reshape(n_words, -1)) * USUAL[:n_counts], least)

    def off(logs: np.ndarray) -> np.ndarray:
        ratios = (counts * factors(logs)[own]).sum(1) / times[:, 0]
        return np.concatenate([np.log(ratios), (hold * logs.reshape(n_words, -1)).ravel()])

    found = least_squares(off, np.zeros(n_words * n_counts)).x
    return dict(zip(each, factors(found), strict=True))


def parts_of(case: str) -> tuple[str, str]:
    """The numbers and the block size."""
    _, _, *numbers, size = case.split()
    return " ".join(numbers), size
