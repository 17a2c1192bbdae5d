"""How likely a normal number is below others, Phi, in float32: for gelu on the CPU.

SciPy takes one number at a time, 14 ns each; this loop fills vectors, in 1 ns. Relative errors are
below 5e-7, and from 13 standard deviations on the result is 0 or 1.
"""

import numpy as np
from numba import types

from numbsparse.kernels.cores import compiled, read_only
from numbsparse.kernels.smooth import FAST, ONE, TO_WHOLE, exp

ZERO, HALF, EIGHT, EIGHTH = np.float32(0), np.float32(0.5), np.float32(8), np.float32(0.125)
HALF_SQRT_HALF = np.float32(0.5**1.5)
FAR = np.float32(13)  # e ** (-FAR^2 / 2) is nearly the least that `exp` gives: from here on 0

# erfc(z) = t e^(-z^2 + p(t)), t = 1 / (1 + z / 2): Press et al., "Numerical Recipes in C", 6.2.
ERFC = tuple(
    np.float32(p)
    for p in (0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807, -0.18628806,
              0.09678418, 0.37409196, 1.00002368, -1.26551223)
)  # fmt: skip


@compiled(types.void(read_only(types.float32, 1), types.float32[::1]), **FAST)
def phi(x, y):
    """y[i] = Phi(x[i]) = erfc(-x[i] / sqrt(2)) / 2."""
    a, b, c, d, e, f, g, h, k, m = ERFC
    for i in range(len(x)):
        size = abs(x[i])
        size = FAR if size > FAR else size
        t = ONE / (ONE + HALF_SQRT_HALF * size)
        p = (
            (((((((a * t + b) * t + c) * t + d) * t + e) * t + f) * t + g) * t + h) * t + k
        ) * t + m
        # The square of `near`, of few bits, is exact: that of a size would be off in e's exponent.
        near = (size * EIGHT + TO_WHOLE - TO_WHOLE) * EIGHTH
        rest = p - HALF * (size - near) * (size + near)
        below = HALF * t * exp(-HALF * near * near) * exp(rest)
        below = ZERO if size == FAR else below
        y[i] = ONE - below if x[i] > ZERO else below
