"""Functions of each value by itself: a thread per value of the output.

A scalar function below, and the mechanism after it, make a kernel: it walks inputs and output with
their own strides, 0 along an axis that is broadcast, so that views cost no copy. Where all are
contiguous, only one axis is left and an index needs no division.

`run("add", out, a, b)` means out[...] = a + b.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
from numba import cuda, int64

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.launch import launch
from numbsparse.dtypes import is_bfloat16
from numbsparse.kernels import several
from numbsparse.kernels.floats import rounded, widened
from numbsparse.kernels.rates import GAMMA, ZETA
from numbsparse.kernels.views import walk

THREADS, FILLED = 32 if SIMULATED else 256, 16  # of a block; values of a thread that fills
LARGE = 100 if SIMULATED else 1 << 18  # values, of which a thread takes several

# In a kernel a Python number is a float64, and would promote the whole formula.
ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
GELU_SCALE = np.float32(math.sqrt(2 / math.pi))
GELU_CUBE = np.float32(0.044715)
GELU_SLOPE = np.float32(3 * 0.044715)
GELU_FAR = np.float32(16)  # from here on Phi, and (1 + tanh) / 2, are 1 or 0
SQRT_HALF = np.float32(math.sqrt(0.5))
NORMAL = np.float32(1 / math.sqrt(2 * math.pi))
LOWEST, STRETCH = np.float32(GAMMA), np.float32(ZETA - GAMMA)  # of a hard-concrete gate


def maximum(a, b):
    return a if a >= b or a != a else b  # a != a: NaN


def sigmoid(x):
    # The exponential of a negative number never overflows.
    if x >= ZERO:
        return ONE / (ONE + math.exp(-x))
    e = math.exp(x)
    return e / (ONE + e)


def stretched_sigmoid(x):
    # As here no function calls another: sigmoid(x) = (1 + tanh(x / 2)) / 2.
    y = (HALF * math.tanh(HALF * x) + HALF) * STRETCH + LOWEST
    return ZERO if y <= ZERO else ONE if y >= ONE else y


def stretched_sigmoid_grad(x, dy):
    s = HALF * math.tanh(HALF * x) + HALF
    y = s * STRETCH + LOWEST
    return dy * (STRETCH * s * (ONE - s)) if y > ZERO and y <= ONE else ZERO


def relu(x):
    return ZERO if x <= ZERO else x


def relu_grad(x, dy):
    return dy if x > ZERO else ZERO


def elu(x):
    return x if x > ZERO else math.expm1(x)


def elu_grad(x, dy):
    return dy if x > ZERO else dy * math.exp(x)


def softplus(x):
    return max(x, ZERO) + math.log1p(math.exp(-abs(x)))


def gelu(x):
    if abs(x) >= GELU_FAR:
        return x if x > ZERO else ZERO
    return x * HALF * math.erfc(-x * SQRT_HALF)  # all digits for x << 0 too


def gelu_grad(x, dy):
    if abs(x) >= GELU_FAR:  # where squares may be infinite
        return dy * (ONE if x > ZERO else ZERO)
    phi = HALF * math.erfc(-x * SQRT_HALF)
    return dy * (phi + x * NORMAL * math.exp(-HALF * x * x))


def gelu_tanh(x):
    if abs(x) >= GELU_FAR:  # where cubes may be infinite
        return x if x > ZERO else ZERO
    t = math.tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x))
    return HALF * x * (ONE + t)


def gelu_tanh_grad(x, dy):
    if abs(x) >= GELU_FAR:  # where squares may be infinite
        return dy * (ONE if x > ZERO else ZERO)
    t = math.tanh(GELU_SCALE * (x + GELU_CUBE * x * x * x))
    du = GELU_SCALE * (ONE + GELU_SLOPE * x * x)
    return dy * HALF * (ONE + t + x * (ONE - t * t) * du)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "power": lambda a, exponent: math.pow(a, exponent),
    "negative": lambda a: -a,
    "exp": lambda a: math.exp(a),
    "expm1": lambda a: math.expm1(a),
    "log": lambda a: math.log(a),
    "sqrt": lambda a: math.sqrt(a),
    "tanh": lambda a: math.tanh(a),
}
"""Each of float32 values, to a float32."""

for _function in (maximum, sigmoid, softplus, relu, relu_grad, elu, elu_grad):
    FUNCTIONS[_function.__name__] = _function
for _function in (gelu, gelu_grad, gelu_tanh, gelu_tanh_grad):
    FUNCTIONS[_function.__name__] = _function
for _function in (stretched_sigmoid, stretched_sigmoid_grad):
    FUNCTIONS[_function.__name__] = _function


def run(name: str, out: DeviceArray, *operands: DeviceArray | float) -> None:
    """out[...] = function(*operands), broadcast to the shape of `out`, which is C-contiguous."""
    shape, strides = walk(out.shape, *(x for x in operands if type(x) is DeviceArray))
    if len(strides) == 2 and out.size >= LARGE and _run_large(name, out, operands, shape, strides):
        return
    flat: list[Any] = []
    numbers: list[Any] = []
    kinds, steps = "", iter(strides)
    for x in operands:
        if type(x) is DeviceArray:
            kinds += "a"
            flat += x.span, next(steps)
        else:
            kinds += "n"
            numbers.append(x)
    kernel = _kernel(name, MAKERS[kinds])
    launch(kernel, blocks(out.size), THREADS, out.span, shape, *flat, *numbers)


def _run_large(name: str, out: DeviceArray, operands: Any, shape: Any, strides: Any) -> bool:
    """`run` of two arrays with several values a thread, if strides allow; whether they do."""
    arrays = out.span, *(x.span for x in operands)
    if strides == [(1,), (1,)]:
        launch(_kernel(name, several.of_arrays), *several.flat_grid(out.size), *arrays)
    elif strides == [(shape[-1], 1), (0, 1)] and shape[-1] <= several.WIDEST:
        kernel = _kernel(name, several.of_array_and_row)
        launch(kernel, *several.table_grid(*shape), *arrays, *shape)
    else:
        return False
    return True


def copy(out: DeviceArray, source: DeviceArray) -> None:
    """out[...] = source, broadcast and rounded to the dtype of `out`; both of any strides."""
    shape, (out_strides, strides) = walk(out.shape, out, source)
    args = out.span, out_strides, source.span, strides
    converts = out.dtype != source.dtype and (is_bfloat16(out.dtype) or is_bfloat16(source.dtype))
    kernel = convert_kernel if converts else copy_kernel
    launch(kernel, blocks(out.size), THREADS, out.size, shape, *args)


def fill(out: DeviceArray, value: float) -> None:
    """out[...] = value, for a C-contiguous `out`."""
    launch(fill_kernel, blocks(-(-out.size // FILLED)), THREADS, out.span, value)


def blocks(size: int) -> int:
    """Blocks of threads with a thread for each of `size` items."""
    return -(-size // THREADS)


@cuda.jit(device=True)
def offset(i, shape, strides):
    """Where item i, in C order, of a view is in its span."""
    return offsets(i, shape, strides, strides)[0]


@cuda.jit(device=True)
def offsets(i, shape, a_strides, b_strides):
    """`offset` in two views of one shape, with the divisions shared."""
    a, b = 0, 0
    for axis in range(len(shape) - 1, 0, -1):
        rest = i // shape[axis]
        a += (i - rest * shape[axis]) * a_strides[axis]
        b += (i - rest * shape[axis]) * b_strides[axis]
        i = rest
    return a + i * a_strides[0], b + i * b_strides[0]


@cuda.jit
def copy_kernel(size, shape, out, out_strides, source, strides):
    i = cuda.grid(1)
    if i < size:
        target, place = offsets(i, shape, out_strides, strides)
        out[target] = source[place]


@cuda.jit
def convert_kernel(size, shape, out, out_strides, source, strides):
    i = cuda.grid(1)
    if i < size:
        target, place = offsets(i, shape, out_strides, strides)
        out[target] = rounded(widened(source[place]), out)


@cuda.jit
def fill_kernel(out, value):
    first = int64(cuda.blockIdx.x) * (THREADS * FILLED) + cuda.threadIdx.x
    for i in range(first, min(first + THREADS * FILLED, out.size), THREADS):
        out[i] = rounded(value, out)


@cache
def _kernel(name: str, make: Callable[[Any], Any]) -> Any:
    """The kernel that is made of a function."""
    return make(cuda.jit(device=True)(FUNCTIONS[name]))


def _of_array(function):
    @cuda.jit
    def kernel(out, shape, a, strides):
        i = cuda.grid(1)
        if i < out.size:
            out[i] = rounded(function(widened(a[offset(i, shape, strides)])), out)

    return kernel


def _of_arrays(function):
    @cuda.jit
    def kernel(out, shape, a, a_strides, b, b_strides):
        i = cuda.grid(1)
        if i < out.size:
            in_a, in_b = offsets(i, shape, a_strides, b_strides)
            out[i] = rounded(function(widened(a[in_a]), widened(b[in_b])), out)

    return kernel


def _of_array_and_number(function, number_first=False):
    @cuda.jit
    def kernel(out, shape, a, strides, number):
        i = cuda.grid(1)
        if i < out.size:
            value = widened(a[offset(i, shape, strides)])
            given = (number, value) if number_first else (value, number)
            out[i] = rounded(function(*given), out)

    return kernel


MAKERS: dict[str, Any] = {  # by the operands: "a" for an array, "n" for a number
    "a": _of_array,
    "aa": _of_arrays,
    "an": _of_array_and_number,
    "na": partial(_of_array_and_number, number_first=True),
}
