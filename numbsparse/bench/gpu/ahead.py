"""Compile on several cores before anything is timed.

A kernel of the upper rungs takes seconds to compile, on one core. Other processes call each once,
and leave it in the cache on disk, where the benchmark finds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from numbsparse.bench.gpu import conv
from numbsparse.bench.gpu.contestants import FEATURE_MAJOR, named, of_rung
from numbsparse.bench.gpu.options import Options
from numbsparse.bench.gpu.peers import CUDNN
from numbsparse.bench.gpu.problem import Problem, forget_numbers
from numbsparse.bench.gpu.sections import SECTIONS

MOST_PROCESSES = 8
PATIENCE = 60.0  # seconds; what is not compiled by then is compiled where it is timed
NOT_COMPILED = ("limits", "host", "lstm")


def compile_ahead(names: Iterable[str], options: Options) -> float:
    """Call what the sections will time, each kernel in one of several processes; the seconds."""
    began = time.perf_counter()
    names = [name for name in names if name not in NOT_COMPILED]
    count = min(MOST_PROCESSES, (os.cpu_count() or 1) // 2)
    if names and not options.quick and count > 1:
        spawn = get_context("spawn")
        parts = [
            spawn.Process(target=_part, args=(names, options, i, count), daemon=True)
            for i in range(count)
        ]
        for process in parts:
            process.start()
        for process in parts:
            process.join(max(0.0, began + PATIENCE - time.perf_counter()))
            process.kill()
    return time.perf_counter() - began


def _part(names: list[str], options: Options, part: int, parts: int) -> None:
    """Every `parts`-th case of the sections, from the one numbered `part` on."""
    seen: set[Any] = set()

    def call_once(
        problem: Problem, product: str, kernels: str, others: tuple[str, ...], *_: Any
    ) -> dict[str, Any]:
        size = problem.block_size, problem.batch
        for feature_major in (False, True) if FEATURE_MAJOR in others else (False,):
            case = product, problem.dtype, problem.precision, kernels, *size, feature_major
            if case not in seen:
                seen.add(case)
                if len(seen) % parts == part:
                    _call(problem, product, kernels, feature_major)
        return {}

    for name in names:
        if name == "conv":
            _call_convolutions(options, part, parts)
            continue
        for _ in SECTIONS[name](replace(options, measure=call_once)):
            pass


def _call_convolutions(options: Options, part: int, parts: int) -> None:
    """The same of the convolutions."""
    own = [
        partial(make, problem, product)
        for problem, product, makers in conv.cases(options)
        for name, make in makers.items()
        if name != CUDNN
    ]
    for make in own[part::parts]:
        with suppress(Exception):
            make().call()
    forget_numbers()


def _call(problem: Problem, product: str, kernels: str, feature_major: bool) -> None:
    with suppress(Exception):  # the benchmark itself will say what is wrong
        for name in named(problem, product, kernels):
            of_rung(problem, product, name, feature_major).call()
    forget_numbers()
