"""Activation functions and their gradients, elementwise, with the rules of `elementwise`.

>>> relu(np.float32([-1, 0, 2]))
array([0., 0., 2.], dtype=float32)
"""

from __future__ import annotations

from math import pi
from typing import Any

import numpy as np

from numbsparse.ops.elementwise import apply_on_gpu
from numbsparse.ops.operands import alike, contiguous, on_gpu

GELU_SCALE = (2 / pi) ** 0.5
GELU_CUBE = 0.044715
GELU_FAR = 16.0  # from here on 1 + tanh is 2, or 0, in float64 too
PHI_FAR = 40.0  # from here on Phi is 1, or 0


def sigmoid(a: Any) -> Any:
    """1 / (1 + e ** -a)."""
    if on_gpu(a, "a"):
        return apply_on_gpu("sigmoid", a)
    y = np.asarray(np.negative(a, order="C"))
    with np.errstate(over="ignore"):  # 1 / (1 + inf) is the right 0
        np.exp(y, out=y)
    y += 1
    return np.divide(1, y, out=y)


def relu(a: Any) -> Any:
    """max(a, 0)."""
    if on_gpu(a, "a"):
        return apply_on_gpu("relu", a)
    return np.asarray(np.maximum(a, 0, order="C"))


def relu_grad(x: Any, dy: Any) -> Any:
    """dy where x > 0, else 0: dy times the derivative of relu, taken as 0 at 0."""
    if alike(x=x, dy=dy):
        return apply_on_gpu("relu_grad", x, dy)
    return contiguous(np.where(x > 0, dy, 0))


def elu(a: Any) -> Any:
    """a where a > 0, else e ** a - 1.

    Clevert, Unterthiner and Hochreiter, "Fast and Accurate Deep Network Learning by Exponential
    Linear Units", 2016.
    """
    if on_gpu(a, "a"):
        return apply_on_gpu("elu", a)
    y = np.asarray(np.minimum(a, 0, order="C"))
    np.expm1(y, out=y)
    return np.add(y, np.maximum(a, 0), out=y)


def elu_grad(x: Any, dy: Any) -> Any:
    """dy times the derivative of elu, 1 where x > 0, else e ** x."""
    if alike(x=x, dy=dy):
        return apply_on_gpu("elu_grad", x, dy)
    slope = np.asarray(np.minimum(x, 0, order="C"))
    np.exp(slope, out=slope)
    return np.multiply(slope, dy, out=slope)


def softplus(a: Any) -> Any:
    """log(1 + e ** a), without overflow: max(a, 0) + log(1 + e ** -|a|)."""
    if on_gpu(a, "a"):
        return apply_on_gpu("softplus", a)
    y = np.asarray(np.abs(a, order="C"))
    np.negative(y, out=y)
    np.exp(y, out=y)
    np.log1p(y, out=y)
    return np.add(y, np.maximum(a, 0), out=y)


def gelu(a: Any) -> Any:
    """a * Phi(a), where Phi(a) = (1 + erf(a / sqrt(2))) / 2 is how likely a normal number is below.

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    if on_gpu(a, "a"):
        return apply_on_gpu("gelu", a)
    y = _phi(a)
    y *= np.maximum(a, -PHI_FAR)  # 0 times infinity is NaN
    return y


def gelu_grad(x: Any, dy: Any) -> Any:
    """dy times the derivative of gelu, Phi(x) + x * e ** (-x^2 / 2) / sqrt(2 pi)."""
    if alike(x=x, dy=dy):
        return apply_on_gpu("gelu_grad", x, dy)
    x = np.asarray(np.clip(x, -PHI_FAR, PHI_FAR))
    slope = np.asarray(np.multiply(x, x, order="C"))
    slope *= -0.5
    np.exp(slope, out=slope)
    slope *= x
    slope *= (2 * pi) ** -0.5
    slope += _phi(x)
    slope *= dy
    return slope


def _phi(a: Any) -> np.ndarray:
    from scipy.special import ndtr

    return np.array(ndtr(a), order="C", copy=None)


def gelu_tanh(a: Any) -> Any:
    """a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 a^3))).

    Nearly `gelu`: off by up to 5e-4. Hendrycks and Gimpel, 2016, section 2.
    """
    if on_gpu(a, "a"):
        return apply_on_gpu("gelu_tanh", a)
    y = _gelu_tanh(np.clip(a, -GELU_FAR, GELU_FAR))
    y += 1
    y *= 0.5
    y *= np.maximum(a, -GELU_FAR)  # 0 times infinity is NaN
    return y


def gelu_tanh_grad(x: Any, dy: Any) -> Any:
    """dy times the derivative of gelu_tanh, (1 + t) / 2 + x / 2 * (1 - t^2) * u'.

    t = tanh(u), u = sqrt(2 / pi) * (x + 0.044715 x^3).
    """
    if alike(x=x, dy=dy):
        return apply_on_gpu("gelu_tanh_grad", x, dy)
    x = np.clip(x, -GELU_FAR, GELU_FAR)
    t = _gelu_tanh(x)
    slope = np.asarray(np.multiply(x, x, order="C"))
    slope *= 3 * GELU_CUBE * GELU_SCALE
    slope += GELU_SCALE
    slope *= 1 - t * t
    slope *= x
    slope += t
    slope += 1
    slope *= 0.5
    slope *= dy
    return slope


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    """tanh(sqrt(2 / pi) * (x + 0.044715 x^3))."""
    u = np.asarray(np.multiply(x, x, order="C"))
    u *= GELU_CUBE * GELU_SCALE
    u += GELU_SCALE
    u *= x
    return np.tanh(u, out=u)
