"""Factors of counts, fitted to times: `ops.times` and `conv.costs` are made of these.

A factor of a case is that of its rung, times one for the numbers and one for the block size, which
are held near 1: so what few points tell of one case, others of its rung tell too.
"""

from collections.abc import Iterable, Sequence
from itertools import product as every
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares, minimize

LAUNCH = 2.0  # microseconds that one takes at least
USUAL = 4.0, 8.0, 1.0, 0.3, 0.5, 1.0  # factors of convolutions: most are within some times of these
HOLD, ALIKE = 0.03, 1.0  # how much those of a rung are held there, and its cases' to each other
# Of products: what is usual of a launch; how much factors are held, of a rung, and of launches and
# cases. Differences of logarithms that times are off by, and among which a choice is by chance; the
# most that is lost by a choice, and how much that weighs beside the times.
FIRST, HELD, HELD_ALIKE = 1.5, 0.5, 25.0
NEAR, BY_CHANCE, MOST_LOST, LOST = 0.1, 0.05, 0.5, 15.0
STEPS, FARTHEST = {"maxiter": 1000, "maxcor": 30}, (-6.0, 6.0)  # logarithms


class Timed(NamedTuple):
    """What a rung did at a point, and the microseconds that it took."""

    case: str
    counts: Sequence[float]
    took: float
    point: int


def fitted_to_choose(timed: Sequence[Timed]) -> dict[str, np.ndarray]:
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
    rungs: dict[str, list[Timed]] = {}
    for of in timed:
        rungs.setdefault(rung_of(of.case), []).append(of)
    usual = {name: usual_of(rung) for name, rung in rungs.items()}
    places: dict[tuple[str, str, int], int] = {}  # of what factors are made of
    made: dict[str, np.ndarray] = {}
    for name, rung in rungs.items():
        for case in all_cases({of.case for of in rung}):
            words = "", *parts_of(case)
            keys = [[(name, word, i) for word in words] for i in range(usual[name].size)]
            made[case] = np.array(
                [[places.setdefault(key, len(places)) for key in of] for of in keys]
            )
    held = np.array([HELD if i and not word else HELD_ALIKE for _, word, i in places])
    own = np.concatenate([made[of.case] for of in timed])
    counts = np.concatenate([np.multiply(of.counts, usual[rung_of(of.case)]) for of in timed])
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
    return {case: np.exp(logs[at].sum(1)) * usual[rung_of(case)] for case, at in made.items()}


def rung_of(case: str) -> str:
    """With the kind of product, and float32 apart."""
    return " ".join(case.split()[:3])


def usual_of(rung: Sequence[Timed]) -> np.ndarray:
    counts = np.array([of.counts for of in rung], float)
    most, took = counts.max(0), np.median([of.took for of in rung])
    found: np.ndarray = np.maximum(np.median(counts, 0), np.where(most, most / 20, 1))
    return np.append(FIRST, (took / most.size / found)[1:])


def fitted(cases: Sequence[str], counts: np.ndarray, times: np.ndarray) -> dict[str, np.ndarray]:
    """Factors by case, whose sums of (points, counts) are nearest to (points, 1) times.

    Cases are of one rung. All factors are positive, and that of launches, the first, is LAUNCH or
    more. What no point tells stays near what is USUAL. Distances are in logarithms.
    """
    each = all_cases(cases)
    numbers, sizes = zip(*map(parts_of, each), strict=True)
    words = sorted(set(numbers)) + sorted(set(sizes))
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


def all_cases(cases: Iterable[str]) -> list[str]:
    """Of one rung with these numbers and block sizes, those not timed, too."""
    (kind,) = {tuple(case.split()[:2]) for case in cases}
    numbers, sizes = (sorted(set(words)) for words in zip(*map(parts_of, cases), strict=True))
    return [" ".join((*kind, *of)) for of in every(numbers, sizes)]


def parts_of(case: str) -> tuple[str, str]:
    """The numbers and the block size."""
    _, _, *numbers, size = case.split()
    return " ".join(numbers), size
