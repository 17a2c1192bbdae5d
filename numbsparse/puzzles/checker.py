"""Whether a kernel does what its puzzle requires: the right result, no race, few enough reads."""

import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from numbsparse import testing
from numbsparse.device import to_device
from numbsparse.device.launch import launch
from numbsparse.files import module_of

SHOWN = 3  # races
PLACE = re.compile(r"tid=\[([\d, ]+)\] ctaid=\[([\d, ]+)\]")  # as Numba's simulator names a thread


class Case(NamedTuple):
    """What a kernel is run on; the result is its last argument, beside the inputs."""

    grid: Any
    block: Any
    inputs: tuple[np.ndarray, ...]
    expected: np.ndarray
    values: int | None = None  # that threads may read from global memory, one by one
    sectors: int | None = None  # that warps may read


def faults(level: ModuleType, file: Path) -> list[str]:
    """What is wrong with the kernel in a file, in words; nothing if the puzzle is solved."""
    try:
        kernel = module_of(file, f"puzzle_{file.stem}").kernel
    except Exception as error:
        return [f"{file} does not run: {type(error).__name__}: {error}"]
    cases = level.cases(np.random.default_rng(0))
    return next((found for case in cases if (found := _faults_in(kernel, case))), [])


def _faults_in(kernel: Any, case: Case) -> list[str]:
    where = f"with inputs of the shapes {', '.join(str(a.shape) for a in case.inputs)}"
    y = to_device(np.full(case.expected.shape, np.nan, np.float32))
    inputs = [to_device(a) for a in case.inputs]

    def call() -> None:
        launch(kernel, case.grid, case.block, *inputs, y)

    try:
        races = testing.races(call)
        (count,) = testing.count(call)
    except Exception as error:
        said = PLACE.sub(r"thread (\1) of block (\2)", str(error))
        return [f"the kernel stops: {type(error).__name__}: {said}"]
    return [
        *_differences(y.numpy(), case.expected, where),
        *(f"a race {where}: {race}" for race in races[:SHOWN]),
        *_reads(count.global_reads, case, where),
    ]


def _reads(read: Any, case: Case, where: str) -> Iterator[str]:
    for found, most, what in (
        (read.accesses, case.values, "values, counted for each thread"),
        (read.units, case.sectors, "sectors of 32 bytes"),
    ):
        if most is not None and found > most:
            yield f"too many reads {where}: {found} {what}; {most} are enough"


def _differences(got: np.ndarray, expected: np.ndarray, where: str) -> Iterator[str]:
    wrong = ~np.isclose(got, expected, rtol=1e-4, atol=1e-5)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        place = f"y[{', '.join(map(str, first))}]"
        value = "is not written" if np.isnan(got[first]) else f"is {got[first]:g}"
        share = f"{wrong.sum()} of {wrong.size} values are wrong {where}"
        yield f"{share}: {place} {value}, {expected[first]:g} is right"
