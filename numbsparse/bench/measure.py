"""One product of one problem: everybody's result is checked, and what is right is timed."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from numbsparse.bench.contestants import (
    FEATURE_MAJOR,
    OURS,
    Contestant,
    Makers,
    chosen,
    contestants_of,
)
from numbsparse.bench.peers import peers
from numbsparse.bench.problem import Parts, Problem, error_of, fault_in, forget_numbers
from numbsparse.bench.results import Row
from numbsparse.bench.timing import Call, Graph, graph_of, seconds_of
from numbsparse.device import Capture, ahead, synchronize
from numbsparse.ops.reduce import max as largest

ON_CPU, LEAST = 20, 0.01  # times as long as on a GPU, and seconds at least: times vary more
PAUSE = 0.25  # seconds
Point = TypeVar("Point")
LONGEST = 1e6  # seconds to wait for processes that compile


@dataclass(frozen=True)
class Options:
    """How a benchmark runs.

    `kernels`: "auto", "all" rungs that serve, or names with commas; `quick`: small, for tests.
    """

    kernels: str = "auto"
    quick: bool = False

    @property
    def seconds(self) -> float:
        """What each cell is timed for."""
        return 0.0 if self.quick else 0.05


class Case(NamedTuple):
    """A product of a problem, and who computes it: see `measure`."""

    problem: Problem
    product: str
    kernels: str
    others: tuple[str, ...]
    more: dict[str, Any]  # what its row says besides

    def measured(self, seconds: float) -> Row:
        return measure(*self[:-1], seconds) | self.more


def measure(
    problem: Problem,
    product: str,
    kernels: str = "auto",
    others: tuple[str, ...] = (),
    seconds: float = 0.05,
) -> Row:
    """Seconds a call and relative errors by name, and why a name has none.

    `kernels` is "auto", the rung that `ops` chooses, "all" that serve, or a list of names with
    commas, of which those that serve are taken; `others` names peers; with FEATURE_MAJOR among
    them each rung is measured that way too. Of convolutions a row also says what memory ours takes
    beside its operands and its result.
    """
    row: Row = {"product": product, **problem.named(), "auto": None, "errors": {}, "not_timed": {}}
    makers: Makers = {}
    try:
        row["auto"] = chosen(problem, product)
        makers = contestants_of(problem, product, kernels, others)
    except ValueError as reasons:
        row["not_timed"][OURS] = str(reasons)
    parts, graphs = problem.parts(product), dict[str, Graph]()
    for name, make in (makers | peers(problem, product, others)).items():
        with cell(row, name):
            contestant = make(problem, product)
            contestant.call()  # compiles, and plans
            graph = Graph(contestant.call, 1, contestant.call)
            if problem.place == "cuda":
                synchronize()
                graph = graph_of(contestant.record, contestant.call)
            row["errors"][name], fault = fault_of(contestant, graph.replay, problem, parts)
            if fault is not None:
                raise Wrong(fault)
            if problem.side and name == OURS:
                capture = Capture()
                with capture.under_way():
                    contestant.call()
                row["workspace"] = capture.arena.nbytes - contestant.out.nbytes
            graphs[name] = graph
    if problem.place == "cuda":
        return row | {"seconds": seconds_of(graphs, seconds)}
    on_cpu = max(ON_CPU * seconds, LEAST)
    return row | {"seconds": seconds_of(graphs, on_cpu, pause=min(PAUSE, on_cpu))}


class Wrong(ArithmeticError):
    """A result, and so not timed."""


@contextmanager
def cell(row: Row, name: str) -> Iterator[None]:
    """A peer or a rung that fails or is wrong costs its cell, not the table: the row says why."""
    try:
        yield
    except Wrong as fault:
        row["not_timed"][name] = f"wrong: {fault}"
    except Exception as error:
        # The last line of a message is often the only one that says what is wrong.
        said = [line.strip() for line in str(error).splitlines() if line.strip()]
        row["not_timed"][name] = f"failed: {type(error).__name__}: {''.join(said[-1:])}"[:168]


def fault_of(
    contestant: Contestant, run: Call, problem: Problem, parts: Parts
) -> tuple[float, str | None]:
    """The relative error of what `run` computes, and what is wrong."""
    lacks = "NaN in the result"
    if problem.place == "cpu":
        run()
        unwritten, lacks = not np.isfinite(np.asarray(contestant.got)).all(), "not finite"
    else:
        from numbsparse.kernels.elementwise import fill  # loads numba.cuda

        fill(contestant.out, np.nan)
        run()
        synchronize()
        unwritten = np.isnan(largest(contestant.out).item())
    picked = contestant.pick(parts.picked)
    fault = fault_in(parts, picked, problem.dtype, problem.precision)
    return error_of(parts, picked), fault or (lacks if unwritten else None)


def in_time(
    points: Iterable[Point],
    cases: Callable[[Point], list[Case]],
    seconds: float,
    jobs: int,
    many: int,
) -> Iterator[Point]:
    """Points in turn, for so long; before, other processes compile what the next ones need."""
    end, left = time.perf_counter() + seconds, iter(points)
    while some := list(islice(left, many)):
        if jobs > 1:
            of_some = [case for point in some for case in cases(point)]
            compile_ahead(of_some, jobs, (end - time.perf_counter()) / 2)
        for point in some:
            if time.perf_counter() > end:
                return
            yield point


def compile_ahead(cases: Iterable[Case], jobs: int, patience: float) -> None:
    """Compile what will be timed, in so many processes, for so many seconds at most.

    A kernel of the upper rungs takes seconds to compile, on one core. Other processes call each
    once, in orders of their own, so that they come to different kernels, and leave those on disk.
    """
    if apart := _apart(cases):
        ahead.compile_ahead(_call_each, apart, jobs=jobs, seconds=min(patience, LONGEST))


def _apart(cases: Iterable[Case]) -> list[Case]:
    """Those of ours on a GPU that may have kernels of their own."""
    found: dict[Any, Case] = {}
    for case in cases:
        of, own = case.problem, tuple(name for name in case.others if name == FEATURE_MAJOR)
        numbers = of.dtype, of.precision, of.block_size
        shape = of.batch, of.side, of.taps_along, of.stride
        if case.kernels and of.place == "cuda":
            key = case.kernels, case.product, own, numbers, shape, str(case.more)
            found.setdefault(key, case._replace(others=own))
    return list(found.values())


def _call_each(cases: list[Case]) -> None:
    for i in np.random.default_rng().permutation(len(cases)).tolist():
        with suppress(Exception):  # the benchmark itself will say what is wrong
            for make in contestants_of(*cases[i][:-1]).values():
                make(*cases[i][:2]).call()
        forget_numbers()
