"""The models that scaling.py compares: their wiring, and how wide they are at equal parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count as count_from
from itertools import pairwise
from typing import Any

import numpy as np
from char_model import CharModel

from numbsparse import patterns

EMBEDDING = 64  # features of a character
WHOLE = 8  # hidden units of a dense model are a multiple of this
MOST_OFF = 0.05  # of the parameters


@dataclass(frozen=True)
class Model:
    """What one model differs from another in, but for its size.

    `density` is asked for; the wiring gives a whole number of blocks to each column, so that the
    model has about that. `rewired` is of Watts and Strogatz, `internal_steps` of an "mlstm".
    """

    wiring: str = "dense"
    density: float = 1.0
    block_size: int = 32
    cell: str = "lstm"
    internal_steps: int = 4
    rewired: float = 0.2

    @property
    def name(self) -> str:
        """Short, and no other model's: what is as usual is not said."""
        parts = [self.wiring]
        if self.wiring != "dense":
            parts.append(f"{self.density:.0%}")
            parts += [f"B={self.block_size}"] * (self.block_size != 32)
            parts += [f"p={self.rewired:g}"] * (self.rewired != 0.2)
        parts += [f"{self.cell}, {self.internal_steps} steps"] * (self.cell != "lstm")
        return " ".join(parts)


@dataclass(frozen=True)
class Width:
    """How wide a model is, and how many blocks a column keeps: 0 for all."""

    hidden: int
    degree: int = 0


def width_of(model: Model, parameters: int, symbols: int) -> Width:
    """The width at which the model has as many parameters, to a per cent or so.

    Of a sparse model the degree, too, is chosen: that whose density is nearest to the one wanted.
    It is odd, the block itself and as many to each side, so that all wirings have the same.
    ValueError where no width comes near.
    """

    def nearest(multiple: int, degree: int) -> Width:
        def count(n: int) -> int:
            return n_parameters(model, Width(n * multiple, degree), symbols)

        return Width(multiple * _least_off(count, parameters, least=degree + 1), degree)

    def off(width: Width) -> float:
        n = width.hidden // model.block_size
        return float(abs(kept_blocks(model, n, width.degree) / n**2 - model.density))

    if model.wiring == "dense":
        best = nearest(WHOLE, 0)
    else:  # the more blocks a column has, the narrower and denser is the model
        widths = (nearest(model.block_size, degree) for degree in count_from(3, 2))
        best = next(a for a, b in pairwise(widths) if off(b) >= off(a))
    count = n_parameters(model, best, symbols)
    if abs(count - parameters) > MOST_OFF * parameters:
        raise ValueError(f"{model.name} has {count:,} parameters where {parameters:,} are wanted")
    return best


def _least_off(count: Callable[[int], int], wanted: int, least: int = 1) -> int:
    """The n from `least` on whose count, which grows with n, is nearest to the one wanted."""
    below, above = least, least + 1
    while count(above) < wanted:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if count(middle) < wanted else (below, middle)
    return min(below, above, key=lambda n: abs(count(n) - wanted))


def n_parameters(model: Model, width: Width, symbols: int) -> int:
    """All numbers that are trained. Inputs and outputs are dense in every model."""
    h, B = width.hidden, model.block_size
    is_dense = model.wiring == "dense"
    recurrent = h * h if is_dense else kept_blocks(model, h // B, width.degree) * B * B
    ends = symbols * EMBEDDING + h * symbols + symbols
    if model.cell == "lstm":
        return ends + 4 * (EMBEDDING * h + recurrent + h)
    products = model.internal_steps + 4  # each with a gain and a bias, as the two of inputs have
    return ends + 2 * (EMBEDDING * h + 2 * h) + products * (recurrent + 2 * h)


def kept_blocks(model: Model, n: int, degree: int) -> int:
    """Of n * n, without drawing them; tests compare it with what is drawn."""
    if model.wiring == "barabasi_albert":
        m = degree // 2
        return n * degree - m * m - m
    if model.wiring == "block_diagonal":
        groups = _groups(n, degree)
        few, more = groups - n % groups, n % groups
        return few * (n // groups) ** 2 + more * (n // groups + 1) ** 2
    return n * degree


def make_pattern(model: Model, n: int, degree: int, seed: int) -> np.ndarray | None:
    """The kept blocks of one recurrent weight, (n, n); None for a dense one."""
    if model.wiring == "dense":
        return None
    return WIRINGS[model.wiring](model, n, degree, seed)


def _groups(n: int, degree: int) -> int:
    return max(round(n / degree), 1)


WIRINGS: dict[str, Callable[[Model, int, int, int], np.ndarray]] = {
    "watts_strogatz": lambda model, n, k, seed: patterns.watts_strogatz(
        n, k // 2, model.rewired, seed=seed
    ),
    "barabasi_albert": lambda model, n, k, seed: patterns.barabasi_albert(n, k // 2, seed=seed),
    "random": lambda model, n, k, seed: patterns.random(n, n, k / n, seed=seed),
    "balanced": lambda model, n, k, seed: patterns.balanced_random(n, n, k, seed=seed),
    "block_diagonal": lambda model, n, k, seed: patterns.block_diagonal(n, n, _groups(n, k)),
}


def build(
    model: Model, width: Width, symbols: int, *, dtype: str, seed: int
) -> tuple[CharModel, list[np.ndarray | None]]:
    """The model and its patterns: one, or of an "mlstm" one an internal step and the gates'."""
    n_layouts = 1 if model.cell == "lstm" else model.internal_steps + 1
    n = width.hidden // model.block_size
    wiring = [make_pattern(model, n, width.degree, seed + i) for i in range(n_layouts)]
    how: Any = {"cell": model.cell, "embedding": EMBEDDING, "block_size": model.block_size}
    how |= {"dtype": dtype, "seed": seed}
    return CharModel(symbols, width.hidden, layouts=list(wiring), **how), wiring
