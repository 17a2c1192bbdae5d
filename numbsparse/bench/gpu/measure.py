"""One product of one problem: everybody's result is checked, and what is right is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numbsparse.bench.gpu.contestants import FEATURE_MAJOR, Contestant, chosen, named, of_rung
from numbsparse.bench.gpu.peers import peers
from numbsparse.bench.gpu.problem import Problem, error_of, fault_in
from numbsparse.bench.gpu.replay import Graph, graph_of, seconds_of
from numbsparse.device import synchronize

Row = dict[str, Any]


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
    them each rung is measured that way too.
    """
    right, errors, not_timed, names = {}, {}, {}, []
    auto = None
    try:
        auto = chosen(problem, product)
        names = named(problem, product, kernels)
    except ValueError as reasons:
        not_timed["numbsparse"] = str(reasons)
    makers: dict[str, Callable[[Problem, str], Contestant]] = {
        name: partial(of_rung, name=name) for name in names
    }
    if FEATURE_MAJOR in others:
        turned = partial(of_rung, feature_major=True)
        makers |= {f"{name} {FEATURE_MAJOR}": partial(turned, name=name) for name in names}
    makers |= peers(problem, product, others)
    for name, make in makers.items():
        try:
            contestant = make(problem, product)
            graph = _recorded(contestant)
            errors[name], fault = fault_of(graph, contestant, problem, product)
        except Exception as error:  # a peer or a rung that fails costs its cell, not the table
            fault = f"failed: {short(error)}"
        if fault is None:
            right[name] = graph
        else:
            not_timed[name] = fault
    return {
        "product": product,
        "dtype": problem.dtype,
        "precision": problem.precision,
        "features": problem.in_features,
        "batch": problem.batch,
        "block_size": problem.block_size,
        "n_blocks": problem.layout.n_blocks,
        "density": problem.layout.density,
        "flops": problem.flops,
        "bytes": problem.nbytes,
        "auto": auto,
        "seconds": seconds_of(right, seconds) if right else {},
        "errors": errors,
        "not_timed": not_timed,
    }


def _recorded(contestant: Contestant) -> Graph:
    contestant.call()  # compiles, and plans
    synchronize()
    return graph_of(contestant.record, contestant.call)


def fault_of(graph: Graph, contestant: Any, problem: Any, product: str) -> tuple[float, str | None]:
    """The relative error of what a replay computes, and what is wrong."""
    from numbsparse.kernels.poison import fill_with_nan, holds_nan  # loads numba.cuda

    fill_with_nan(contestant.out)
    graph.replay()
    synchronize()
    parts = problem.parts(product)
    picked = contestant.pick(parts.picked)
    fault = fault_in(parts, picked, problem.dtype, problem.precision)
    if fault is None and holds_nan(contestant.out):
        fault = "wrong: NaN in the result"
    return error_of(parts, picked), fault


def short(error: Exception) -> str:
    """The last line of a message, which is often the only one that says what is wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"[:160]
