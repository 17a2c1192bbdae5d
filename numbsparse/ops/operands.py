"""What the functions of this package require of their arrays: one place, one dtype."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from numbsparse.device import (
    DeviceArray,
    as_device_array,
    in_order_with,
    is_device_operand,
    on,
    one_gpu,
    runtime,
)
from numbsparse.device.array import unread
from numbsparse.dtypes import as_array, is_bfloat16, refuse_masked, type_name

ARRAYS = (np.ndarray, DeviceArray)
CPU_FLOATS = frozenset(map(np.dtype, ("float32", "float64")))
GPU_FLOATS = frozenset(map(np.dtype, ("float16", "float32")))  # and bfloat16
CPU_TAKES = "float32 or float64 on the CPU"
SAME_LINES = 2048  # bytes: columns so far apart, or a multiple, are in few lines of a cache
TILE = 64, 1024  # rows and columns, which a core's cache holds
GPU_TAKES = "float16, bfloat16 or float32 on a GPU"


class HalfOnCPU(TypeError):
    """16-bit floats on the CPU, where only products, casts and copies take them."""

    def __init__(self, argument: str, dtype: np.dtype):
        super().__init__(
            f"{argument} takes {CPU_TAKES}, got {dtype}: "
            f'move it to a GPU (ns.to_device), or cast it here, .astype("float32")'
        )


def operand(x: Any, argument: str) -> Any:
    """A dense operand as a NumPy array or a DeviceArray."""
    if type(x) is np.ndarray or isinstance(x, DeviceArray):
        return x
    return as_device_array(x, argument) if is_device_operand(x) else as_array(x, argument)


def at_home(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs on the GPU of its arrays; those of several GPUs are refused by name."""
    names = tuple(signature(function).parameters)

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        if not runtime.several_devices:
            return function(*args, **options)
        with on(one_gpu(dict(zip(names, args, strict=False)) | options)):
            return function(*args, **options)

    return run


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """`at_home`, and in order with the work of the library that the first array comes from."""

    @wraps(function)
    def run(x: Any, *args: Any, **options: Any) -> Any:
        if type(x) in ARRAYS:
            return function(x, *args, **options)
        with in_order_with(x):
            return function(x, *args, **options)

    return at_home(run)


def on_gpu(a: Any, argument: str) -> bool:
    """Whether an array of floats lives on the GPU; anything else is refused."""
    if isinstance(a, np.ndarray):
        if type(a) is not np.ndarray:
            refuse_masked(a, argument)
        if a.dtype in CPU_FLOATS:
            return False
        raise refusal(argument, a.dtype, gpu=False)
    if isinstance(a, DeviceArray):
        if is_gpu_float(a.dtype):
            return True
        raise refusal(argument, a.dtype, gpu=True)
    raise TypeError(not_an_array(a, argument))


def is_gpu_float(dtype: np.dtype) -> bool:
    """Whether the kernels of this package take the dtype."""
    return dtype in GPU_FLOATS or is_bfloat16(dtype)


def is_half(dtype: np.dtype) -> bool:
    """Whether the dtype is one of 16 bits: float16 or bfloat16."""
    return is_gpu_float(dtype) and dtype.itemsize == 2


def checked_dtype(dtype: np.dtype, gpu: bool) -> np.dtype:
    """A dtype for a new array of floats in that place; another one is refused."""
    if not (is_gpu_float(dtype) if gpu else dtype in CPU_FLOATS):
        raise refusal("dtype", dtype, gpu)
    return dtype


def state_dtype(dtype: Any) -> np.dtype:
    """Of what is kept beside values of a dtype, and of sums: float32 at least."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def refusal(argument: str, dtype: np.dtype, gpu: bool) -> TypeError:
    """What to raise for a dtype that this package does not take in that place."""
    if not gpu and is_half(dtype):
        return HalfOnCPU(argument, dtype)
    return TypeError(f"{argument} takes {GPU_TAKES if gpu else CPU_TAKES}, got {dtype}")


def check_pair(first: str, a: Any, second: str, b: Any) -> None:
    """Refuse two arrays in different places or of different dtypes."""
    if isinstance(a, DeviceArray) != isinstance(b, DeviceArray):
        raise ValueError(places_differ(first, second))
    if a.dtype != b.dtype:
        raise TypeError(f"{first} and {second} take one dtype, got {a.dtype} and {b.dtype}")


def together(**arrays: Any) -> bool:
    """Whether all of them live on the GPU; a mix of places or of dtypes is refused."""
    (first_name, first), *others = arrays.items()
    gpu = on_gpu(first, first_name)
    for name, array in others:
        on_gpu(array, name)
        check_pair(first_name, first, name, array)
    return gpu


def alike(**arrays: Any) -> bool:
    """`together`, and all of one shape."""
    gpu = together(**arrays)
    (first_name, first), *others = arrays.items()
    for name, array in others:
        if array.shape != first.shape:
            raise ValueError(
                f"{first_name} and {name} take one shape, got {first.shape} and {array.shape}"
            )
    return gpu


def check_beside(
    argument: str, array: Any, shape: tuple[int, ...], dtype: np.dtype, name: str, other: Any
) -> None:
    """Refuse all but an array of that shape and dtype on the device of `other`, called `name`."""
    if on_gpu(array, argument) != isinstance(other, DeviceArray):
        raise ValueError(places_differ(name, argument))
    if array.dtype != dtype:
        raise TypeError(f"{argument} takes {dtype} with {name} of {other.dtype}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"{argument} takes the shape {shape}, got {array.shape}")


def check_form(argument: str, a: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Refuse an array of another shape or dtype."""
    if a.shape != shape or a.dtype != dtype:
        raise ValueError(f"{argument} takes {shape} of {dtype}, got {a.shape} of {a.dtype}")


def is_contiguous(a: Any) -> bool:
    """In C order."""
    return a.is_contiguous if isinstance(a, DeviceArray) else a.flags.c_contiguous  # type: ignore[no-any-return]


def check_contiguous(argument: str, a: Any) -> None:
    """Refuse an array that is not in C order."""
    if not is_contiguous(a):
        raise ValueError(f"{argument} takes a C-contiguous array, got one of strides {a.strides}")


def check_written(argument: str, a: Any) -> None:
    """Refuse what cannot be written in place, or has gaps."""
    check_contiguous(argument, a)
    check_writeable(argument, a)


def check_writeable(argument: str, a: Any) -> None:
    """Refuse what cannot be written in place."""
    if isinstance(a, np.ndarray) and not a.flags.writeable:
        raise ValueError(f"{argument} is written in place, and this array is read-only")


def check_integers(indices: Any, argument: str, other: str, gpu: bool) -> None:
    """Refuse all but an array of integers on the device of the argument `other`."""
    if not isinstance(indices, np.ndarray | DeviceArray):
        raise TypeError(not_an_array(indices, argument))
    refuse_masked(indices, argument)
    if isinstance(indices, DeviceArray) != gpu:
        raise ValueError(places_differ(other, argument))
    if indices.dtype.kind not in "iu" or (gpu and indices.dtype.name not in ("int32", "int64")):
        takes = "int32 or int64" if gpu else "integers"
        raise TypeError(f"{argument} takes {takes}, got {indices.dtype}")


def check_range(indices: np.ndarray, n: int, argument: str) -> None:
    """Refuse integers outside 0 to n - 1."""
    # As unsigned numbers the negative ones are the largest: one comparison finds both.
    unsigned = indices.view(indices.dtype.str.replace("i", "u"))
    if indices.size and np.maximum.reduce(unsigned, axis=None) >= n:
        raise ValueError(
            f"{argument} takes integers from 0 to {n - 1}, got {indices.min()} to {indices.max()}"
        )


def length_of(a: Any, argument: str) -> int:
    """Of the last axis; an array without axes is refused."""
    if a.ndim == 0:
        raise ValueError(f"{argument} takes at least one axis, got the shape ()")
    return a.shape[-1]  # type: ignore[no-any-return]


def axes_of(axis: Any, ndim: int, argument: str = "axis") -> tuple[int, ...]:
    """One axis or several, counted from 0; ValueError where there is no such axis."""
    if type(axis) is int and -ndim <= axis < ndim:  # most are
        return (axis % ndim,)
    if type(axis) is tuple and len(axis) == 1 and type(axis[0]) is int and 0 <= axis[0] < ndim:
        return axis
    try:
        return normalize_axis_tuple(axis, ndim, argument)  # type: ignore[no-any-return]
    except (OverflowError, TypeError):
        raise TypeError(f"{argument} takes integers, got {axis!r}") from None
    except np.exceptions.AxisError:
        takes = f"integers from {-ndim} to {ndim - 1}" if ndim else "none of an array without axes"
        raise np.exceptions.AxisError(f"{argument} takes {takes}, got {axis!r}") from None
    except ValueError:
        raise ValueError(f"{argument} takes each axis once, got {axis!r}") from None


def one_axis(axis: Any, ndim: int) -> int:
    """An axis, counted from 0."""
    if len(found := axes_of(axis, ndim)) != 1:
        raise ValueError(f"axis takes one integer, got {axis!r}")
    return found[0]


def place_of(a: Any) -> str:
    return "cuda" if isinstance(a, DeviceArray) else "cpu"


def contiguous(y: Any) -> np.ndarray:
    """A result of NumPy's as a C-contiguous array: NumPy also gives scalars and other orders."""
    if type(y) is np.ndarray and y.flags.c_contiguous:
        return y
    y = np.asarray(y)
    by_columns = y.ndim == 2 and y.flags.f_contiguous and y.dtype in CPU_FLOATS
    if by_columns and y.strides[1] % SAME_LINES == 0 and y.size >= 1 << 14:
        return _in_rows(y)
    return np.asarray(y, order="C")


def _in_rows(y: np.ndarray) -> np.ndarray:
    """A Fortran-ordered matrix in C order, by way of a buffer whose columns use all of the cache.

    1,024 x 1,024 of float32 take 0.9 ms in place of 3.4, 512 x 1,024 0.4 in place of 1.3.
    """
    rows, columns = TILE
    out = np.empty(y.shape, y.dtype)
    buffer = np.empty((columns, rows + 64 // y.itemsize), y.dtype)
    for i in range(0, y.shape[0], rows):
        for j in range(0, y.shape[1], columns):
            part = y[i : i + rows, j : j + columns].T
            packed = buffer[: part.shape[0], : part.shape[1]]
            packed[...] = part
            out[i : i + rows, j : j + columns] = packed.T
    return out


def not_an_array(a: Any, argument: str) -> str:
    return f"{argument} takes a NumPy array or a DeviceArray, got {type_name(a)}"


def places_differ(first: str, second: str) -> str:
    return f"{first} and {second} take one device, got one on the CPU and one on a GPU"


def overlap(a: Any, b: Any) -> bool:
    """Whether two arrays of one place share any memory, gaps not counted."""
    if isinstance(a, DeviceArray):
        first, last = sorted((a, b), key=lambda array: array.address)
        if first.address + first.span.nbytes <= last.address:
            return False
        a, b = unread(a), unread(b)
    return np.shares_memory(a, b)
