"""Products that nobody tuned: what the choice of a rung costs there, and where a peer is faster.

A point draws everything that a product depends on, so no figure here is of a size that was looked
at before: weights of any shape, batches next to the end of a tile, layouts with heavy and with
empty block rows, activations in either order. Each result is checked before it is timed; the
product of one row more is timed beside it, so that a cliff is seen wherever it is.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from numbsparse import patterns
from numbsparse.bench.contestants import FEATURE_MAJOR, chosen, named
from numbsparse.bench.measure import Case, in_time
from numbsparse.bench.peers import CUBLAS, TRITON
from numbsparse.bench.problem import BLOCK_SIZES, NUMBERS, Problem, matrices
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.layout import Layout
from numbsparse.ops import times

ENDS = (16, 32, 64, 96, 128, 192, 256, 512, 1024)  # rows, the last of a tile somewhere
HOPELESS = 2.0  # times as long as the fastest is expected to take: not measured
MOST = 2**26  # numbers in an operand
AHEAD = 6  # products whose kernels are compiled, for each process that does


class Drawn(NamedTuple):
    """A product of a problem, the kind of its layout, and whether activations are feature-major.

    Of one rung alone, which is forced, the choice costs nothing: peers and one row more are left.
    A fit takes nobody but our rungs: `alone`.
    """

    problem: Problem
    product: str
    kind: str
    feature_major: bool
    only: str | None = None
    alone: bool = False

    def __str__(self) -> str:
        order = " feature-major" * self.feature_major
        return f"{self.product} {self.problem} {self.kind}{order}"

    def cases(self) -> list[Case]:
        """Ours beside torch's; of one row more the chosen rung alone; cuBLAS's dense product."""
        of, order = self.problem, (FEATURE_MAJOR,) * self.feature_major
        if self.alone:
            return [Case(of, self.product, self._worth(), order, {})]
        numbers, features = (of.dtype, of.precision), (of.in_features, of.out_features)
        more = Problem(of.layout, of.block_size, of.batch + 1, *numbers)
        dense = matrices(features, 32, 1, of.batch, *numbers)
        return [
            Case(of, self.product, self._worth(), (*order, TRITON), {}),
            Case(more, self.product, self._taken(more), order, {}),
            Case(dense, self.product, "", (CUBLAS,), {}),
        ]

    def _taken(self, of: Problem) -> str:
        """By a call, of this problem or of one row more."""
        return self.only or chosen(of, self.product, self.feature_major)

    def _worth(self) -> str:
        """The rungs that may be the fastest, with commas between."""
        if self.only:
            return self.only
        of = self.problem
        numbers = of.block_size, of.dtype, of.batch, of.precision
        expected = times.expected(self.product, *numbers, of.layout, self.feature_major)
        least = min(expected.values(), default=0.0)
        serving = [name for name in named(of, self.product, "all") if name in RUNGS]
        near = [name for name in serving if expected.get(name, np.inf) <= HOPELESS * least]
        return ",".join(sorted({*near, self._taken(of)}))

    def measured(self) -> "Found":
        row, *beside = (case.measured(0.0) for case in self.cases())
        more, dense = beside or [{"seconds": {}, "not_timed": {}}] * 2
        suffix, own = f" {FEATURE_MAJOR}" * self.feature_major, dict(row["seconds"])
        peers = {TRITON: own.pop(TRITON)} if TRITON in own else {}
        own = {name.removesuffix(suffix): own[name] for name in own if name.endswith(suffix)}
        one_more = next((s for name, s in more["seconds"].items() if name.endswith(suffix)), np.nan)
        faults = row["not_timed"] | more["not_timed"]
        faults.pop(TRITON, None)
        taken, peers = self._taken(self.problem), peers | dense["seconds"]
        return Found(self, own, taken, peers, one_more, faults)


class Found(NamedTuple):
    """At a point: seconds of ours, the chosen rung, of the peers, of a row more."""

    of: Any  # `str` says what was drawn
    seconds: dict[str, float]
    chosen: str
    peers: dict[str, float]
    one_more: float
    faults: dict[str, str]

    def __str__(self) -> str:
        everyone = {**self.seconds, **self.peers}
        if self.one_more == self.one_more:
            everyone["a row more"] = self.one_more
        took = ", ".join(f"{name} {seconds * 1e6:.1f}" for name, seconds in everyone.items())
        return f"{self.of}: {self.chosen} of {took} us"

    @property
    def own(self) -> float:
        return self.seconds.get(self.chosen, np.nan)

    @property
    def regret(self) -> float:
        return self.own / min(self.seconds.values(), default=np.nan)

    @property
    def speed_up(self) -> float:
        return min(self.peers.values(), default=np.nan) / self.own

    @property
    def cliff(self) -> float:
        return self.one_more / self.own


def drawn(
    rng: np.random.Generator, only: str | None = None, alone: bool = False
) -> Iterator[Drawn]:
    """Products without end, all of a problem in turn; of one rung, those that it serves."""
    while True:
        size = int(rng.choice(BLOCK_SIZES))
        side = max(size, 32)
        rows, columns = (max(int(2 ** rng.uniform(6, 13.8)) // side, 1) for _ in range(2))
        batch, density = int(2 ** rng.uniform(0, 14)), 2 ** rng.uniform(-6.5, -1.5)
        batch = int(rng.choice(ENDS)) if rng.random() < 0.4 else batch
        dtype, precision = NUMBERS[rng.integers(len(NUMBERS))]
        numbers = max(rows, columns) * side * batch, rows * columns * side**2 * density
        kind = str(rng.choice(("random", "random", "clustered", "uneven")))
        n = rows * side // size, columns * side // size
        layout = Layout(pattern_of(kind, *n, density, rng))
        if max(numbers) <= MOST and layout.n_blocks:
            problem = Problem(layout, size, batch, dtype, precision)
            across = bool(rng.random() < 0.25)
            for product in PRODUCTS:
                if only is None or named(problem, product, only):
                    yield Drawn(problem, product, kind, across, only, alone)


def pattern_of(
    kind: str, rows: int, columns: int, density: float, rng: np.random.Generator
) -> np.ndarray:
    """Random; in squares of 8 x 8 blocks; or heavy and empty block rows and columns."""
    seed = int(rng.integers(1000))
    if kind == "clustered":
        coarse = patterns.random(-(-rows // 8), -(-columns // 8), density, seed=seed)
        return np.kron(coarse, np.ones((8, 8), bool))[:rows, :columns].copy()
    if kind == "random":
        return patterns.random(rows, columns, density, seed=seed)
    heavy = np.outer(*(rng.permutation(np.linspace(1, 0, n) ** 3) for n in (rows, columns)))
    pattern = rng.random((rows, columns)) < heavy * (density / heavy.mean())
    pattern[rng.integers(rows)] = True
    return pattern


def found(
    points: Iterable[Any], seconds: float, jobs: int = 1, ahead: int = AHEAD
) -> Iterator[Found]:
    """What was drawn, in turn, for so long; other processes compile so many ahead for each."""
    for of in in_time(points, lambda of: of.cases(), seconds, jobs, ahead * jobs):
        yield of.measured()


def summary(all_found: list[Found], most: int = 20) -> str:
    """How choices, speed-ups and cliffs are spread, and the worst points of each."""
    lines = [f"{len(all_found)} products of drawn sizes"]
    lines += [f"  not right: {each.of}: {each.faults}" for each in all_found if each.faults]
    for name, unit, bound, sign in (
        ("regret", "times the fastest rung's time", 1.05, 1),
        ("speed_up", "times as fast as the fastest peer", 1.0, -1),
        ("cliff", "times the time with one row more", 1.3, 1),
    ):
        known = [(getattr(each, name), each) for each in all_found]
        known = sorted((pair for pair in known if pair[0] == pair[0]), key=lambda p: -sign * p[0])
        values = np.array([value for value, _ in known])
        if not values.size:
            continue
        beyond = (sign * values > sign * bound).mean()
        lines.append(
            f"{name}: {unit}: median {np.median(values):.2f}, worst {values[0]:.2f}, "
            f"{'above' if sign > 0 else 'below'} {bound} at {beyond:.1%}"
        )
        lines += [f"  {value:.2f}  {each}" for value, each in known[:most]]
    return "\n".join(lines)
