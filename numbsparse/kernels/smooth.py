"""exp, sigmoid and tanh as compiled CPU code computes them: float32 in loops that fill vectors.

A loop around a call of the C library takes one number at a time. These are plain arithmetic, so the
compiler turns a loop around them into vector instructions; their relative errors stay below 2e-7.
float64 takes the C library's. All of it works only inside `numba.njit`; functions that call them
take `**FAST`, without which a division is checked for a zero, one number at a time. The constants
serve GPU kernels too.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

FAST: dict[str, Any] = {"error_model": "numpy", "fastmath": {"contract"}}

ONE, TWO = np.float32(1), np.float32(2)
LOWEST, LARGEST = np.float32(-87), np.float32(88)  # exponents whose results are normal float32
SMALL = np.float32(0.625)
LOG2_E = np.float32(1.4426950408889634)
LN_2, LN_2_REST = np.float32(0.693359375), np.float32(-2.12194440e-4)
TO_WHOLE = np.float32(1.5 * 2**23)  # added and taken away again, it leaves a whole number

# Both polynomials: S. L. Moshier, "Cephes Mathematical Library", expf and tanhf.
EXP = tuple(
    np.float32(p)
    for p in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2,
              1.6666665459e-1, 5.0000001201e-1)
)  # fmt: skip
TANH = tuple(
    np.float32(p)
    for p in (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
              -3.33332819422e-1)
)  # fmt: skip


def exp(x: Any) -> Any:
    """e ** x; of float32 from -87 to 88, and what is outside as its nearer end."""
    raise NotImplementedError("for compiled code")


def sigmoid(x: Any) -> Any:
    """1 / (1 + e ** -x)."""
    raise NotImplementedError("for compiled code")


def tanh(x: Any) -> Any:
    """The hyperbolic tangent."""
    raise NotImplementedError("for compiled code")


@intrinsic
def _power_of_two(typing, x):
    """2 ** n, for the float32 n + TO_WHOLE: its last bits are n, and become the exponent."""
    i32 = ir.IntType(32)

    def build(context, builder, signature, args):
        exponent = builder.add(builder.bitcast(args[0], i32), i32(127))
        return builder.bitcast(builder.shl(exponent, i32(23)), ir.FloatType())

    return types.float32(types.float32), build


@overload(exp, jit_options=FAST)
def _exp(x):
    def of_float32(x):
        x = LARGEST if x > LARGEST else x
        x = LOWEST if x < LOWEST else x
        shifted = x * LOG2_E + TO_WHOLE
        whole = shifted - TO_WHOLE
        x = x - whole * LN_2 - whole * LN_2_REST
        a, b, c, d, e, f = EXP
        p = ((((a * x + b) * x + c) * x + d) * x + e) * x + f
        return (p * (x * x) + x + ONE) * _power_of_two(shifted)

    return of_float32 if x == types.float32 else lambda x: math.exp(x)


@overload(sigmoid, jit_options=FAST)
def _sigmoid(x):
    return lambda x: ONE / (ONE + exp(-x))


@overload(tanh, jit_options=FAST)
def _tanh(x):
    def of_float32(x):
        size = abs(x)
        far = ONE - TWO / (exp(size + size) + ONE)
        xx = x * x
        a, b, c, d, e = TANH
        near = x + x * xx * ((((a * xx + b) * xx + c) * xx + d) * xx + e)
        return near if size < SMALL else math.copysign(far, x)

    return of_float32 if x == types.float32 else lambda x: math.tanh(x)
