"""New arrays of one value."""

from math import copysign
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import DeviceArray, empty, on
from numbsparse.dtypes import as_dtype
from numbsparse.ops.operands import checked_dtype, place_of


def full(shape: int | tuple[int, ...], value: float, dtype: Any, place: str) -> Any:
    """An array of one value on the "cpu" (any dtype), or on "cuda" or "cuda:1" (16-bit, float32).

    >>> full((2, 2), 0.5, "float32", "cpu")
    array([[0.5, 0.5],
           [0.5, 0.5]], dtype=float32)
    """
    dtype = as_dtype(dtype)
    if place == "cpu":
        is_zero = value == 0 and copysign(1, value) == 1  # the memory is zero already
        return np.zeros(shape, dtype) if is_zero else np.full(shape, value, dtype)
    if place != "cuda":
        with on(place):
            return full(shape, value, dtype, "cuda")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    array = empty(sizes, checked_dtype(dtype, gpu=True))
    kernels.elementwise.fill(array, float(value))
    return array


def empty_beside(shape: tuple[int, ...], like: Any) -> Any:
    """An array of whatever was in memory, of the dtype of another and in its place."""
    return (empty if isinstance(like, DeviceArray) else np.empty)(shape, like.dtype)


def zeros(shape: int | tuple[int, ...], dtype: Any, place: str) -> Any:
    """An array of zeros in a place, as `full` has it."""
    return full(shape, 0, dtype, place)


def full_like(a: np.ndarray | DeviceArray, value: float) -> Any:
    """An array of one value with the shape, dtype and place of `a`."""
    return full(a.shape, value, a.dtype, place_of(a))


def zeros_like(a: np.ndarray | DeviceArray) -> Any:
    """An array of zeros with the shape, dtype and place of `a`."""
    return full(a.shape, 0, a.dtype, place_of(a))
