"""Which runs scaling.py does, in which order, and which learning rates it tries."""

from dataclasses import dataclass, replace
from typing import ClassVar

import runs_plan
from runs_plan import Group
from scaling_models import Model

DENSE = Model()
WATTS, BARABASI = Model("watts_strogatz", 0.1), Model("barabasi_albert", 0.1)
MAIN = (DENSE, WATTS, BARABASI)

MILLION = 1_000_000
WIRINGS = tuple(replace(WATTS, wiring=w) for w in ("random", "balanced", "block_diagonal"))
DENSITIES = tuple(replace(WATTS, density=d) for d in (0.03, 0.01, 0.3))
BLOCKS = tuple(replace(WATTS, block_size=b) for b in (64, 16, 8))
MIXING = tuple(replace(WATTS, rewired=p) for p in (1.0, 0.0))
MULTIPLICATIVE = tuple(
    replace(model, cell="mlstm", internal_steps=n) for n in (4, 2) for model in (DENSE, WATTS)
)
LENGTH = 100 * MILLION
SMALLER, LARGEST = (1280, 832, 448, 2144), 3488  # hidden units of a dense LSTM as large
LEAST = (DENSITIES[2], *WIRINGS[1:])
ABLATIONS = (*MIXING, *BLOCKS[:2], DENSITIES[0], WIRINGS[0], DENSITIES[1], BLOCKS[2], *LEAST)
LONGER = Group(832, MAIN[:2], 400 * MILLION, halved=True, like=LENGTH)  # are the curves flat?
GROUPS = (  # what one seed tells comes first
    *(Group(size, MAIN[:2], LENGTH, seeds=1, halved=True) for size in SMALLER),
    Group(832, WIRINGS[:2], LENGTH),  # whether it is the small world or the width
    Group(832, WIRINGS[2:], LENGTH, halved=True),  # whose rate of short runs diverged in a long one
    *(Group(size, MAIN[:2], LENGTH, halved=True) for size in SMALLER),
    *(Group(1280, (model,), LENGTH, seeds=1) for model in ABLATIONS),
    Group(LARGEST, MAIN[:2], LENGTH, seeds=1, halved=True),
    replace(LONGER, seeds=1),
    Group(832, MULTIPLICATIVE[:2], LENGTH, seeds=1),
    Group(LARGEST, MAIN[:2], LENGTH, halved=True),
    *(Group(size, MAIN, LENGTH, halved=True) for size in (*SMALLER, LARGEST)),
    Group(1280, ABLATIONS, LENGTH),
    LONGER,
    Group(832, MULTIPLICATIVE, LENGTH),
    Group(LARGEST, MAIN[:2], 400 * MILLION, halved=True, like=LENGTH),
)


@dataclass(frozen=True)
class Plan(runs_plan.Plan):
    UNIT: ClassVar[str] = "characters"
    SHARED: ClassVar[tuple[str, ...]] = ("batch", "length", "dtype", "clip", "text")
    LEAST_RATE: ClassVar[float] = 2.5e-4
    MOST_RATE: ClassVar[float] = 6.4e-2
    PER_SECOND: ClassVar[float] = 0.6 * MILLION

    groups: tuple[Group, ...] = GROUPS
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    seeds: int = 3
    dtype: str = "float16"
    search_characters: int = 20 * MILLION
    batch: int = 128
    length: int = 64
    clip: float = 1.0
    text: str = ""  # its hash

    def search_amount(self, group: Group) -> int:
        return self.search_characters
