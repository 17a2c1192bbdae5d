"""Functions between the last axis and its two halves, each in one pass over the memory.

>>> glu(np.float32([[2, 4, 0, 0]]))
array([[1., 2.]], dtype=float32)
"""

from math import prod
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import empty
from numbsparse.ops.activations import elu, elu_grad, sigmoid
from numbsparse.ops.elementwise import gapless
from numbsparse.ops.operands import check_form, length_of, on_gpu, together


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
