"""Factors for the learning rate, by the number of the step."""

from collections.abc import Callable, Mapping
from math import cos, inf, pi
from typing import Any

from numbsparse.nn.kept import check_keys
from numbsparse.nn.optim.optimizer import Optimizer
from numbsparse.patterns.checks import integer, number


def warmup(step: float, steps: float) -> float:
    """A factor that rises linearly from 1 / steps at step 0 to 1 at step `steps - 1`.

    >>> import numbsparse as ns
    >>> [ns.nn.optim.warmup(step, 4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    step, steps = _checked(step, steps)
    return min(1.0, (step + 1) / max(steps, 1))


def cosine(step: float, steps: float, floor: float = 0.0) -> float:
    """A factor that falls from 1 at step 0 to `floor` at step `steps`, along half a cosine.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    >>> import numbsparse as ns
    >>> [round(ns.nn.optim.cosine(step, 4), 2) for step in range(5)]
    [1.0, 0.85, 0.5, 0.15, 0.0]
    """
    step, steps = _checked(step, steps)
    done = min(1.0, step / (steps or 1))
    floor = number("floor", floor)
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * done))


def warmup_cosine(step: float, steps: float, warmup_steps: float, floor: float = 0.0) -> float:
    """`warmup` for the first steps, then `cosine` over the rest: a factor for the learning rate.

    >>> from numbsparse.nn import optim
    >>> [round(optim.warmup_cosine(step, 6, 2), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    number("warmup_steps", warmup_steps)
    step, steps = _checked(step, steps)
    if step < warmup_steps:
        return warmup(step, warmup_steps)
    return cosine(step - warmup_steps, max(steps - warmup_steps, 0), floor)


def _checked(step: float, steps: float) -> tuple[float, float]:
    return number("step", step), number("steps", steps)


Factor = Callable[[int], float]


class LambdaLR:
    """Learning rates that follow a schedule: in each group lr = initial_lr * factor(step).

    `step` counts the calls of `step()`, which is called after each step of the optimizer; at first
    it is 0. `initial_lr` is what the group was made with.

    Parameters
    ----------
    optimizer : Optimizer
    factor : function of the step's number, or a list of one for each group

    Raises TypeError or ValueError for anything else.

    >>> import numbsparse as ns
    >>> from numbsparse.nn import optim
    >>> a, b = ns.nn.Parameter([1.0]), ns.nn.Parameter([1.0])
    >>> optimizer = optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b]}], lr=0.2)
    >>> schedule = optim.LambdaLR(optimizer, lambda step: optim.warmup(step, 4))
    >>> for _ in range(2):
    ...     optimizer.step()
    ...     schedule.step()
    >>> [round(group["lr"], 3) for group in optimizer.param_groups]
    [0.075, 0.15]
    """

    def __init__(self, optimizer: Optimizer, factor: Factor | list[Factor]):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer takes an Optimizer, got {type(optimizer).__name__}")
        self.optimizer, self.factor = optimizer, factor
        self._set(0)

    def step(self) -> None:
        """Count a step, and set the learning rates of the next."""
        self._set(self.steps + 1)

    def _set(self, steps: int) -> None:
        groups, factors = self.optimizer.param_groups, self.factor
        if not isinstance(factors, list | tuple):
            factors = [factors] * len(groups)
        if not all(map(callable, factors)):
            raise TypeError(
                "factor takes a function of the step's number, or a list of one for each group, "
                f"got {self.factor!r}"
            )
        if len(factors) != len(groups):
            raise ValueError(
                f"factor takes a function for each of {len(groups)} groups, got {len(factors)}"
            )
        numbers = [number(f"factor({steps})", factor(steps)) for factor in factors]
        for group, times in zip(groups, numbers, strict=True):
            group["lr"] = group["initial_lr"] * times
        self.steps = steps

    def state_dict(self) -> dict[str, Any]:
        """How many steps were counted."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave, and set the learning rates; raises ValueError if not."""
        check_keys("state", state, ["steps"])
        self._set(integer("state['steps']", state["steps"], least=0, most=inf))
