"""The factors by which a rung of convolutions is chosen, fitted to drawn ones: see `conv.costs`.

What the choice costs at other drawn ones is found as of products of matrices: see `held_out`.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import cycle, islice
from itertools import product as every
from math import inf
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from numbsparse.bench import held_out
from numbsparse.bench.held_out import Found
from numbsparse.bench.measure import Case, measure
from numbsparse.bench.problem import APART, Problem, random
from numbsparse.kernels import conv
from numbsparse.kernels.conv import costs
from numbsparse.kernels.conv.costs import UNFOLDED
from numbsparse.machine import describe

SIZES = (8, 16, 32, 64)
TAPS = ((3, 1), (3, 1), (3, 1), (3, 2), (5, 1), (1, 2))  # along each axis, and the stride
SLOW = "k1_naive"  # nowhere the fastest
MOST = 2**25  # numbers in an operand
FITTED = 16  # convolutions of each block size and numbers
LAUNCH = 2.0  # microseconds that one takes at least
HOLD = 0.05  # how much a factor is held, which the times may not tell


class Convolution(NamedTuple):
    """A product of a drawn one."""

    problem: Problem
    product: str

    def __str__(self) -> str:
        return f"{self.product} {self.problem}"

    def named(self) -> list[str]:
        """The rungs on this card that serve; of k2 by each one that may multiply."""
        of, (product, size, dtype, precision, *sizes) = self.problem, self.sizes(f"{UNFOLDED}/")
        case = product, size, dtype, "cuda", of.batch, precision
        call = of.window, of.in_features, of.out_features
        rungs = [name for name, place in conv.RUNGS.items() if place == "cuda" and name != SLOW]
        names = [name for name in rungs if conv.rung(name).unsupported(*case, *call) is None]
        if UNFOLDED in names:
            names.remove(UNFOLDED)
            by = costs.multipliers(product, size, dtype, precision, *sizes)
            names += sorted(f"{UNFOLDED}/{name}" for _, name in by)
        return names

    def sizes(self, name: str) -> tuple[Any, ...]:
        """What `costs` takes of it, from the product on."""
        of = self.problem
        features = of.in_features, of.out_features, of.layout.n_blocks
        sizes: tuple[int, ...] = costs.sizes_of(self.product, of.batch, of.window, *features)
        if "/" in name:
            sizes = costs.unfolded(self.product, of.window, *sizes)
        return self.product, of.block_size, of.x.dtype, of.precision, *sizes

    def expected(self, name: str) -> float:
        return costs.microseconds(name, *self.sizes(name))

    def cases(self) -> list[Case]:
        """Each rung that serves; they have kernels of their own."""
        return [Case(self.problem, self.product, name, (), {}) for name in self.named()]

    def measured(self) -> Found:
        names = self.named()
        row = measure(self.problem, self.product, ",".join(names), seconds=0.0)
        chosen = min(names, key=self.expected)
        return Found(self, row["seconds"], chosen, {}, np.nan, row["not_timed"])


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
        density = max(2 ** rng.uniform(-5.6, -1.6), size**2 / (n_in * n_out))  # a block at least
        how = *numbers, "cuda", side, taps, stride
        problem = Problem(partial(random, (n_in, n_out), size, density, taps), size, batch, *how)
        yield from (Convolution(problem, product) for product in conv.PRODUCTS)


def content(all_found: Iterable[Found]) -> dict[str, Any]:
    """The factors by case, with where they were measured."""
    timed: dict[str, list[tuple[float, ...]]] = {}
    for each in all_found:
        for name, seconds in each.seconds.items():
            product, size, dtype, precision, *sizes = each.of.sizes(name)
            case = costs.case_of(name, product, size, dtype, precision)
            row = *costs.counts(name, product, size, dtype, *sizes), seconds * 1e6
            timed.setdefault(case, []).append(row)
    factors = {case: fitted(*np.split(np.array(rows), [-1], 1)) for case, rows in timed.items()}
    return {
        "machine": describe("cuda"),
        "command": "python -m numbsparse times --conv --json numbsparse/kernels/conv/costs.json "
        "--points 0",
        "factors": {
            case: [float(f"{factor:.4g}") for factor in factors[case]] for case in sorted(factors)
        },
    }


def fitted(counts: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Factors of (points, counts), whose sums are nearest to (points, 1) times, in logarithms.

    All are positive; that of launches, the first, is LAUNCH or more. What few points do not tell
    stays near what makes all counts weigh the same.
    """
    same = np.log(np.median(times) / counts.mean(0) / counts.shape[1])
    least = np.where(np.arange(same.size) == 0, np.log(LAUNCH), -np.inf)

    def off(logs: np.ndarray) -> np.ndarray:
        ratios = counts @ np.exp(logs) / times[:, 0]
        return np.concatenate([np.log(ratios), HOLD * (logs - same)])

    return np.exp(least_squares(off, np.maximum(same, least + HOLD), bounds=(least, np.inf)).x)
