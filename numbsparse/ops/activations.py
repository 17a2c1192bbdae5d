"""Activation functions and their gradients, with the rules of `elementwise`.

Each is written in NumPy; on a GPU the kernel of its name computes it. The last ones are between the
last axis and its two halves, each in one pass over the memory.

>>> relu(np.float32([-1, 0, 2])), glu(np.float32([[2, 4, 0, 0]]))
(array([0., 0., 2.], dtype=float32), array([[1., 2.]], dtype=float32))
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from math import pi, prod
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import empty
from numbsparse.kernels.rates import GAMMA, ZETA
from numbsparse.ops.elementwise import apply_on_gpu, gapless
from numbsparse.ops.operands import (
    CPU_FLOATS,
    alike,
    check_form,
    contiguous,
    length_of,
    on_gpu,
    together,
)

GELU_SCALE = (2 / pi) ** 0.5
GELU_CUBE = 0.044715
GELU_FAR = 16.0  # from here on 1 + tanh is 2, or 0, in float64 too
PHI_FAR = 40.0  # from here on Phi is 1, or 0


def _elementwise(in_numpy: Callable[..., Any]) -> Callable[..., Any]:
    """The function for arrays of either place, all of one shape."""
    names = tuple(signature(in_numpy).parameters)

    @wraps(in_numpy)
    def run(*arrays: Any) -> Any:
        first = arrays[0] if len(arrays) == len(names) == 1 else None
        checked = type(first) is np.ndarray and first.dtype in CPU_FLOATS  # as most are, cheaply
        if not checked and alike(**dict(zip(names, arrays, strict=True))):
            return apply_on_gpu(in_numpy.__name__, *arrays)
        if not arrays[0].flags.c_contiguous and all(a.flags.f_contiguous for a in arrays):
            return contiguous(in_numpy(*(a.T for a in arrays)).T)
        return contiguous(in_numpy(*arrays))

    return run


@_elementwise
def sigmoid(x: Any) -> Any:
    """1 / (1 + e ** -x)."""
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is the right 0
        return 1 / (np.exp(-x) + 1)


@_elementwise
def stretched_sigmoid(x: Any) -> Any:
    """1.2 sigmoid(x) - 0.1, cut to 0 and 1: a hard-concrete gate of Louizos and others, 2017."""
    return np.clip(sigmoid(x) * (ZETA - GAMMA) + GAMMA, 0, 1)


@_elementwise
def stretched_sigmoid_grad(x: Any, dy: Any) -> Any:
    """dy times the derivative of stretched_sigmoid: 0 where that is cut."""
    s = sigmoid(x)
    y = s * (ZETA - GAMMA) + GAMMA
    return dy * ((y > 0) & (y <= 1)) * (s * (1 - s) * (ZETA - GAMMA))


@_elementwise
def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    return np.tanh(x)


@_elementwise
def relu(x: Any) -> Any:
    """max(x, 0)."""
    return np.maximum(x, 0)


@_elementwise
def relu_grad(x: Any, dy: Any) -> Any:
    """dy where x > 0, else 0: dy times the derivative of relu, taken as 0 at 0."""
    bits = np.dtype(f"i{dy.itemsize}")
    kept = np.negative((x > 0).view(np.int8), dtype=bits)  # all bits of a value, or none
    return (kept & dy.view(bits)).view(dy.dtype)  # np.where takes ten times as long


@_elementwise
def elu(x: Any) -> Any:
    """x where x > 0, else e ** x - 1.

    Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential
    Linear Units", 2016.
    """
    return np.expm1(np.minimum(x, 0)) + np.maximum(x, 0)


@_elementwise
def elu_grad(x: Any, dy: Any) -> Any:
    """dy times the derivative of elu, 1 where x > 0, else e ** x."""
    return np.exp(np.minimum(x, 0)) * dy


@_elementwise
def softplus(x: Any) -> Any:
    """log(1 + e ** x), without overflow: max(x, 0) + log(1 + e ** -|x|)."""
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


@_elementwise
def gelu(x: Any) -> Any:
    """x * Phi(x), where Phi(x) = (1 + erf(x / sqrt(2))) / 2 is how likely a normal number is below.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    return _phi(x) * np.maximum(x, -PHI_FAR)  # 0 times infinity is NaN


@_elementwise
def gelu_grad(x: Any, dy: Any) -> Any:
    """dy times the derivative of gelu, Phi(x) + x * e ** (-x^2 / 2) / sqrt(2 pi)."""
    x = np.clip(x, -PHI_FAR, PHI_FAR)
    return (_phi(x) + x * np.exp(x * x * -0.5) * (2 * pi) ** -0.5) * dy


def _phi(x: np.ndarray) -> np.ndarray:
    """How likely a normal number is below each of these."""
    if x.dtype == np.float64:
        from scipy.special import ndtr

        return ndtr(x)  # type: ignore[no-any-return]
    from numbsparse.kernels import normal

    y = np.empty(x.shape, x.dtype)
    normal.phi(np.require(x, None, ["C", "A"]).reshape(-1), y.reshape(-1))
    return y


@_elementwise
def gelu_tanh(x: Any) -> Any:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Nearly `gelu`: off by up to 5e-4. Hendrycks and Gimpel, 2016, section 2.
    """
    t = _tanh_in_gelu(np.clip(x, -GELU_FAR, GELU_FAR))
    return (t + 1) * 0.5 * np.maximum(x, -GELU_FAR)  # 0 times infinity is NaN


@_elementwise
def gelu_tanh_grad(x: Any, dy: Any) -> Any:
    """dy times the derivative of gelu_tanh, (1 + t) / 2 + x / 2 * (1 - t^2) * u'.

    t = tanh(u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
    """
    x = np.clip(x, -GELU_FAR, GELU_FAR)
    t, slope = _tanh_in_gelu(x), GELU_SCALE * (1 + 3 * GELU_CUBE * x * x)
    return (t + 1 + x * (1 - t * t) * slope) * 0.5 * dy


def _tanh_in_gelu(x: np.ndarray) -> np.ndarray:
    return np.tanh(GELU_SCALE * x * (1 + GELU_CUBE * x * x))


def concat_elu(x: Any) -> Any:
    """y = elu(x) and elu(-x), one after the other: (..., n) to (..., 2n).

    Shang, Sohn, Almeida and Lee, "Understanding and Improving Convolutional Neural Networks via
    Concatenated Rectified Linear Units", 2016, with elu.

    >>> concat_elu(np.float32([[1, 2]]))
    array([[ 1.        ,  2.        , -0.63212055, -0.86466473]], dtype=float32)
    """
    gpu, n = on_gpu(x, "x"), length_of(x, "x")
    if gpu:
        return _on_gpu("concat_elu", n, (*x.shape[:-1], 2 * n), x)
    return np.concatenate([elu(x), elu(-x)], -1)


def concat_elu_grad(x: Any, dy: Any) -> Any:
    """dx = dy[..., :n] elu'(x) - dy[..., n:] elu'(-x)."""
    n = length_of(x, "x")
    gpu = together(x=x, dy=dy)
    check_form("dy", dy, (*x.shape[:-1], 2 * n), x.dtype)
    if gpu:
        return _on_gpu("concat_elu_grad", n, x.shape, x, dy)
    return elu_grad(x, dy[..., :n]) - elu_grad(-x, dy[..., n:])


def glu(x: Any) -> Any:
    """y = x[..., :n] * sigmoid(x[..., n:]), the gated linear unit: (..., 2n) to (..., n).

    Dauphin, Fan, Auli and Grangier, "Language Modeling with Gated Convolutional Networks", 2017.
    """
    gpu, n = on_gpu(x, "x"), _half(x)
    if gpu:
        return _on_gpu("glu", n, (*x.shape[:-1], n), x)
    return sigmoid(x[..., n:]) * x[..., :n]


def glu_grad(x: Any, dy: Any) -> Any:
    """dx = dy * s and dy * x[..., :n] * s * (1 - s), with s = sigmoid(x[..., n:])."""
    n = _half(x)
    gpu = together(x=x, dy=dy)
    check_form("dy", dy, (*x.shape[:-1], n), x.dtype)
    if gpu:
        return _on_gpu("glu_grad", n, x.shape, x, dy)
    gate = sigmoid(x[..., n:])
    first = dy * gate
    return np.concatenate([first, first * x[..., :n] * (1 - gate)], -1)


def _half(x: Any) -> int:
    width = length_of(x, "x")
    if width % 2:
        raise ValueError(f"x takes an even last axis, got the shape {x.shape}")
    return width // 2


def _on_gpu(name: str, n: int, shape: tuple[int, ...], *operands: Any) -> Any:
    out = empty(shape, operands[0].dtype)
    if out.size:
        flat = (gapless(a).reshape(-1) for a in (*operands, out))
        getattr(kernels.halves, name)(n, prod(shape[:-1]), *flat)
    return out
