"""Sums that operands split in two tf32 cannot give: those with an infinity or a NaN.

inf = inf + 0 as a split, and inf times the lesser part of the other operand is a NaN or of the
wrong sign. So does a value that rounds up to an infinity. An output that is not finite is computed
once more, in float32 from start to end: rare, so simple and slow.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32


@cuda.jit(device=True)
def finite(value):
    return value - value == float32(0)


@cache
def all_finite(M: int, N: int) -> Any:
    """Whether sums (M, N, 4) of a lane are all finite; False may be wrong where they are huge."""

    @cuda.jit(device=True)
    def are_finite(acc):
        # Four sums of their own, because each addition waits for the one before it.
        s0 = s1 = s2 = s3 = float32(0)
        for m in range(M):
            for n in range(N):
                s0 += acc[m, n, 0]
                s1 += acc[m, n, 1]
                s2 += acc[m, n, 2]
                s3 += acc[m, n, 3]
        return finite((s0 + s1) + (s2 + s3))

    return are_finite


@cuda.jit(device=True)
def plain_sum(value, a, a_at, a_step, b, b_at, b_step, count):
    """value + the sum of a[a_at + k * a_step] * b[b_at + k * b_step] over k < count, in order."""
    for k in range(count):
        value += a[a_at + k * a_step] * b[b_at + k * b_step]
    return value
