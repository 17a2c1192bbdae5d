"""Moving averages of weights, in place."""

from typing import Any

from numbsparse import kernels
from numbsparse.device import DeviceArray
from numbsparse.ops.operands import (
    check_beside,
    check_contiguous,
    on_gpu,
    places_differ,
    state_dtype,
)


def average_step(average: Any, p: Any, share: Any, *, checked: bool = False) -> None:
    """average += share * (p - average), in place; a share of 1 makes it p, whatever it was.

    Parameters
    ----------
    average : array like p, C-contiguous; float32 with a p of 16 bits
    p : array, C-contiguous
    share : array of one float, from 0 to 1, on p's device, on a GPU float32
    checked : bool, whether both passed `check_average`

    Raises ValueError for shapes, places or orders that do not fit, TypeError for dtypes.

    >>> import numpy as np
    >>> average = np.float32([1, 2])
    >>> average_step(average, np.float32([3, 2]), np.float32([0.5]))
    >>> average
    array([2., 2.], dtype=float32)
    """
    gpu = isinstance(p, DeviceArray) if checked else check_average(average, p)
    if isinstance(share, DeviceArray) != gpu:
        raise ValueError(places_differ("p", "share"))
    if gpu:
        kernels.optimizer.average_step(average, p, share)
    elif share[0] < 1:
        average += share[0] * (p - average)
    else:
        average[...] = p


def check_average(average: Any, p: Any) -> bool:
    """Whether both are on a GPU; refuse what `average_step` would refuse of them."""
    gpu = on_gpu(p, "p")
    check_beside("average", average, p.shape, state_dtype(p.dtype), "p", p)
    check_contiguous("average", average)
    check_contiguous("p", p)
    return gpu
