"""Layer normalization: Ba, Kiros and Hinton, "Layer Normalization", 2016."""

from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import empty
from numbsparse.ops.operands import alike, check_beside, on_gpu
from numbsparse.ops.shape import reshape
from numbsparse.patterns.checks import number


def layer_norm(x: Any, eps: float) -> tuple[Any, Any]:
    """(x - mean) / sqrt(variance + eps) over the last axis, and 1 / sqrt(variance + eps), (rows,).

    The second is float32 for float16.

    >>> normalised, inverse_std = layer_norm(np.float32([[1, 3]]), 0.0)
    >>> normalised
    array([[-1.,  1.]], dtype=float32)
    """
    gpu = on_gpu(x, "x")
    _check_width(x, "x")
    number("eps", eps)
    rows, width = _rows(x), x.shape[-1]
    if gpu:
        normalised, inverse_std = empty(x.shape, x.dtype), empty((rows,), np.float32)
        flat = reshape(x, (rows, width))
        kernels.normalize.layer_norm(flat, float(eps), normalised.reshape(rows, width), inverse_std)
        return normalised, inverse_std
    normalised = np.subtract(x, np.add.reduce(x, axis=-1, keepdims=True) / width, order="C")
    flat = normalised.reshape(rows, width)
    variance = np.einsum("ij,ij->i", flat, flat)
    variance /= width
    variance += eps
    inverse_std = 1 / np.sqrt(variance, out=variance)
    flat *= inverse_std[:, None]
    return normalised, inverse_std


def layer_norm_grad(normalised: Any, inverse_std: Any, dnormalised: Any) -> Any:
    """dx = inverse_std * (d - mean(d) - normalised * mean(d * normalised)), d = dnormalised.

    Parameters
    ----------
    normalised, dnormalised : array, (..., width)
    inverse_std : array, (rows,), as layer_norm gives it
    """
    gpu = alike(normalised=normalised, dnormalised=dnormalised)
    _check_width(normalised, "normalised")
    rows, width = _rows(normalised), normalised.shape[-1]
    dtype = np.dtype(np.float32) if gpu else normalised.dtype
    check_beside("inverse_std", inverse_std, (rows,), dtype, "normalised", normalised)
    y, dy = (reshape(a, (rows, width)) for a in (normalised, dnormalised))
    if gpu:
        dx = empty(normalised.shape, normalised.dtype)
        kernels.normalize.layer_norm_grad(y, inverse_std, dy, dx.reshape(rows, width))
        return dx
    mean_dot = np.einsum("ij,ij->i", y, dy) / width
    dx = np.multiply(y, -mean_dot[:, None], order="C")
    dx += dy
    dx -= np.add.reduce(dy, axis=1, keepdims=True) / width
    dx *= inverse_std[:, None]
    return dx.reshape(normalised.shape)


def _check_width(x: Any, argument: str) -> None:
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{argument} takes a last axis of at least 1, got the shape {x.shape}")


def _rows(x: Any) -> int:
    return x.size // x.shape[-1]
