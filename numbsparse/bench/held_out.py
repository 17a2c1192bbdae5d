"""Products that nobody tuned: what the choice of a rung costs there, and where a peer is faster.

A point draws everything that a product depends on, so no figure here is of a size that was looked
at before: weights of any shape, batches next to the end of a tile, layouts with heavy and with
empty block rows, activations in either order. Each result is checked before it is timed; the
product of one row more is timed beside it, so that a cliff is seen wherever it is.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from numbsparse import patterns
from numbsparse.bench.contestants import FEATURE_MAJOR, chosen, named
from numbsparse.bench.measure import Case, compile_ahead, measure
from numbsparse.bench.peers import CUBLAS, TRITON, torch_on_gpu
from numbsparse.bench.problem import Problem
from numbsparse.bench.timing import graph_of, record_torch, seconds_of
from numbsparse.kernels.matmul import PRECISIONS, PRODUCTS, RUNGS
from numbsparse.layout import Layout
from numbsparse.ops import times

SIZES = (8, 16, 32, 64, 128)
NUMBERS = (
    *(("float16", "highest"), ("bfloat16", "highest")),
    *(("float32", precision) for precision in PRECISIONS),
)
ENDS = (16, 32, 64, 96, 128, 192, 256, 512, 1024)  # rows, the last of a tile somewhere
HOPELESS = 2.0  # times as long as the fastest is expected to take: not measured
MOST = 2**26  # numbers in an operand
AHEAD = 2  # points whose kernels are compiled, for each process that does


class Point(Protocol):
    """What is drawn: `str` says how large it is."""

    def worth(self, product: str) -> str:
        """The rungs that may be the fastest, with commas between."""

    def cases(self, product: str, rungs: str) -> list[Case]:
        """What is timed."""

    def measured(self, product: str, rungs: str) -> "Found":
        """These rungs, each checked, and who stands beside them."""


class Drawn(NamedTuple):
    """A problem, the kind of its layout, and whether activations are feature-major."""

    problem: Problem
    kind: str
    feature_major: bool

    def __str__(self) -> str:
        return f"{self.problem} {self.kind}{' feature-major' * self.feature_major}"

    def worth(self, product: str) -> str:
        problem = self.problem
        numbers = problem.block_size, problem.dtype, problem.batch, problem.precision
        expected = times.expected(product, *numbers, problem.layout)
        least = min(expected.values(), default=0.0)
        serving = [name for name in named(problem, product, "all") if name in RUNGS]
        near = [name for name in serving if expected.get(name, np.inf) <= HOPELESS * least]
        return ",".join(sorted({*near, chosen(problem, product)}))

    def cases(self, product: str, rungs: str) -> list[Case]:
        """With torch's product beside ours; and, of one row more, the chosen rung alone."""
        of = self.problem
        more = Problem(of.layout, of.block_size, of.batch + 1, of.dtype, of.precision)
        order = (FEATURE_MAJOR,) * self.feature_major
        return [
            Case(of, product, rungs, (*order, TRITON), {}),
            Case(more, product, "auto", order, {}),
        ]

    def measured(self, product: str, rungs: str) -> "Found":
        row, more = (measure(*case[:-1], 0.0) for case in self.cases(product, rungs))
        suffix = f" {FEATURE_MAJOR}" * self.feature_major
        peers = {name: s for name, s in row["seconds"].items() if name == TRITON}
        took = {name: row["seconds"].get(name + suffix) for name in rungs.split(",")}
        own = {name: seconds for name, seconds in took.items() if seconds is not None}
        one_more = more["seconds"].get(f"{more['auto']}{suffix}", np.nan)
        faults = {name: why for name, why in row["not_timed"].items() if name != TRITON}
        peers |= dense_seconds(self.problem, product)
        faults |= more["not_timed"]
        return Found(product, self, own, row["auto"], peers, one_more, faults)


class Found(NamedTuple):
    """Of a product at a point: seconds of ours, the chosen rung, of the peers, of a row more."""

    product: str
    of: Any  # a `Point`
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
        return f"{self.product} {self.of}: {self.chosen} of {took} us"

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


def drawn(rng: np.random.Generator) -> Iterator[Drawn]:
    """Points without end."""
    while True:
        size = int(rng.choice(SIZES))
        side = max(size, 32)
        rows, columns = (max(int(2 ** rng.uniform(9.5, 13.8)) // side, 2) for _ in range(2))
        batch, density = int(2 ** rng.uniform(0, 13)), 2 ** rng.uniform(-6.5, -1.5)
        batch = int(rng.choice(ENDS)) if rng.random() < 0.4 else batch
        dtype, precision = NUMBERS[rng.integers(len(NUMBERS))]
        numbers = max(rows, columns) * side * batch, rows * columns * side**2 * density
        kind = str(rng.choice(("random", "random", "clustered", "uneven")))
        n = rows * side // size, columns * side // size
        layout = Layout(pattern_of(kind, *n, density, rng))
        if max(numbers) <= MOST and layout.n_blocks:
            problem = Problem(layout, size, batch, dtype, precision)
            yield Drawn(problem, kind, bool(rng.random() < 0.25))


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
    heavy = np.outer(*(rng.permutation(np.linspace(0, 1, n) ** 3) for n in (rows, columns)))
    pattern = rng.random((rows, columns)) < heavy * (density / heavy.mean())
    pattern[rng.integers(rows)] = True
    return pattern


def found(
    points: Iterable[Point], seconds: float, jobs: int = 1, ahead: int = 0
) -> Iterator[Found]:
    """Each product of points in turn, for so long; other processes compile so many ahead."""
    end, left = time.perf_counter() + seconds, iter(points)
    while some := list(islice(left, ahead or AHEAD * jobs)):
        rungs = [(of, product, of.worth(product)) for of in some for product in PRODUCTS]
        if jobs > 1:
            cases = [case for of, product, names in rungs for case in of.cases(product, names)]
            compile_ahead(cases, jobs, (end - time.perf_counter()) / 2)
        for of, product, names in rungs:
            if time.perf_counter() > end:
                return
            yield of.measured(product, names)


def dense_seconds(of: Problem, product: str) -> dict[str, float]:
    """cuBLAS's, of random numbers; without torch none."""
    torch = torch_on_gpu()
    if torch is None:
        return {}
    torch.set_float32_matmul_precision(of.precision)
    how = {"dtype": getattr(torch, of.dtype), "device": "cuda"}
    n_in, n_out = of.in_features, of.out_features
    x, w, dy = (
        torch.randn(*shape, **how) for shape in ((of.batch, n_in), (n_in, n_out), (of.batch, n_out))
    )
    operands = {"forward": (x, w), "input_grad": (dy, w.T), "weight_grad": (x.T, dy)}[product]
    out = torch.mm(*operands)

    def call() -> None:
        torch.mm(*operands, out=out)

    return seconds_of({CUBLAS: graph_of(record_torch, call)}, 0.0)


def summary(all_found: list[Found], most: int = 20) -> str:
    """How choices, speed-ups and cliffs are spread, and the worst points of each."""
    lines = [f"{len(all_found)} products of drawn sizes"]
    lines += [f"  not right: {f.product} {f.of}: {f.faults}" for f in all_found if f.faults]
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
