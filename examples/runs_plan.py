"""Which runs a plan needs, in which order, and which learning rates are tried for them.

A group compares some models at one size. Each model first gets its learning rate, by short runs
that are judged by what is held out for validation, and then its long runs, one a seed. Short runs
favour larger rates than long ones, so a group may try long runs at halves, too. What the next runs
are follows from the plan and from the results that are there, so any number of processes,
on any machines, can share the work.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, ClassVar

Results = Mapping[str, Mapping[str, Any]]  # by the run's name

SEARCH_SEED = 1000  # of no long run


@dataclass(frozen=True)
class Group:
    """Models of one size, trained alike: each reads `amount` characters, or images."""

    size: Any
    models: tuple[Any, ...]
    amount: int
    seeds: int | None = None  # the first ones; None for all of the plan
    halved: bool = False  # whether halves of the rate are tried in long runs, too
    doubled: bool = False  # and if it is halved, whether doubles are
    like: int | None = None  # amount of shorter long runs that try halves before those of the group


@dataclass(frozen=True)
class Plan:
    """The groups, and what all their runs share. A program adds to it and sets the defaults."""

    UNIT: ClassVar[str]  # what an amount counts
    SHARED: ClassVar[tuple[str, ...]]  # fields that results depend on
    LEAST_RATE: ClassVar[float]
    MOST_RATE: ClassVar[float]
    PER_SECOND: ClassVar[float]  # amount that a run reads, where none alike is known

    groups: tuple[Group, ...]
    rates: tuple[float, ...]
    seeds: int
    dtype: str

    def search_amount(self, group: Group) -> int:
        """What a short run of the group reads."""
        raise NotImplementedError


@dataclass(frozen=True)
class Run:
    """One piece of the work. `lr` is None where it follows from runs that are not done."""

    purpose: str  # "search" or "final"
    size: Any
    model: Any
    amount: int
    lr: float | None
    seed: int

    def config(self, plan: Plan) -> dict[str, Any]:
        """All that its result depends on, but for the code and the machine."""
        own = asdict(self)
        own[plan.UNIT] = own.pop("amount")
        return own | {key: getattr(plan, key) for key in plan.SHARED}

    def name(self, plan: Plan) -> str:
        """Readable, and no other run's: of a file."""
        config = json.dumps(self.config(plan), sort_keys=True)
        words = [self.purpose, self.size, self.model.name, f"{self.amount:.0e}"]
        words += [f"lr {self.lr:g}" if self.lr else "lr", f"seed {self.seed}"]
        readable = " ".join(map(str, words)).translate(str.maketrans(" %=,", "-___"))
        return f"{readable}-{hashlib.sha256(config.encode()).hexdigest()[:10]}"


def runs_of(plan: Plan, results: Results) -> list[Run]:
    """All runs that are known to be needed, done or not, each once, in the order of work."""
    found: dict[Run, None] = {}
    for group in plan.groups:
        choices = [choose(plan, group, model, results) for model in group.models]
        for runs, _ in choices:
            found |= dict.fromkeys(runs)
        for seed in range(min(group.seeds or plan.seeds, plan.seeds)):
            for model, (_, lr) in zip(group.models, choices, strict=True):
                run = Run("final", group.size, model, group.amount, lr, seed)
                found[run] = None
    return list(found)


def choose(
    plan: Plan, group: Group, model: Any, results: Results
) -> tuple[list[Run], float | None]:
    """The runs so far that choose a model's rate, and the rate once it is known.

    Short ones; and in a group that is `halved`, long ones of the first seed, as long as those it is
    `like`, and its own if they are more than twice as long. A rate at which that seed's own run
    diverges is halved.
    """
    first = Run("search", group.size, model, plan.search_amount(group), None, SEARCH_SEED)
    runs, lr = between_worse(first, plan.rates, True, plan, results)
    like = group.like or group.amount
    amounts = [like, group.amount] if group.amount > 2 * like else [like]
    for amount in amounts if group.halved else ():
        if lr is not None:
            first = Run("final", group.size, model, amount, None, seed=0)
            rates = (lr, lr / 2) if lr / 2 >= plan.LEAST_RATE else (lr,)
            doubled = group.doubled and amount == like
            long, lr = between_worse(first, rates, doubled, plan, results)
            runs += long
    while lr is not None and lr / 2 >= plan.LEAST_RATE:
        own = Run("final", group.size, model, group.amount, lr, seed=0)
        if bits_of(results.get(own.name(plan))) != inf:
            break
        runs.append(own)
        lr /= 2
    return runs, lr


def between_worse(
    first: Run, first_rates: Iterable[float], doubled: bool, plan: Plan, results: Results
) -> tuple[list[Run], float | None]:
    """The runs like the first one so far, and the best rate once it is known.

    At the rates given; then, while the best one is the least, at its half, and if `doubled` while
    it is the largest, at its double: so that it has a worse neighbour on each side.
    """
    rates = sorted(first_rates)
    while True:
        runs, bits = measured(first, rates, plan, results)
        if bits is None:
            return runs, None
        best = bits.index(min(bits))
        if best == 0 and rates[0] / 2 >= plan.LEAST_RATE:
            rates.insert(0, rates[0] / 2)
        elif doubled and best == len(rates) - 1 and rates[-1] * 2 <= plan.MOST_RATE:
            rates.append(rates[-1] * 2)
        else:
            return runs, rates[best]


def measured(
    first: Run, rates: list[float], plan: Plan, results: Results
) -> tuple[list[Run], list[float] | None]:
    """The runs like the first one at these rates, and their bits once all are there."""
    runs = [replace(first, lr=rate) for rate in rates]
    bits = [bits_of(results.get(run.name(plan))) for run in runs]
    known = [b for b in bits if b is not None]
    return runs, known if len(known) == len(runs) else None


def bits_of(result: Mapping[str, Any] | None) -> float | None:
    """Of validation: None where there is no result, infinite where it diverged."""
    if result is None:
        return None
    return inf if result["validation"] is None else float(result["validation"])


def missing(plan: Plan, results: Results) -> Iterator[Run]:
    """The runs that can be begun now, in order."""
    for run in runs_of(plan, results):
        if run.lr is not None and run.name(plan) not in results:
            yield run


def seconds_for(run: Run, plan: Plan, results: Results, first: bool = False) -> float:
    """About how long it takes, by the longest run alike that is done; a guess where none is.

    The first run of a process compiles, or reads what was compiled.
    """
    own = run.config(plan)
    alike = [
        result
        for result in results.values()
        if all(result["config"][key] == own[key] for key in ("size", "model"))
        and result["validation"] is not None
    ]
    if not alike:
        return 10 + run.amount / plan.PER_SECOND
    longest = max(alike, key=lambda result: result["config"][plan.UNIT])
    share = run.amount / longest["config"][plan.UNIT]
    begun = (max if first else min)(result["setup_seconds"] for result in alike)
    return float(begun + 1.1 * share * (longest["wall_seconds"] - longest["setup_seconds"]))
