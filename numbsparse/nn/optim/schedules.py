"""Factors for the learning rate, by the number of the step."""

from __future__ import annotations

from math import cos, pi


def warmup(step: int, steps: int) -> float:
    """A factor that rises from 1 / steps at step 0, in a line, to 1 at step `steps - 1`.

    >>> import numbsparse as ns
    >>> [ns.nn.optim.warmup(step, 4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (step + 1) / max(steps, 1))


def cosine(step: int, steps: int, floor: float = 0.0) -> float:
    """A factor that falls from 1 at step 0 to `floor` at step `steps`, along half a cosine.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    >>> import numbsparse as ns
    >>> [round(ns.nn.optim.cosine(step, 4), 2) for step in range(5)]
    [1.0, 0.85, 0.5, 0.15, 0.0]
    """
    done = min(1.0, step / max(steps, 1))
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * done))


def warmup_cosine(step: int, steps: int, warmup_steps: int, floor: float = 0.0) -> float:
    """`warmup` for the first steps, then `cosine` over the rest: a factor for the learning rate.

    >>> from numbsparse.nn import optim
    >>> [round(optim.warmup_cosine(step, 6, 2), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup_steps:
        return warmup(step, warmup_steps)
    return cosine(step - warmup_steps, steps - warmup_steps, floor)
