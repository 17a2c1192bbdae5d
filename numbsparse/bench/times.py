"""What `auto` goes by: the factors of `kernels.times` and `conv.costs`, fitted to what was drawn.

What the choice costs at other points is drawn and measured by `held_out`. A factor of a case is
that of its rung, times one for the numbers and one for the block size, which are held near 1: so
what few points tell of one case, others of its rung tell too.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from itertools import product as every
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

from numbsparse.bench import held_out
from numbsparse.bench.held_out import Found
from numbsparse.bench.timing import require_times
from numbsparse.files import write_json
from numbsparse.kernels import times
from numbsparse.kernels.conv import costs
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.machine import describe
from numbsparse.ops import choice

COUNT = 3000  # of products that are drawn
FITTED = 16  # convolutions of each block size and numbers
# What is usual of a launch; how much factors are held, of a rung, and of launches and cases.
# Differences of logarithms that times are off by, and among which a choice is by chance; the most
# that is lost by a choice, and how much that weighs beside the times.
FIRST, HELD, HELD_ALIKE, ALIKE_OF_IMAGES = 1.5, 0.5, 25.0, 3.0
NEAR, BY_CHANCE, MOST_LOST, LOST = 0.1, 0.05, 0.5, 15.0
STEPS, FARTHEST = {"maxiter": 1000, "maxcor": 30}, (-6.0, 6.0)  # logarithms


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
        all_drawn = held_out.convolutions(rng) if of_images else held_out.drawn(rng, forced)
        some = islice(all_drawn, points * len(PRODUCTS))
        found = list[Found]()
        with suppress(KeyboardInterrupt):  # then of those until now
            for each in said(held_out.found(some, minutes * 60, jobs)):
                found.append(each)
        print(held_out.summary(found))
        if of_images:
            print(held_out.by_kind(found))


def fit(jobs: int, only: str | None, of_images: bool, minutes: float = inf) -> dict[str, Any]:
    """What `kernels.times` or `costs` reads: of drawn ones, that no seed of the command draws."""
    count = FITTED * len(held_out.KINDS) * len(PRODUCTS) if of_images else COUNT
    rng = np.random.default_rng([0, 1 if of_images else 2])
    all_drawn = held_out.convolutions(rng) if of_images else held_out.drawn(rng, only, True)
    ahead = [count] if of_images else []
    found = list(said(held_out.found(islice(all_drawn, count), minutes * 60, jobs, *ahead)))
    print(held_out.summary(found, most=0), flush=True)
    return content_of(found, of_images)


def said(all_found: Iterable[Found]) -> Iterator[Found]:
    """Each on a line when it is measured."""
    for each in all_found:
        print(each, flush=True)
        yield each


def content_of(all_found: Iterable[Found], of_images: bool = False) -> dict[str, Any]:
    """The factors by case, four digits of each, with where they were measured."""
    timed = [
        Timed(case, counts, each.seconds[name] * 1e6, point)
        for point, each in enumerate(all_found)
        for name, case, counts in each.of.counted(each.seconds)
    ]
    alike = ALIKE_OF_IMAGES if of_images else HELD_ALIKE
    factors = fitted_to_choose(timed, alike) if timed else {}
    of_case = {
        case: [float(f"{factor:.4g}") for factor in factors[case]] for case in sorted(factors)
    }
    file = "--conv --json numbsparse/kernels/conv/costs.json"
    file = file if of_images else "--json numbsparse/kernels/times.json"
    command = f"python -m numbsparse times {file} --points 0"
    return {"machine": describe("cuda"), "command": command, "factors": of_case}


class Timed(NamedTuple):
    """What a rung did at a point, and the microseconds that it took."""

    case: str
    counts: Sequence[float]
    took: float
    point: int


def fitted_to_choose(timed: Sequence[Timed], alike: float = HELD_ALIKE) -> dict[str, np.ndarray]:
    """Factors by case, with which the rung that is expected to be the fastest loses least.

    Times are fitted first, those near the fastest of a point more than others. Then what a choice
    loses counts as well, a choice by chance among rungs that are expected to take nearly as long:
    so times are most exact where that decides, and a rung that is rarely the fastest is rarely
    taken. Counts are scaled to what is usual of a rung, whose parts of the time would be equal.
    """
    took, points = np.log([of.took for of in timed]), np.array([of.point for of in timed])
    least = np.full(points.max() + 1, np.inf)
    np.minimum.at(least, points, took)
    behind = took - least[points]
    weights, lost = np.exp(-2 * behind), np.minimum(behind, MOST_LOST)
    usual: dict[str, np.ndarray] = {}
    places: dict[tuple[str, str, int], int] = {}  # of what factors are made of
    made: dict[str, np.ndarray] = {}
    for name, rung in by_rung(timed, 3).items():
        of_rung = usual_of(rung)
        for case in all_cases({of.case for of in rung}):
            usual[case], words = of_rung, ("", *parts_of(case))
            keys = [[(name, word, i) for word in words] for i in range(of_rung.size)]
            made[case] = np.array(
                [[places.setdefault(key, len(places)) for key in of] for of in keys]
            )
    held = np.array([HELD if i and not word else alike for _, word, i in places])
    own = np.concatenate([made[of.case] for of in timed])
    counts = np.concatenate([np.multiply(of.counts, usual[of.case]) for of in timed])
    rows = np.repeat(np.arange(len(timed)), [len(of.counts) for of in timed])

    def loss(logs: np.ndarray, of_choice: float) -> tuple[float, np.ndarray]:
        parts = counts * np.exp(logs[own].sum(1))
        total = np.bincount(rows, parts)
        off = (np.log(total) - took) / NEAR
        far = np.sqrt(1 + off**2)
        chance = np.exp(-(off * NEAR + behind) / BY_CHANCE)
        chance /= np.bincount(points, chance)[points]
        of_point = np.bincount(points, chance * lost)
        slope = weights * off / far / NEAR
        slope -= of_choice * chance * (lost - of_point[points]) / BY_CHANCE
        of_parts = (slope / total)[rows] * parts
        slopes = sum(np.bincount(at, of_parts, logs.size) for at in own.T) + 2 * held * logs
        return (weights * (far - 1)).sum() + of_choice * of_point.sum() + held @ logs**2, slopes

    logs = np.zeros(len(places))
    for of_choice in (0.0, LOST):
        how: Any = {"jac": True, "bounds": [FARTHEST] * logs.size, "options": STEPS}
        logs = minimize(loss, logs, of_choice, "L-BFGS-B", **how).x
    return {case: np.exp(logs[at].sum(1)) * usual[case] for case, at in made.items()}


def by_rung(timed: Sequence[Timed], words: int) -> dict[str, list[Timed]]:
    """With the kind of product: two words of a case; float32 apart: three."""
    rungs: dict[str, list[Timed]] = {}
    for of in timed:
        rungs.setdefault(" ".join(of.case.split()[:words]), []).append(of)
    return rungs


def usual_of(rung: Sequence[Timed]) -> np.ndarray:
    counts = np.array([of.counts for of in rung], float)
    most, took = counts.max(0), np.median([of.took for of in rung])
    found: np.ndarray = np.maximum(np.median(counts, 0), np.where(most, most / 20, 1))
    return np.append(FIRST, (took / most.size / found)[1:])


def all_cases(cases: Collection[str]) -> list[str]:
    """Of one rung with these numbers and block sizes, those not timed, too."""
    (kind,) = {tuple(case.split()[:2]) for case in cases}
    numbers, sizes = (sorted(set(words)) for words in zip(*map(parts_of, cases), strict=True))
    return [" ".join((*kind, *of)) for of in every(numbers, sizes)]


def parts_of(case: str) -> tuple[str, str]:
    """The numbers and the block size."""
    _, _, *numbers, size = case.split()
    return " ".join(numbers), size
