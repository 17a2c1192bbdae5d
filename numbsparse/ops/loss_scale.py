"""What dynamic loss scaling decides: is a step good, and what is the next scale.

On a GPU nothing is copied to the host. After Micikevicius et al., "Mixed Precision Training", 2018,
section 3.2.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import DeviceArray, empty
from numbsparse.ops.optimizer import ADAM_NUMBERS, SGD_NUMBERS, adam_numbers, global_norm

LEAST_SCALE, MOST_SCALE = 2.0**-14, 2.0**24
SGD_SETTINGS, ADAM_SETTINGS = 4, 8  # a row of those that `guarded_...` take


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
    # A norm is finite where all gradients are, unless it is beyond their dtype.
    with np.errstate(over="ignore", invalid="ignore"):
        norm = global_norm(gradients)
    if isinstance(norm, DeviceArray):
        verdict = empty((2,), np.float32)
        kernels.loss_scale.judge(norm, state, verdict, interval, LEAST_SCALE, MOST_SCALE)
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
    """(lr, momentum, weight_decay, unscale, go) for `sgd_step`, a row for each parameter.

    Parameters
    ----------
    settings : float64, rows of 4: lr, momentum, weight_decay, and where it is counted in `skipped`
    verdict : as `judge` gives it
    skipped : int64, (1 + parameters,), the steps skipped in all, and of each parameter
        Counts this one, if it is.
    """
    if isinstance(verdict, DeviceArray):
        numbers = empty((settings.size // SGD_SETTINGS * SGD_NUMBERS,), np.float32)
        kernels.loss_scale.sgd_numbers(settings, verdict, skipped, numbers)
        return numbers
    _count_skip(settings, verdict, skipped)
    return np.array([[*row[:-1], *verdict] for row in settings])


def guarded_adam_numbers(settings: Any, verdict: Any, skipped: Any) -> Any:
    """The numbers for `adam_step`, of steps that follow skipped ones; a row each.

    Parameters
    ----------
    settings : float64, rows of 8: lr, beta1, beta2, eps, weight_decay, decoupled, step, and where
        it is counted in `skipped`. The step counts skipped ones, which moments never saw, and this.
    verdict, skipped : as in `guarded_sgd_numbers`
    """
    if isinstance(verdict, DeviceArray):
        numbers = empty((settings.size // ADAM_SETTINGS * ADAM_NUMBERS,), np.float32)
        kernels.loss_scale.adam_numbers(settings, verdict, skipped, numbers)
        return numbers
    if _count_skip(settings, verdict, skipped):
        return np.zeros((len(settings), ADAM_NUMBERS))
    taken = [(*own, step - int(skipped[int(member)])) for *own, step, member in settings.tolist()]
    known = {of: [*adam_numbers(*of)[:-2], *verdict] for of in set(taken)}
    return np.array([known[of] for of in taken])


def _count_skip(settings: np.ndarray, verdict: np.ndarray, skipped: np.ndarray) -> bool:
    """Whether the step is skipped; then it is counted, in all and of each parameter."""
    if verdict[1]:
        return False
    skipped[0] += 1
    skipped[settings[:, -1].astype(int)] += 1
    return True
