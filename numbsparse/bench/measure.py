"""One product of one problem: everybody's result is checked, and what is right is timed."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, groupby, islice, pairwise, zip_longest
from multiprocessing import get_context
from typing import Any, NamedTuple, TypeVar

import numpy as np

from numbsparse.bench.contestants import (
    FEATURE_MAJOR,
    OURS,
    TRITON,
    Contestant,
    Makers,
    chosen,
    contestants_of,
    named,
    peers,
)
from numbsparse.bench.problem import Parts, Problem, error_of, fault_in, forget_numbers
from numbsparse.bench.results import Row
from numbsparse.bench.timing import Call, Graph, graph_of, seconds_of
from numbsparse.device import Capture, synchronize
from numbsparse.ops.reduce import max as largest

ON_CPU, LEAST = 20, 0.01  # times as long as on a GPU, and seconds at least: times vary more
PAUSE = 0.25  # seconds
Point = TypeVar("Point")
LONGEST, SAID = 1e6, 5.0  # seconds to wait for processes that compile, and between two lines
MOST_PROCESSES = 8  # that do, unless more are asked for
MORE = 4  # times as many points are compiled ahead as the time before


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
    """A product of a problem, and who computes it.

    `kernels` is "auto", the rung that `ops` chooses, "all" that serve, or a list of names with
    commas, of which those that serve are taken; `others` names peers; with FEATURE_MAJOR among
    them each rung is measured that way too. Its row says `more` besides.
    """

    problem: Problem
    product: str
    kernels: str = "auto"
    others: tuple[str, ...] = ()
    more: dict[str, Any] = {}  # noqa: RUF012

    def measured(self, seconds: float = 0.05) -> Row:
        """Seconds a call and relative errors by name, and why a name has none.

        Of convolutions a row also says what memory ours takes beside its operands and its result.
        """
        problem, product, kernels, others, more = self
        row: Row = {"product": product, **problem.named(), "auto": None}
        row |= {"errors": {}, "not_timed": {}}
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
            return row | {"seconds": seconds_of(graphs, seconds)} | more
        on_cpu = max(ON_CPU * seconds, LEAST)
        took = seconds_of(graphs, on_cpu, pause=min(PAUSE, on_cpu))
        return row | {"seconds": took} | more


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
        written, lacks = np.isfinite(np.asarray(contestant.got)).all(), "not finite"
    else:
        from numbsparse.kernels.elementwise import fill  # loads numba.cuda

        fill(contestant.out, np.nan)
        run()
        synchronize()
        written = contestant.out.size == 0 or not np.isnan(largest(contestant.out).item())
    picked = contestant.pick(parts.picked)
    fault = fault_in(parts, picked, problem.dtype, problem.precision)
    return error_of(parts, picked), fault or (None if written else lacks)


def in_time(
    points: Iterable[Point],
    cases: Callable[[Point], list[Case]],
    seconds: float,
    jobs: int,
    ahead: int,
) -> Iterator[Point]:
    """Points in turn, for so long; before, other processes compile what the next ones need.

    That is of a point for each process at first, so that something is soon measured, and then of
    more and more, up to `ahead`, as to start processes takes seconds.
    """
    end, left, many = time.perf_counter() + seconds, iter(points), min(jobs, ahead)
    while some := list(islice(left, many)):
        many = min(MORE * many, ahead)
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
    once, and leave it in the cache on disk, where it is found when it is timed. Calls that are
    likely to share kernels are one process's, which calls one of each kind before a second one.
    What is done is said on a line every few seconds.
    """
    spawn, apart = get_context("spawn"), _apart(cases)
    if not apart:
        return
    jobs = min(jobs, len(apart))
    ends = [i * len(apart) // jobs for i in range(jobs + 1)]
    done, began = spawn.Value("i", 0), time.perf_counter()
    processes = [
        spawn.Process(target=_compile_each, args=(_in_turn(apart[begin:end]), done), daemon=True)
        for begin, end in pairwise(ends)
    ]
    end = began + min(patience, LONGEST)
    print(f"compiling kernels of {len(apart)} calls in {jobs} processes", flush=True)
    for process in processes:
        process.start()
    for process in processes:
        while process.is_alive() and (left := end - time.perf_counter()) > 0:
            process.join(min(left, SAID))
            if process.is_alive():
                took = time.perf_counter() - began
                print(f"  {done.value} of {len(apart)} after {took:.0f} s", flush=True)
        process.kill()


def _kin(case: Case) -> tuple[Any, ...]:
    """What calls have in common that likely share kernels."""
    of = case.problem
    return case.kernels, case.product, of.dtype, of.precision, of.block_size


def _apart(cases: Iterable[Case]) -> list[Case]:
    """Those that may have kernels of their own, kin beside kin."""
    found: dict[Any, Case] = {}
    for case in chain.from_iterable(map(_one_by_one, cases)):
        own = tuple(other for other in case.others if other in (FEATURE_MAJOR, TRITON))
        of = case.problem
        shape = of.batch, of.side, of.taps_along, of.stride
        if case.kernels:
            key = _kin(case), own, str(case.more), shape
            found.setdefault(key, case._replace(others=own))
    return [found[key] for key in sorted(found)]


def _one_by_one(case: Case) -> list[Case]:
    """The same of each rung alone, and peers beside the first."""
    of, names = case.problem, [case.kernels]
    if case.kernels not in ("", "auto"):
        names = names[0].split(",") if of.side else named(of, case.product, case.kernels)
    ours = tuple(other for other in case.others if other == FEATURE_MAJOR)
    return [
        case._replace(kernels=name, others=ours if i else case.others)
        for i, name in enumerate(names)
    ]


def _in_turn(cases: list[Case]) -> list[Case]:
    """Of each kind one, then a second one: from the end on, where they are taken from."""
    kin = [list(each) for _, each in groupby(cases, _kin)]
    return [case for turn in zip_longest(*kin) for case in turn if case][::-1]


def processes_here() -> int:
    """How many compile ahead by default: one for two cores."""
    return max(1, min(MOST_PROCESSES, (os.cpu_count() or 1) // 2))


def _compile_each(cases: list[Case], done: Any) -> None:
    """What each process does; what is compiled, and what fails, is not said from here."""
    sys.stderr = None  # type: ignore[assignment]
    _call_each(cases, done)


def _call_each(cases: list[Case], done: Any = None) -> None:
    """Each of ours once, and torch's BSR, whose kernels are compiled here too; `done` counts."""
    while cases:
        case = cases.pop()
        with suppress(Exception):  # the benchmark itself will say what is wrong
            others = peers(case.problem, case.product, case.others)
            for make in (contestants_of(*case[:-1]) | others).values():
                make(case.problem, case.product).call()
        forget_numbers()
        if done is not None:
            with done.get_lock():
                done.value += 1
