"""What dynamic loss scaling decides: is a step good, and what is the next scale.

On a GPU nothing is copied to the host. After Micikevicius et al., "Mixed Precision Training", 2018,
section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from numbsparse.device import DeviceArray, empty
from numbsparse.ops.optimizer import ADAM_NUMBERS, SGD_NUMBERS, adam_numbers, global_norm

LEAST_SCALE, MOST_SCALE = 2.0**-14, 2.0**24


def judge(gradients: Sequence[Any], state: Any, interval: int) -> Any:
    """A verdict on gradients that bear a scale, and the scale for the next step.

    Parameters
    ----------
    gradients : arrays and BlockSparse matrices in one place
    state : float32, (2,), in that place: the scale, and the good steps since it last changed
        Halved where a gradient is infinite or NaN; doubled after `interval` good steps.
    interval : int, 0 to leave the scale alone

    Returns
    -------
    verdict : float32, (2,): 1 / scale, and 1 where all gradients are finite, else 0

    Examples
    --------
    >>> state = np.float32([8, 0])
    >>> judge([np.float32([1, np.inf])], state, 2)
    array([0.125, 0.   ], dtype=float32)
    >>> state
    array([4., 0.], dtype=float32)
    """
    # A sum of squares is finite where all terms are, unless they are beyond 1e19.
    with np.errstate(over="ignore", invalid="ignore"):
        norm = global_norm(gradients)
    if isinstance(norm, DeviceArray):
        from numbsparse.kernels import loss_scale as kernels

        verdict = empty((2,), np.float32)
        kernels.judge(norm, state, verdict, interval, LEAST_SCALE, MOST_SCALE)
        return verdict
    scale, good_steps = state.tolist()
    good = bool(np.isfinite(norm))
    if interval and not good:
        state[:] = max(scale / 2, LEAST_SCALE), 0
    elif interval:
        grows = good_steps + 1 >= interval
        state[:] = (min(scale * 2, MOST_SCALE), 0) if grows else (scale, good_steps + 1)
    return np.array([1 / scale, good], np.float32)


def guarded_sgd_numbers(settings: Any, verdict: Any, skipped: Any) -> Any:
    """(lr, momentum, weight_decay, unscale, go) for `sgd_step_with`; counts a skipped step.

    Parameters
    ----------
    settings : float64, (3,): lr, momentum, weight_decay
    verdict : as `judge` gives it
    skipped : int64, (1,)
    """
    if isinstance(verdict, DeviceArray):
        from numbsparse.kernels import loss_scale as kernels

        numbers = empty((SGD_NUMBERS,), np.float32)
        kernels.sgd_numbers(settings, verdict, skipped, numbers)
        return numbers
    skipped += not verdict[1]
    return np.array([*settings, *verdict])


def guarded_adam_numbers(settings: Any, verdict: Any, skipped: Any) -> Any:
    """The numbers for `adam_step_with`, of a step that follows skipped ones; counts them.

    Parameters
    ----------
    settings : float64, (7,): lr, beta1, beta2, eps, weight_decay, decoupled, step
        The step counts skipped ones, which moments never saw, and this one.
    verdict, skipped : as in `guarded_sgd_numbers`
    """
    if isinstance(verdict, DeviceArray):
        from numbsparse.kernels import loss_scale as kernels

        numbers = empty((ADAM_NUMBERS,), np.float32)
        kernels.adam_numbers(settings, verdict, skipped, numbers)
        return numbers
    if not verdict[1]:
        skipped += 1
        return np.zeros(ADAM_NUMBERS)
    settings = settings.copy()
    settings[-1] -= skipped[0]
    worked_out = adam_numbers(*settings.tolist())
    worked_out[-2:] = verdict
    return worked_out
