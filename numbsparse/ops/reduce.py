"""Sums, means and maxima over axes.

`axis` is an integer, a tuple of integers, or None for all axes. Sums are kept in float32 for
float16 and float32, in float64 for float64, in an order that depends only on shape and strides: the
same input gives the same bits.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import DeviceArray, empty
from numbsparse.ops.operands import axes_of, contiguous, on_gpu
from numbsparse.patterns.checks import flag

Axis = int | tuple[int, ...] | None

_add: Callable[..., Any] = np.add.reduce
_maximum: Callable[..., Any] = np.maximum.reduce


def sum(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """The sum over the given axes; ValueError where there is no such axis.

    >>> sum(np.float32([[1, 2], [3, 4]]), axis=0)
    array([4., 6.], dtype=float32)
    """
    if on_gpu(x, "x"):
        return _on_gpu("sum", x, axis, keepdims)
    return _on_cpu(_add, x, axis, keepdims)


def mean(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """The mean over the given axes; ValueError where there is no such axis, or no value in it."""
    if _on_gpu_with_values(x, axis):
        return _on_gpu("mean", x, axis, keepdims)
    total = _on_cpu(_add, x, axis, keepdims)
    return np.divide(total, x.size / (total.size or 1), out=total)


def max(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    """The largest value over the given axes, NaN where there is one.

    ValueError where there is no such axis, or no value in it.
    """
    if _on_gpu_with_values(x, axis):
        return _on_gpu("max", x, axis, keepdims)
    return _on_cpu(_maximum, x, axis, keepdims)


def sum_to(a: Any, shape: tuple[int, ...]) -> Any:
    """Undo broadcasting: the sum over the axes that `shape` lacks, or has as 1.

    An array of that shape is returned as it is, not copied.

    >>> sum_to(np.ones((3, 2), np.float32), (1, 2))
    array([[3., 3.]], dtype=float32)
    """
    if a.shape == shape:
        return a
    extra = a.ndim - len(shape)
    axes = list(range(extra))
    for i, n in enumerate(shape, extra):
        if extra < 0 or n not in (1, a.shape[i]):
            raise ValueError(f"shape takes one that broadcasts to {a.shape}, got {shape}")
        if n != a.shape[i]:
            axes.append(i)
    return sum(a, tuple(axes)).reshape(shape)


def _on_gpu_with_values(a: Any, axis: Axis) -> bool:
    gpu = on_gpu(a, "x")
    if a.size == 0 and any(a.shape[i] == 0 for i in _axes(a, axis)):
        raise ValueError(f"x takes values along the axis {axis}, got the shape {a.shape}")
    return gpu


def _axes(a: Any, axis: Axis) -> tuple[int, ...]:
    return axes_of(range(a.ndim) if axis is None else axis, a.ndim)


def _on_cpu(function: Callable[..., Any], a: np.ndarray, axis: Axis, keepdims: bool) -> np.ndarray:
    axes = None if axis is None else axes_of(axis, a.ndim)
    return contiguous(function(a, axis=axes, keepdims=flag("keepdims", keepdims)))


def _on_gpu(name: str, a: DeviceArray, axis: Axis, keepdims: bool) -> DeviceArray:
    axes, keepdims = _axes(a, axis), flag("keepdims", keepdims)
    whole = [1 if i in axes else n for i, n in enumerate(a.shape) if keepdims or i not in axes]
    out = empty(tuple(whole), a.dtype)
    kernels.reduce.reduce(name, out, a, axes)
    return out
