"""Which runs scaling.py does, in which order, and which learning rates it tries.

A group compares some models at one size. Each model first gets its learning rate, by short runs
that are judged on the validation text, and then its long runs, one a seed. What the next runs are
follows from the plan and from the results that are there, so any number of sittings and of
processes can share the work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

from scaling_models import Model

Results = Mapping[str, Mapping[str, Any]]  # by the run's name

DENSE = Model()
WATTS, BARABASI = Model("watts_strogatz", 0.1), Model("barabasi_albert", 0.1)
MAIN = (DENSE, WATTS, BARABASI)
SEARCH_SEED = 1000  # of no long run
LEAST_RATE, MOST_RATE = 2.5e-4, 6.4e-2


@dataclass(frozen=True)
class Group:
    """Models of as many parameters as a dense LSTM of `size` hidden units, trained alike."""

    size: int
    models: tuple[Model, ...]
    characters: int


MILLION = 1_000_000
WIRINGS = tuple(replace(WATTS, wiring=w) for w in ("random", "balanced", "block_diagonal"))
DENSITIES = tuple(replace(WATTS, density=d) for d in (0.03, 0.01, 0.3))
BLOCKS = tuple(replace(WATTS, block_size=b) for b in (8, 16, 64))
MIXING = tuple(replace(WATTS, rewired=p) for p in (0.0, 1.0))
MULTIPLICATIVE = tuple(
    replace(model, cell="mlstm", internal_steps=n) for n in (4, 2) for model in (DENSE, WATTS)
)
GROUPS = (
    *(Group(size, MAIN, 100 * MILLION) for size in (832, 448)),
    Group(832, WIRINGS, 100 * MILLION),  # whether it is the small world or the width
    *(Group(size, MAIN, 100 * MILLION) for size in (1280, 2144)),
    Group(832, MULTIPLICATIVE[:2], 100 * MILLION),
    Group(3488, MAIN, 100 * MILLION),
    Group(1280, (*WIRINGS, *DENSITIES, *MIXING), 100 * MILLION),
    Group(832, MAIN[:2], 400 * MILLION),  # whether the curves are flat
    Group(1280, BLOCKS, 100 * MILLION),
    Group(832, MULTIPLICATIVE[2:], 100 * MILLION),
    Group(3488, MAIN[:2], 400 * MILLION),
)


@dataclass(frozen=True)
class Plan:
    """The groups, and what all their runs share."""

    groups: tuple[Group, ...] = GROUPS
    rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3)
    search_characters: int = 20 * MILLION
    seeds: int = 3
    batch: int = 128
    length: int = 64
    dtype: str = "float16"
    clip: float = 1.0
    text: str = ""  # its hash


@dataclass(frozen=True)
class Run:
    """One piece of the work. `lr` is None where it follows from runs that are not done."""

    purpose: str  # "search" or "final"
    size: int
    model: Model
    characters: int
    lr: float | None
    seed: int

    def config(self, plan: Plan) -> dict[str, Any]:
        """All that its result depends on, but for the code and the machine."""
        shared = {key: getattr(plan, key) for key in ("batch", "length", "dtype", "clip", "text")}
        return asdict(self) | shared

    def name(self, plan: Plan) -> str:
        """Readable, and no other run's: of a file."""
        config = json.dumps(self.config(plan), sort_keys=True)
        words = [self.purpose, self.size, self.model.name, f"{self.characters:.0e}"]
        words += [f"lr {self.lr:g}" if self.lr else "lr", f"seed {self.seed}"]
        readable = " ".join(map(str, words)).translate(str.maketrans(" %=,", "-___"))
        return f"{readable}-{hashlib.sha256(config.encode()).hexdigest()[:10]}"


def runs_of(plan: Plan, results: Results) -> list[Run]:
    """All runs that are known to be needed, done or not, each once, in the order of work."""
    found: dict[Run, None] = {}
    for group in plan.groups:
        searches = [search(plan, group.size, model, results) for model in group.models]
        for rates, _ in searches:
            found |= dict.fromkeys(rates)
        for seed in range(plan.seeds):
            for model, (_, lr) in zip(group.models, searches, strict=True):
                run = Run("final", group.size, model, group.characters, lr, seed)
                found[run] = None
    return list(found)


def search(plan: Plan, size: int, model: Model, results: Results) -> tuple[list[Run], float | None]:
    """The short runs of one model so far, and the best rate once it is known.

    The rates of the plan first; then, while the best one is at an end, one beyond it, so that it
    has a worse neighbour on each side.
    """
    first = Run("search", size, model, plan.search_characters, None, SEARCH_SEED)
    rates = sorted(plan.rates)
    while True:
        runs = [replace(first, lr=rate) for rate in rates]
        bits = [bits_of(results.get(run.name(plan))) for run in runs]
        if None in bits:
            return runs, None
        known = [inf if b is None else b for b in bits]
        best = known.index(min(known))
        if best == 0 and rates[0] / 2 >= LEAST_RATE:
            rates.insert(0, rates[0] / 2)
        elif best == len(rates) - 1 and rates[-1] * 2 <= MOST_RATE:
            rates.append(rates[-1] * 2)
        else:
            return runs, rates[best]


def bits_of(result: Mapping[str, Any] | None) -> float | None:
    """On the validation text: None where there is no result, infinite where it diverged."""
    if result is None:
        return None
    return inf if result["validation"] is None else float(result["validation"])


def missing(plan: Plan, results: Results) -> Iterator[Run]:
    """The runs that can be begun now, in order."""
    for run in runs_of(plan, results):
        if run.lr is not None and run.name(plan) not in results:
            yield run


def seconds_for(run: Run, results: Results) -> float:
    """About how long it takes, by the longest run alike that is done; a guess where none is."""
    alike = [
        result
        for result in results.values()
        if (result["config"]["size"], result["config"]["model"]) == (run.size, asdict(run.model))
        and result["validation"] is not None
    ]
    if not alike:
        return 10 + run.characters / MILLION
    longest = max(alike, key=lambda result: result["config"]["characters"])
    share = run.characters / longest["config"]["characters"]
    begun = min(result["setup_seconds"] for result in alike)  # a process's first run compiles
    return float(begun + 1.1 * share * (longest["wall_seconds"] - longest["setup_seconds"]))
