"""Steps of the optimizers, in place, and the norm of many arrays.

Arrays are written where they are, so they must be C-contiguous; the gradient may have any strides.
The state of a step (velocity, moments) has the parameter's dtype, or float32 beside float16,
whose range is too small for squared gradients. bfloat16 is refused: its 8 bits would lose most
steps, so the parameter stays float32 and is cast where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np

from numbsparse.device import DeviceArray, empty, live
from numbsparse.dtypes import is_bfloat16
from numbsparse.ops.elementwise import copy
from numbsparse.ops.operands import alike, on_gpu, together


def sgd_step(
    p: Any,
    g: Any,
    velocity: Any,
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> None:
    """One step of gradient descent with momentum, in place.

    g' = g + weight_decay * p;  v = momentum * v + g';  p = p - lr * v,
    or with Nesterov's momentum p = p - lr * (g' + momentum * v).

    Parameters
    ----------
    p, g : array, the parameter and its gradient
    velocity : array like p, or None without momentum
        Zeros before the first step.

    Raises ValueError for shapes, places or orders that do not fit, TypeError for dtypes.
    """
    numbers = _beside(p, np.array([lr, momentum, weight_decay]))
    if velocity is None and (momentum or nesterov):
        raise ValueError("velocity takes an array where there is momentum, got None")
    sgd_step_with(p, g, velocity, numbers, nesterov)


def sgd_step_with(p: Any, g: Any, velocity: Any, numbers: Any, nesterov: bool) -> None:
    """`sgd_step` with numbers = (lr, momentum, weight_decay): float64, or float32 on the GPU."""
    if _check(p, g, velocity=velocity):
        from numbsparse.kernels import optimizer as kernels

        g = g if g.is_contiguous else copy(g)
        kernels.sgd_step(p, g, velocity, numbers, nesterov)
        return
    lr, momentum, weight_decay = numbers.tolist()
    step = g + weight_decay * p if weight_decay else g
    if velocity is not None:
        velocity *= momentum
        velocity += step
        step = step + momentum * velocity if nesterov else velocity
    p -= lr * step


def adam_step(
    p: Any,
    g: Any,
    m: Any,
    v: Any,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
) -> None:
    """One step of Adam, in place.

    m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
    p = p - lr * m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps).

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015. Weight decay is added to the
    gradient, or where `decoupled` taken off p, lr * weight_decay * p, as in Loshchilov and Hutter,
    "Decoupled Weight Decay Regularization", 2019.

    Parameters
    ----------
    p, g : array, the parameter and its gradient
    m, v : array like p, the moments; zeros before the first step
    step : int, 1 in the first step

    Raises ValueError for shapes, places, orders or a step that do not fit, TypeError for dtypes.
    """
    numbers = adam_numbers(lr, beta1, beta2, eps, weight_decay, decoupled, step)
    adam_step_with(p, g, m, v, _beside(p, numbers))


ADAM_NUMBERS = 9


def adam_numbers(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    step: int,
) -> np.ndarray:
    """What a step of Adam needs to know, worked out in float64, which keeps the digits of 1 - beta.

    (beta1, 1 - beta1, beta2, 1 - beta2, rate, root_scale, eps, shrink, weight_decay) with
    p = shrink * p - rate * m / (root_scale * sqrt(v) + eps).
    """
    if step < 1:
        raise ValueError(f"step takes an integer of at least 1, got {step}")
    rate = lr / (1 - beta1**step)
    root_scale = 1 / sqrt(1 - beta2**step)
    shrink = 1 - lr * weight_decay if decoupled else 1.0
    added_decay = 0.0 if decoupled else weight_decay
    return np.array(
        [beta1, 1 - beta1, beta2, 1 - beta2, rate, root_scale, eps, shrink, added_decay]
    )


def adam_step_with(p: Any, g: Any, m: Any, v: Any, numbers: Any) -> None:
    """`adam_step` with the numbers of `adam_numbers`: float64, or float32 on the GPU."""
    if _check(p, g, m=m, v=v):
        from numbsparse.kernels import optimizer as kernels

        g = g if g.is_contiguous else copy(g)
        kernels.adam_step(p, g, m, v, numbers)
        return
    beta1, rest1, beta2, rest2, rate, root_scale, eps, shrink, added_decay = numbers.tolist()
    if added_decay:
        g = g + added_decay * p
    m *= beta1
    m += rest1 * g
    v *= beta2
    scratch = np.multiply(g, g, order="C")
    scratch *= rest2
    v += scratch
    np.sqrt(v, out=scratch)
    scratch *= root_scale
    scratch += eps
    np.divide(m, scratch, out=scratch)
    scratch *= rate
    if shrink != 1:
        p *= shrink
    p -= scratch


def global_norm(arrays: Sequence[Any]) -> Any:
    """The square root of the sum of the squares of all values: an array without axes.

    In the place of the arrays, in float32 for float16 and float32, in float64 for float64.

    >>> global_norm([np.float32([3]), np.float32([[4]])])
    array(5., dtype=float32)
    """
    if not _check_list(arrays):
        squares = (np.vdot(flat, flat) for flat in (a.reshape(-1) for a in arrays))
        return np.asarray(np.sqrt(sum(squares), dtype=arrays[0].dtype))
    from numbsparse.kernels import optimizer as kernels

    norm = empty((), np.float32)
    kernels.global_norm(arrays, norm)
    return norm


def scale_to_norm(arrays: Sequence[Any], max_norm: float) -> Any:
    """Scale all arrays in place by min(1, max_norm / global_norm(arrays)); gives the norm before.

    On a GPU nothing is copied to the host. Pascanu, Mikolov and Bengio, "On the difficulty of
    training recurrent neural networks", 2013, section 3.2.

    >>> g = np.float32([3, 4])
    >>> scale_to_norm([g], 1.0)
    array(5., dtype=float32)
    >>> g
    array([0.6, 0.8], dtype=float32)
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm takes a number above 0, got {max_norm}")
    norm = global_norm(arrays)
    if isinstance(norm, DeviceArray):
        from numbsparse.kernels import optimizer as kernels

        kernels.scale_to_norm(arrays, norm, float(max_norm))
    elif norm > max_norm:
        for a in arrays:
            a *= max_norm / float(norm)
    return norm


def _beside(p: Any, numbers: np.ndarray) -> Any:
    if not isinstance(p, DeviceArray):
        return numbers
    return live(lambda: numbers, numbers.size, np.float32)


def _check(p: Any, g: Any, **state: Any) -> bool:
    gpu = alike(p=p, g=g)
    _refuse_bfloat16(p, "p")
    for name, array in (("p", p), *state.items()):
        if array is None:
            continue
        if on_gpu(array, name) != gpu or array.shape != p.shape:
            raise ValueError(f"{name} takes the place and shape {p.shape} of p, got {array.shape}")
        if array.dtype != p.dtype and not (gpu and array.dtype == np.float32):
            raise TypeError(f"{name} takes the dtype of p, {p.dtype}, got {array.dtype}")
        if not (array.is_contiguous if gpu else array.flags.c_contiguous):
            raise ValueError(f"{name} is written in place and takes a C-contiguous array")
    return gpu


def _check_list(arrays: Sequence[Any]) -> bool:
    if not arrays:
        raise ValueError("arrays takes at least one array")
    gpu = together(**{f"arrays[{i}]": a for i, a in enumerate(arrays)})
    _refuse_bfloat16(arrays[0], "arrays")
    return gpu


def _refuse_bfloat16(a: Any, argument: str) -> None:
    if is_bfloat16(a.dtype):
        raise TypeError(
            f"{argument} takes float16 or float32 on a GPU, got bfloat16: keep the parameter in "
            "float32 and cast it where it is used"
        )
