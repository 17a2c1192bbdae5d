"""Views and joins. They take arrays of any dtype, on the CPU or a GPU."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.views import collapse
from numbsparse.ops.create import zeros
from numbsparse.ops.elementwise import copy, write
from numbsparse.ops.operands import (
    axes_of,
    contiguous,
    not_an_array,
    one_axis,
    place_of,
    places_differ,
)


def reshape(a: Any, shape: tuple[int, ...]) -> Any:
    """The values in C order in another shape, as a view where possible; one axis may be -1.

    >>> reshape(np.float32([1, 2, 3, 4]), (2, -1))
    array([[1., 2.],
           [3., 4.]], dtype=float32)
    """
    if min(shape, default=0) < -1 or shape.count(-1) > 1:
        raise ValueError(f"shape takes sizes from 0 on, and -1 once, got {shape}")
    rest = prod(n for n in shape if n != -1)
    if a.size != rest if -1 not in shape else not rest or a.size % rest:
        raise ValueError(f"shape takes as many values as {a.shape} has, got {shape}")
    if not isinstance(a, DeviceArray) or a.is_contiguous:
        return a.reshape(shape)
    if -1 in shape:
        shape = tuple(a.size // rest if n == -1 else n for n in shape)
    strides = _strides_of_view(a, shape) if a.size else None
    if strides is None:
        return copy(a).reshape(shape)
    return DeviceArray(a.address, shape, a.dtype, strides, a.owner)


def transpose(a: Any, axes: Sequence[int] | None = None) -> Any:
    """A view with the axes in another order (default: reversed)."""
    if not isinstance(a, DeviceArray):
        return a.transpose(axes)
    if axes is None:
        return a.T
    order = axes_of(axes, a.ndim, "axes")
    if len(order) != a.ndim:
        raise ValueError(f"axes takes {a.ndim} axes, got {axes!r}")
    shape, strides = (tuple(of[i] for i in order) for of in (a.shape, a.strides))
    return DeviceArray(a.address, shape, a.dtype, strides, a.owner)


def concatenate(arrays: Sequence[Any], axis: int = 0) -> Any:
    """The arrays one after the other along an existing axis.

    On a GPU, arrays that are stored so already are not copied: the result is a view of them.

    >>> concatenate([np.float32([1, 2]), np.float32([3])], 0)
    array([1., 2., 3.], dtype=float32)
    """
    gpu = _check_joinable(arrays)
    first = arrays[0]
    axis = one_axis(axis, first.ndim)
    kept = first.shape[:axis] + first.shape[axis + 1 :]
    for array in arrays:
        if array.ndim != first.ndim or array.shape[:axis] + array.shape[axis + 1 :] != kept:
            raise ValueError(
                f"arrays take one shape but for the axis {axis}, "
                f"got {first.shape} and {array.shape}"
            )
    if not gpu:
        return contiguous(np.concatenate(arrays, axis))
    if axis == 0 and (whole := adjoining(arrays)) is not None:
        return whole
    shape = list(first.shape)
    shape[axis] = sum(array.shape[axis] for array in arrays)
    joined, start = empty(tuple(shape), first.dtype), 0
    for array in arrays:
        stop = start + array.shape[axis]
        write(joined[(slice(None),) * axis + (slice(start, stop),)], array)
        start = stop
    return joined


def adjoining(arrays: Sequence[DeviceArray]) -> DeviceArray | None:
    """The arrays along their first axis as one view, where they are stored one after the other.

    They are C-contiguous arrays of one dtype, equal but for the first axis; None for others.
    """
    first, end = arrays[0], arrays[0].address
    for array in arrays:
        if array.owner is not first.owner or array.address != end or not array.is_contiguous:
            return None
        end += array.nbytes
    rows = sum(array.shape[0] for array in arrays)
    return DeviceArray(first.address, (rows, *first.shape[1:]), first.dtype, None, first.owner)


def stack(arrays: Sequence[Any], axis: int = 0) -> Any:
    """The arrays one after the other along a new axis.

    >>> stack([np.float32([1, 2]), np.float32([3, 4])], 1)
    array([[1., 3.],
           [2., 4.]], dtype=float32)
    """
    gpu = _check_joinable(arrays)
    shape = arrays[0].shape
    for array in arrays:
        if array.shape != shape:
            raise ValueError(f"arrays take one shape, got {shape} and {array.shape}")
    axis = one_axis(axis, len(shape) + 1)
    if not gpu:
        return contiguous(np.stack(arrays, axis))
    key = (slice(None),) * axis + (None,)
    return concatenate([array[key] for array in arrays], axis)


def getitem(a: Any, key: Any) -> Any:
    """a[key] for integers, slices, `...` and None: always a view.

    On a GPU slices take positive steps. IndexError where an index is out of bounds, TypeError for
    other kinds of index.
    """
    items = key if isinstance(key, tuple) else (key,)
    for item in items:
        basic = isinstance(item, slice | int | np.integer) and not isinstance(item, bool)
        if not basic and item is not None and item is not Ellipsis:
            raise TypeError(f"key takes integers, slices, ... and None, got {type(item).__name__}")
    if isinstance(a, DeviceArray):
        return a[key]
    # With an ellipsis NumPy gives a view where it would else give a scalar.
    items = items if Ellipsis in items else (*items, Ellipsis)
    return a[items]


def put(shape: tuple[int, ...], key: Any, values: Any) -> Any:
    """Zeros of `shape` with `values` at `key`, as getitem takes it: the gradient of getitem.

    >>> put((4,), slice(1, 3), np.float32([5, 6]))
    array([0., 5., 6., 0.], dtype=float32)
    """
    array = zeros(shape, values.dtype, place_of(values))
    part = getitem(array, key)
    if part.shape != values.shape:
        raise ValueError(f"values take the shape {part.shape} at this key, got {values.shape}")
    write(part, values)
    return array


def _check_joinable(arrays: Sequence[Any]) -> bool:
    """Whether the arrays, of one place and dtype, live on the GPU."""
    if not arrays:
        raise ValueError("arrays takes at least one array")
    first = arrays[0]
    for array in arrays:
        if not isinstance(array, np.ndarray | DeviceArray):
            raise TypeError(not_an_array(array, "arrays"))
        if type(array) is not type(first) and place_of(array) != place_of(first):
            raise ValueError(places_differ("arrays[0]", "the others"))
        if array.dtype != first.dtype:
            raise TypeError(f"arrays take one dtype, got {first.dtype} and {array.dtype}")
    return isinstance(first, DeviceArray)


def _strides_of_view(a: DeviceArray, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The strides of the view in another shape, or None where only a copy can have it.

    The axes of `a`, joined where they are stored as one, must each be cut exactly into new ones.
    """
    if prod(shape) != a.size:
        return None
    lengths, (steps,) = collapse(a.shape, a.strides)
    axes = list(zip(lengths, steps, strict=True))
    strides, left, step = [], 1, a.itemsize
    for n in reversed(shape):
        if left == 1 and n > 1:
            left, step = axes.pop()
        if left % n:
            return None
        strides.append(step)
        left, step = left // n, step * n
    return tuple(reversed(strides))
