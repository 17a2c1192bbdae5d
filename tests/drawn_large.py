"""Calls as large as the place takes, drawn anew each time: `pytest -k large --draws N --seed S`.

A draw follows from its number alone, of S, S + 1 and so on, and is a test of its own. See
CONTRIBUTING, "Is it right where it is large?".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import log

import numpy as np
import pytest
from drawn import Case, Space

from numbsparse import Layout, device, to_device
from numbsparse.kernels import times
from numbsparse.kernels.matmul import RUNGS, n_tiles
from numbsparse.ops import choice

PLACE = "cuda" if device.is_available() else "cpu"
ON_GPU = PLACE == "cuda" and not device.SIMULATED
WORK = 2**32 if ON_GPU else 2**15  # multiplications of a product, about
MOST_LOST = 2**11  # blocks where a value is not finite: float64 takes them one by one
LAYOUTS = ["random", "empty lines", "heavy lines", "full", "long column", "one block", "none"]
DENSITIES = [0.03, 0.1, 0.25, 0.6]
FORCED = [f"auto: {name}" for name, place in RUNGS.items() if place == PLACE]
"""Rungs that "auto" is made to choose wherever they serve, with its own way to call them."""


def large_case(number: int, factors_of: Callable, allowed: Callable[[Case], bool]) -> Case:
    """One of the allowed cases, of sizes that `factors_of` draws: others if none of them fits."""
    rng = np.random.default_rng(number)
    while (case := Space(factors_of(rng), allowed).grown({}, None, rng)) is None:
        pass
    print(case)  # what is printed is shown of a draw that fails
    return case


def sizes(rng: np.random.Generator, least: int, most: int, count: int = 4) -> list[int]:
    """Numbers of any magnitude, some of them multiples of 8, 32 or 128."""
    drawn = np.exp(rng.uniform(log(least), log(most + 1), count)).astype(int)
    grain = rng.choice([1, 1, 8, 32, 128], count)
    return np.clip(-(-drawn // grain) * grain, least, most).tolist()


def features(rng: np.random.Generator) -> list[int]:
    return sizes(rng, *((16, 4096) if ON_GPU else (4, 48)))


def batches(rng: np.random.Generator) -> list[int]:
    return sizes(rng, 1, 4096 if ON_GPU else 40)


def grid_of(case: Case) -> tuple[int, int]:
    """Blocks down and across."""
    return -(-case["rows"] // case["size"]), -(-case["columns"] // case["size"])


def pattern_of(rng: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """Kept blocks; of more than two axes the last two are the grid's."""
    kind, pattern = case["layout"], rng.random(shape) < case["density"]
    row, column = rng.integers(shape[-2]), rng.integers(shape[-1])
    if kind == "empty lines":
        pattern[..., row, :] = pattern[..., column] = False
    elif kind == "heavy lines":
        pattern[..., row, :] = pattern[..., column] = True
    elif kind == "long column":
        pattern[:] = False
        pattern[..., column] = True
    elif kind in ("one block", "none", "full"):
        pattern[:] = kind == "full"
        pattern[(-1,) * len(shape)] |= kind == "one block"
    return pattern


def fits(case: Case) -> bool:
    """Whether float64 takes seconds at most for it."""
    if not case.keys() >= {"rows", "columns", "size", "batch"}:
        return True
    rows, columns = grid_of(case)
    work = rows * columns * case["size"] ** 2 * case["batch"]
    lost = case.get("values", "normal") not in ("normal", "wide")
    return work <= WORK and (not lost or rows * columns <= MOST_LOST)


def with_tile(rng: np.random.Generator, kernel: str, *case: object) -> str:
    """A rung by name, sometimes with another of its tiles."""
    if kernel.startswith("auto") or rng.random() < 0.5 or not (n := n_tiles(kernel, *case)):
        return kernel
    return f"{kernel}/{rng.integers(n)}"


@contextmanager
def forced(kernel: str) -> Iterator[str]:
    """The word for `kernel=`; where it is one of FORCED all rungs but this one seem slow."""
    word, _, name = kernel.partition(": ")
    with pytest.MonkeyPatch.context() as patch:
        if name:
            patch.setattr(times, "expected", lambda *of: {r: float(r != name) for r in RUNGS})
            choice.forget()
        yield word
    if name:
        choice.forget()


def made_layout(rng: np.random.Generator, pattern: np.ndarray) -> tuple[Layout, int]:
    """Made on the device from shuffled coordinates, and how many blocks it has room for beyond."""
    order, more = rng.permutation(pattern.sum()), int(rng.integers(4))
    rows, columns = (to_device(lines[order]) for lines in np.nonzero(pattern))
    capacity = int(pattern.sum()) + more
    return Layout.on_device(rows, columns, pattern.shape, capacity=capacity), more


def dense_of(values: np.ndarray, pattern: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Blocks as a matrix in float64."""
    (rows, columns), size = pattern.shape, values.shape[1]
    whole = np.zeros((rows, size, columns, size))
    r, c = np.nonzero(pattern)
    whole[r, :, c] = values
    return whole.reshape(rows * size, columns * size)[: shape[0], : shape[1]]


def blocks_of(dense: np.ndarray, pattern: np.ndarray, size: int) -> np.ndarray:
    """The kept blocks of a matrix, zero beyond its edges."""
    rows, columns = (n * size for n in pattern.shape)
    dense = np.pad(dense, ((0, rows - len(dense)), (0, columns - dense.shape[1])))
    r, c = np.nonzero(pattern)
    return dense.reshape(pattern.shape[0], size, -1, size)[r, :, c]


def measures(rng):
    """What a drawn layout and its activations measure."""
    return {
        "batch": batches(rng),
        "rows": features(rng),
        "columns": features(rng),
        "layout": LAYOUTS,
        "density": DENSITIES,
    }
