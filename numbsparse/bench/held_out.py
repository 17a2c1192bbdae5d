"""Products that nobody tuned: what the choice of a rung costs there, and where a peer is faster.

A point draws everything that a product depends on, so no figure here is of a size that was looked
at before: weights of any shape, batches next to the end of a tile, layouts with heavy and with
empty block rows, activations in either order; of convolutions taps, strides and images. Each result
is checked before it is timed; of matrices the product of one row more is timed beside it, so that a
cliff is seen wherever it is.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from itertools import product as every
from math import log2
from typing import Any, NamedTuple

import numpy as np

from numbsparse import patterns
from numbsparse.bench.contestants import CUBLAS, CUDNN, FEATURE_MAJOR, OURS, TRITON, chosen, named
from numbsparse.bench.measure import Case, in_time
from numbsparse.bench.problem import APART, BLOCK_SIZES, NUMBERS, Problem, matrices, random
from numbsparse.bench.results import Row
from numbsparse.kernels import conv, times
from numbsparse.kernels.conv import costs
from numbsparse.kernels.conv.costs import UNFOLDED
from numbsparse.kernels.matmul import PRODUCTS, RUNGS
from numbsparse.layout import Layout

ENDS = (16, 32, 64, 96, 128, 192, 256, 512, 1024)  # rows, the last of a tile somewhere
HOPELESS = 2.0  # times as long as the fastest is expected to take: not measured
MOST = 2**26  # numbers in an operand
# Of convolutions.
KINDS = (*every((8, 16, 32, 64), APART),)  # block sizes, and numbers, a dtype and a precision
TAPS = ((3, 1), (3, 1), (3, 1), (3, 2), (5, 1), (1, 2), (1, 1))  # along each axis; the stride
DENSEST = 0.1, 0.25  # of blocks of 8, and of larger ones
MOST_OF_IMAGES = 2**25  # numbers in an operand
SECONDS = 0.01  # that each takes: with less a GPU that waited for the host is not warmed up
SLOW = "k1_naive"  # nowhere the fastest
FEW_BLOCKS, SHOWN = 0.1, ("speed_up", "regret")  # in the table
AHEAD = 6  # products whose kernels are compiled, for each process that does


class Drawn(NamedTuple):
    """A product of a problem, the kind of its layout, and whether activations are feature-major.

    Of one rung alone, which is forced, the choice costs nothing: peers and one row more are left.
    A fit takes nobody but our rungs: `alone`.
    """

    problem: Problem
    product: str
    kind: str = "random"
    feature_major: bool = False
    only: str | None = None
    alone: bool = False

    def __str__(self) -> str:
        order = " feature-major" * self.feature_major
        return f"{self.product} {self.problem} {self.kind}{order}"

    def expected(self) -> dict[str, float]:
        """Microseconds of each of our rungs that serves."""
        of = self.problem
        if of.side:
            names, how = rungs_of_images(of, self.product), sizes_of(of, self.product)
            return {name: costs.microseconds(name, *how) for name in names}
        numbers = of.block_size, of.dtype, of.batch, of.precision
        known = times.expected(self.product, *numbers, of.layout, self.feature_major)
        serving = [name for name in named(of, self.product, "all") if name in RUNGS]
        return {name: known.get(name, np.inf) for name in serving}

    def taken(self, more: Problem | None = None) -> str:
        """By a call, of this problem or of one row more.

        OURS of images that one tap sees pixel by pixel: a product of the ladder.
        """
        of = more or self.problem
        if self.only or not of.side:
            return self.only or chosen(of, self.product, self.feature_major)
        if of.window.is_identity:
            return OURS
        expected = self.expected()
        return min(expected, key=expected.__getitem__)

    def worth(self) -> str:
        """The rungs that may be the fastest, with commas between; of images all that serve."""
        if self.only:
            return self.only
        expected = self.expected()
        most = np.inf if self.problem.side else HOPELESS * min(expected.values(), default=0.0)
        near = [name for name, microseconds in expected.items() if microseconds <= most]
        return ",".join(sorted({*near, self.taken()}))

    def cases(self) -> list[Case]:
        """Ours beside torch's; a dense product; of one row more, not of images, the chosen rung."""
        of, order = self.problem, (FEATURE_MAJOR,) * self.feature_major
        if self.alone:
            return [Case(of, self.product, self.worth(), order)]
        numbers, features = (of.dtype, of.precision), (of.in_features, of.out_features)
        if of.side:
            dense = replace(of, given=partial(random, features, of.block_size, 1, of.taps_along))
            beside = Case(dense, self.product, "", (CUDNN,))
            return [Case(of, self.product, self.worth()), beside]
        more = Problem(of.layout, of.block_size, of.batch + 1, *numbers)
        dense = matrices(features, 32, 1, of.batch, *numbers)
        return [
            Case(of, self.product, self.worth(), (*order, TRITON)),
            Case(dense, self.product, "", (CUBLAS,)),
            Case(more, self.product, self.taken(more), order),
        ]

    def measured(self) -> "Found":
        nothing: Row = {"seconds": {}, "not_timed": {}}
        seconds = SECONDS if self.problem.side else 0.0
        rows = [case.measured(seconds) for case in self.cases()]
        row, dense, more = (*rows, nothing, nothing)[:3]
        suffix, own = f" {FEATURE_MAJOR}" * self.feature_major, dict(row["seconds"])
        peers = {TRITON: own.pop(TRITON)} if TRITON in own else {}
        own = {name.removesuffix(suffix): own[name] for name in own if name.endswith(suffix)}
        one_more = next((s for name, s in more["seconds"].items() if name.endswith(suffix)), np.nan)
        faults = row["not_timed"] | more["not_timed"]
        faults.pop(TRITON, None)
        return Found(self, own, self.taken(), peers | dense["seconds"], one_more, faults)

    def counted(self, names: Iterable[str]) -> Iterator[tuple[str, str, Sequence[float]]]:
        """Of rungs whose times are fitted the names, the cases, and what these are fitted to."""
        of = self.problem
        if of.side:
            how = sizes_of(of, self.product)
            for name in filter(OURS.__ne__, names):
                found = costs.counts(name, *how)
                if np.isfinite(found).all():  # the ladder's rung that multiplies was timed
                    yield name, costs.case_of(name, *how[:4]), found
            return
        numbers = self.product, of.block_size, of.dtype
        sizes = times.sizes_of(*numbers, of.batch, of.layout, self.feature_major)
        for name in filter([*names].__contains__, times.OF_RUNG):  # in their order
            if times.of_few_rows(name, sizes):
                continue
            yield name, times.case_of(name, *numbers, of.precision), times.counts(name, sizes)


def sizes_of(of: Problem, product: str) -> tuple[Any, ...]:
    """What `costs` takes of a convolution, from the product on."""
    sizes = of.batch, of.window, of.in_features, of.out_features, of.layout.n_blocks
    return product, of.block_size, of.x.dtype, of.precision, *sizes


def rungs_of_images(of: Problem, product: str) -> list[str]:
    """Those on this card that serve a convolution; of k2 by each one that may multiply."""
    case = product, of.block_size, of.x.dtype, "cuda", of.batch, of.precision
    call = of.window, of.in_features, of.out_features
    rungs = [name for name, place in conv.RUNGS.items() if place == "cuda" and name != SLOW]
    names = [name for name in rungs if conv.rung(name).unsupported(*case, *call) is None]
    if UNFOLDED in names:
        names.remove(UNFOLDED)
        by = costs.unfolded_by(*sizes_of(of, product))
        names += sorted(f"{UNFOLDED}/{name}" for name in by)
    return names


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


def convolutions(rng: np.random.Generator) -> Iterator[Drawn]:
    """Products without end; block sizes and numbers, which have kernels of their own, in turn."""
    for size, numbers in cycle(KINDS):
        unit = max(size, 32)
        n_in, n_out = (int(2 ** rng.uniform(6, 10)) // unit * unit for _ in range(2))
        side, (taps, stride) = int(2 ** rng.uniform(3, log2(65))), TAPS[rng.integers(len(TAPS))]
        batch = min(
            int(2 ** rng.uniform(0, log2(65))), MOST_OF_IMAGES // (side**2 * max(n_in, n_out))
        )
        density = 2 ** rng.uniform(-5.6, log2(DENSEST[size > 8]))
        density = max(density, size**2 / (n_in * n_out))  # a block at least
        how = *numbers, "cuda", side, taps, stride
        problem = Problem(partial(random, (n_in, n_out), size, density, taps), size, batch, *how)
        yield from (Drawn(problem, product) for product in PRODUCTS)


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
