"""Steps of the optimizers, in place, and the norm of many arrays.

Arrays are written where they are, so they must be C-contiguous; the gradient may have any strides.
The state of a step (velocity, moments) has the parameter's dtype, or float32 with 16 bits: their
range is too small for squared gradients, or their digits too few for a mean.

A 16-bit parameter on a GPU may have a `master`: the weight itself, in float32, of which the
parameter shows the nearest value. bfloat16 takes one: its 8 bits would lose most steps. The first
step may find zeros there: wherever a master does not round to the parameter, as after loading other
weights, it becomes what the parameter is. Micikevicius et al., "Mixed Precision
Training", 2018, section 3.1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, empty
from numbsparse.dtypes import is_bfloat16
from numbsparse.kernels.rates import adam_rates
from numbsparse.ops.edge import inside
from numbsparse.ops.elementwise import divide, gapless
from numbsparse.ops.operands import alike, check_written, on_gpu, places_differ, together

TAKEN = (1.0, 1.0)
"""The last two numbers of a step as it usually is: what the gradient is multiplied by, and whether
to step at all. Loss scaling has others there."""

SGD_NUMBERS = 5


def sgd_step(
    p: Any, g: Any, velocity: Any, master: Any, numbers: Any, nesterov: bool, fits: bool = False
) -> None:
    """One step of `nn.optim.SGD`, in place.

    Parameters
    ----------
    p, g : array, the parameter and its gradient
    velocity : array like p, or None without momentum
        Zeros before the first step.
    master : float32 array like a 16-bit p, or None
    numbers : array, (lr, momentum, weight_decay, unscale, go), float64, or float32 on the GPU
        See `TAKEN`.
    fits : bool
        Whether `check_step` took the arrays.

    Raises ValueError for shapes, places or orders that do not fit, TypeError for dtypes.
    """
    if not fits:
        check_step(p, g, master=master, velocity=velocity)
    if isinstance(p, DeviceArray):
        kernels.optimizer.sgd_step(p, gapless(g), velocity, master, numbers, nesterov)
        return
    lr, momentum, weight_decay, unscale, go = numbers.tolist()
    if not go:
        return
    g = g if unscale == 1 else g * unscale
    step = g + weight_decay * p if weight_decay else g
    if velocity is not None:
        velocity *= momentum
        velocity += step
        step = step + momentum * velocity if nesterov else velocity
    p -= lr * step


ADAM_NUMBERS = 11


def adam_numbers(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: float,
    step: float,
) -> np.ndarray:
    """What a step of Adam needs to know, worked out in float64, which keeps the digits of 1 - beta.

    (beta1, 1 - beta1, beta2, 1 - beta2, rate, root_scale, eps, shrink, weight_decay, *TAKEN) with
    p = shrink * p - rate * m / (root_scale * sqrt(v) + eps).
    """
    if step < 1:
        raise ValueError(f"step takes an integer of at least 1, got {step}")
    rates = adam_rates(lr, beta1, beta2, step)
    shrink = 1 - lr * weight_decay if decoupled else 1.0
    added_decay = 0.0 if decoupled else weight_decay
    return np.array([beta1, 1 - beta1, beta2, 1 - beta2, *rates, eps, shrink, added_decay, *TAKEN])


def adam_step(
    p: Any, g: Any, m: Any, v: Any, master: Any, numbers: Any, fits: bool = False
) -> None:
    """One step of `nn.optim.Adam`, or of AdamW where the numbers were `decoupled`, in place.

    Parameters as in `sgd_step`; `m` and `v` are arrays like p, zeros before the first step, and
    `numbers` as `adam_numbers` gives them, in float64, or float32 on the GPU.
    """
    if not fits:
        check_step(p, g, master=master, m=m, v=v)
    if isinstance(p, DeviceArray):
        kernels.optimizer.adam_step(p, gapless(g), m, v, master, numbers)
        return
    *numbers, unscale, go = numbers.tolist()
    if not go:
        return
    beta1, rest1, beta2, rest2, rate, root_scale, eps, shrink, added_decay = numbers
    g = g if unscale == 1 else g * unscale
    if added_decay:
        g = g + added_decay * p
    m *= beta1
    m += rest1 * g
    v *= beta2
    scratch = np.empty_like(v)  # an array, of a parameter without axes too
    np.multiply(g, g, out=scratch)
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

    Of arrays, and of BlockSparse matrices, whose values beyond the edge do not count. In the place
    of them all, in float32 on a GPU, where their dtypes may differ, and else in theirs.

    >>> global_norm([np.float32([3]), np.float32([[4]])])
    array(5., dtype=float32)
    """
    arrays = [inside(a) if isinstance(a, BlockSparse) else a for a in arrays]
    if not _check_list(arrays):
        flats = [a.reshape(-1) for a in arrays]
        with np.errstate(over="ignore"):
            total = sum(np.vdot(a, a) for a in flats)
            if not 1e-30 < total < np.inf:  # squares of float32 lie between 1e-45 and 3e38
                total = sum(np.vdot(a, a) for a in (a.astype(np.float64) for a in flats))
            return np.asarray(np.sqrt(total), arrays[0].dtype)
    norm = empty((), np.float32)
    kernels.optimizer.global_norm(arrays, norm)
    return norm


def scale_to_norm(
    arrays: Sequence[Any], max_norm: float, scale: Any = None
) -> tuple[Any, list[Any]]:
    """min(1, max_norm / norm) times each, and before them norm, which is global_norm(arrays).

    Arrays, and BlockSparse matrices, that bear a loss's `scale` (float32, no axes, in their place)
    are held against it: the norm is that of the arrays over the scale, and they bear it still.
    Where the norm is infinite or NaN they stay as they are. None is written: the results are new,
    one for each array, but where on the CPU nothing is scaled the arrays themselves. On a GPU
    nothing is copied to the host.

    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013,
    section 3.2.

    >>> scale_to_norm([np.float32([3, 4])], 1.0)
    (array(5., dtype=float32), [array([0.6, 0.8], dtype=float32)])
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm takes a number above 0, got {max_norm}")
    norm = global_norm(arrays)
    if isinstance(norm, DeviceArray):
        norm = norm if scale is None else divide(norm, scale)

        def scaled(a: Any) -> Any:
            result = empty(a.shape, a.dtype)
            kernels.optimizer.scale_to_norm(a, norm, float(max_norm), result)
            return result
    else:
        if scale is not None:
            norm /= scale
        if not max_norm < norm < np.inf:
            return norm, list(arrays)
        share = float(max_norm) / float(norm)  # of no dtype

        def scaled(a: Any) -> Any:
            return np.asarray(np.multiply(a, share, order="C"))

    known: dict[int, Any] = {}  # two weights may share a gradient
    for a in arrays:
        if id(a) not in known:
            is_sparse = isinstance(a, BlockSparse)
            known[id(a)] = a.with_values(scaled(a.values)) if is_sparse else scaled(a)
    return norm, [known[id(a)] for a in arrays]


def check_step(p: Any, g: Any, *, master: Any = None, **state: Any) -> bool:
    """Refuse what a step of an optimizer on these would; else whether they are on the GPU.

    >>> check_step(np.ones(3), np.ones(4))
    Traceback (most recent call last):
    ValueError: p and g take one shape, got (3,) and (4,)
    """
    gpu = alike(p=p, g=g)
    is_16_bit = p.dtype.itemsize == 2
    if master is None and is_bfloat16(p.dtype):
        raise TypeError("master takes a float32 array with a p of bfloat16, got None")
    if master is not None and not is_16_bit:
        raise TypeError(f"master takes None with a p of {p.dtype}, got an array")
    for name, array in (("p", p), ("master", master), *state.items()):
        if array is None:
            continue
        if on_gpu(array, name) != gpu or array.shape != p.shape:
            raise ValueError(f"{name} takes the device and shape {p.shape} of p, got {array.shape}")
        if name != "p":
            _check_dtype(array, name, p)
        check_written(name, array)
    return gpu


def _check_dtype(array: Any, name: str, p: Any) -> None:
    if array.dtype == np.float32 and p.dtype.itemsize == 2:
        return
    if name == "master" or is_bfloat16(p.dtype):
        raise TypeError(f"{name} takes float32 with a p of {p.dtype}, got {array.dtype}")
    if array.dtype != p.dtype:
        raise TypeError(f"{name} takes the dtype of p, {p.dtype}, got {array.dtype}")


def _check_list(arrays: Sequence[Any]) -> bool:
    """Whether the arrays live on the GPU; on the CPU they are of one dtype."""
    if not arrays:
        raise ValueError("arrays takes at least one array")
    if not isinstance(arrays[0], DeviceArray):
        return together(**{f"arrays[{i}]": a for i, a in enumerate(arrays)})
    for i, a in enumerate(arrays):
        if not on_gpu(a, f"arrays[{i}]"):
            raise ValueError(places_differ("arrays[0]", f"arrays[{i}]"))
    return True
