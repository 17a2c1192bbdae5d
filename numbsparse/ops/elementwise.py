"""Functions of each value by itself, with NumPy's broadcasting.

Arrays are NumPy arrays of float32 or float64, or DeviceArrays of float16, bfloat16 or float32, of
any strides; on a GPU each value is computed in float32 and rounded once. The result is a new
C-contiguous array in the same place and dtype. Arrays in different places, and shapes that do not
broadcast, raise ValueError; other types and mixed dtypes raise TypeError.

>>> add(np.float32([[1], [2]]) * np.ones(2, np.float32), 0.5)
array([[1.5, 1.5],
       [2.5, 2.5]], dtype=float32)
"""

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from numpy import ndarray

from numbsparse import edits, kernels
from numbsparse.device import DeviceArray, empty
from numbsparse.dtypes import as_dtype, is_bfloat16, is_floating, type_name
from numbsparse.ops.operands import (
    ARRAYS,
    CPU_FLOATS,
    GPU_FLOATS,
    GPU_TAKES,
    check_pair,
    check_writeable,
    contiguous,
    is_contiguous,
    is_gpu_float,
    not_an_array,
    on_gpu,
    overlap,
    places_differ,
    together,
)
from numbsparse.patterns.checks import REAL

NUMBERS = REAL


def add(a: Any, b: Any) -> Any:
    """a + b, of two arrays or an array and a number."""
    return _binary(np.add, "add", a, b)


def subtract(a: Any, b: Any) -> Any:
    """a - b, of two arrays or an array and a number."""
    return _binary(np.subtract, "subtract", a, b)


def multiply(a: Any, b: Any) -> Any:
    """a * b, of two arrays or an array and a number."""
    return _binary(np.multiply, "multiply", a, b)


def divide(a: Any, b: Any) -> Any:
    """a / b, of two arrays or an array and a number."""
    return _binary(np.divide, "divide", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of a and b, of two arrays or an array and a number; NaN where either is NaN."""
    return _binary(np.maximum, "maximum", a, b)


def power(a: Any, exponent: float) -> Any:
    """a ** exponent, for a number `exponent`."""
    if not isinstance(exponent, NUMBERS):
        raise TypeError(f"exponent takes a number, got {type_name(exponent)}")
    if on_gpu(a, "a"):
        return apply_on_gpu("power", a, float(exponent))
    if exponent == 1:
        return copy(a)
    if exponent in (2, 3, 4):  # by products: many times faster than NumPy's power
        return contiguous(reduce(np.multiply, [a] * int(exponent)))
    return contiguous(np.power(a, float(exponent)))


def negative(a: Any) -> Any:
    """-a."""
    return _unary(np.negative, "negative", a)


def exp(a: Any) -> Any:
    """e ** a."""
    return _unary(np.exp, "exp", a)


def expm1(a: Any) -> Any:
    """e ** a - 1, with all its digits near a = 0."""
    return _unary(np.expm1, "expm1", a)


def log(a: Any) -> Any:
    """The natural logarithm."""
    return _unary(np.log, "log", a)


def sqrt(a: Any) -> Any:
    """The square root."""
    return _unary(np.sqrt, "sqrt", a)


def cast(a: Any, dtype: Any) -> Any:
    """The values rounded to float16, bfloat16, float32, or on the CPU float64: a new array.

    >>> cast(np.float32([1 / 3, 70000]), "float16")
    array([0.3333,    inf], dtype=float16)
    """
    dtype = as_dtype(dtype)
    if not isinstance(a, ndarray | DeviceArray):
        raise TypeError(not_an_array(a, "a"))
    gpu = isinstance(a, DeviceArray)
    for argument, given in (("a", a.dtype), ("dtype", dtype)):
        if not (is_gpu_float(given) if gpu else is_floating(given)):
            takes = GPU_TAKES if gpu else "float16, bfloat16, float32 or float64"
            raise TypeError(f"{argument} takes {takes}, got {given}")
    target: Any = empty(a.shape, dtype) if gpu else np.empty(a.shape, dtype)
    with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN, as on a GPU
        write(target, a)
    return target


def copy(a: Any) -> Any:
    """A new C-contiguous array with the values of `a`, of any dtype."""
    if isinstance(a, DeviceArray):
        target = empty(a.shape, a.dtype)
        write(target, a)
        return target
    if not isinstance(a, ndarray):
        raise TypeError(not_an_array(a, "a"))
    return np.array(a, order="C") if a.flags.c_contiguous else contiguous(a)


def gapless(a: Any) -> Any:
    """`a` itself where it is C-contiguous, or None; else a copy that is."""
    return a if a is None or is_contiguous(a) else copy(a)


def broadcast_to(a: Any, shape: tuple[int, ...]) -> Any:
    """The values repeated to a larger shape by NumPy's rules, as a new array.

    >>> broadcast_to(np.float32([[1], [2]]), (2, 3))
    array([[1., 1., 1.],
           [2., 2., 2.]], dtype=float32)
    """
    gpu, shape = on_gpu(a, "a"), tuple(shape)
    extra = len(shape) - a.ndim
    if (
        extra < 0
        or min(shape, default=0) < 0
        or any(n not in (1, m) for n, m in zip(a.shape, shape[extra:], strict=True))
    ):
        raise ValueError(f"shape takes one that {a.shape} broadcasts to, got {shape}")
    if not gpu:
        return np.array(np.broadcast_to(a, shape), order="C")
    repeated = empty(shape, a.dtype)
    kernels.elementwise.copy(repeated, a)
    return repeated


def copy_into(target: Any, source: Any) -> None:
    """target[...] = source, in one place and one shape; strides and dtypes may differ.

    They may share memory. On a GPU bfloat16 combines only with floats, because kernels know it by
    its bits.
    """
    check_writeable("target", target)
    both = isinstance(target, DeviceArray) and isinstance(source, DeviceArray)
    write(target, copy(source) if both and overlap(target, source) else source)
    edits.note(target, "copy_into")


def add_into(target: Any, b: Any) -> None:
    """target += b, in memory that no tensor has yet; its shape is that of their sum."""
    check_pair("target", target, "b", b)
    if isinstance(target, ndarray):
        np.add(target, b, out=target)
    elif target.is_contiguous:
        kernels.elementwise.run("add", target, target, b)
    else:
        write(target, add(target, b))


def write(target: Any, source: Any) -> None:
    """`copy_into` memory that no tensor has yet."""
    if (on_gpu := isinstance(target, DeviceArray)) != isinstance(source, DeviceArray):
        raise ValueError(places_differ("target", "source"))
    if target.shape != source.shape:
        raise ValueError(f"target and source take one shape, got {target.shape} and {source.shape}")
    if on_gpu:
        for a, b in ((target.dtype, source.dtype), (source.dtype, target.dtype)):
            if is_bfloat16(a) and not is_floating(b):
                raise TypeError(f"target and source take floats with bfloat16, got {b}")
        kernels.elementwise.copy(target, source)
    else:
        target[...] = source


def _unary(function: Callable[..., Any], name: str, a: Any) -> Any:
    if on_gpu(a, "a"):
        return apply_on_gpu(name, a)
    # Of Fortran's order the result has the same at first: to go across it twice takes longer.
    return contiguous(function(a) if a.flags.forc else function(a, order="C"))


def _binary(function: Callable[..., Any], name: str, a: Any, b: Any) -> Any:
    # The common cases first, cheaply: this runs thousands of times a second on small arrays.
    if (
        type(a) is DeviceArray
        and a.dtype in GPU_FLOATS
        and (type(b) is float or (type(b) is DeviceArray and b.dtype == a.dtype))
    ):
        return apply_on_gpu(name, a, b)
    if type(a) is ndarray and a.dtype in CPU_FLOATS:
        checked = type(b) is float or (type(b) is ndarray and b.dtype is a.dtype)
    else:
        checked = type(a) is float and type(b) is ndarray and b.dtype in CPU_FLOATS
    if not checked:
        a, b = _number(a, "a"), _number(b, "b")
        if isinstance(a, float) and isinstance(b, float):
            raise TypeError("a and b take at least one array, got two numbers")
        arrays = {n: x for n, x in (("a", a), ("b", b)) if not isinstance(x, float)}
        if together(**arrays):
            return apply_on_gpu(name, a, b)
    try:
        first = b if type(a) is float else a
        y = function(a, b) if first.flags.forc else function(a, b, order="C")
    except ValueError:
        raise ValueError(_do_not_broadcast(a.shape, b.shape)) from None
    return y if type(y) is ndarray and y.flags.c_contiguous else contiguous(y)


def _number(x: Any, argument: str) -> Any:
    """A number as a float, so that it never widens an array's dtype; an array as it is."""
    if isinstance(x, ARRAYS):
        return x
    if isinstance(x, NUMBERS):
        return float(x)
    raise TypeError(
        f"{argument} takes a NumPy array, a DeviceArray or a number, got {type_name(x)}"
    )


def apply_on_gpu(name: str, *operands: Any) -> DeviceArray:
    """A function of kernels.elementwise on arrays and floats that passed the checks."""
    arrays = [x for x in operands if type(x) is DeviceArray]
    first = arrays[0]
    shape = first.shape if len(arrays) == 1 else _broadcast(*(x.shape for x in arrays))
    out = empty(shape, first.dtype)
    kernels.elementwise.run(name, out, *operands)
    return out


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    first, last = shapes[0], shapes[-1]
    if first == last or (len(shapes) == 2 and last and first[-len(last) :] == last):
        return first
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(_do_not_broadcast(*shapes)) from None


def _do_not_broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    return f"a and b take shapes that broadcast together, got {a} and {b}"
