"""Sums that the split into two tf32 cannot give: those with an infinity or a NaN.

inf = inf + 0 as a split, and inf times the lesser part of the other factor is a NaN or of the wrong
sign. An output that was not finite is therefore computed once more, in float32 from start to end.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64, uint32

from numbsparse.kernels.ptx import as_float32, as_uint32


@cache
def all_finite(M: int, JB: int) -> Any:
    """Whether all sums of this lane are finite; False may be wrong where they are huge."""

    @cuda.jit(device=True)
    def are_finite(acc):
        # Four sums of their own, because each addition waits for the one before it.
        s0 = s1 = s2 = s3 = float32(0)
        for m in range(M):
            for n in range(JB):
                s0 += acc[m, n, 0]
                s1 += acc[m, n, 1]
                s2 += acc[m, n, 2]
                s3 += acc[m, n, 3]
        return finite((s0 + s1) + (s2 + s3))

    return are_finite


@cache
def mend_line(size: int, turned: bool, count: int, place: Any) -> Any:
    """Compute again what is not finite of this lane's outputs in a line of y = x @ w.

    place(n) = (row of the batch, feature of the line) of output n of `count`.
    """
    DEPTH = min(size, 32)
    TERM, LINE = (1, size) if turned else (size, 1)
    start_of = square_start(size)

    @cuda.jit(device=True)
    def mend(x, x_is, values, plan, sections, line, y, y_is):
        own = sections[3] + line
        for n in range(count):
            b, i = place(n)
            feature = line * DEPTH + i
            at = b * y_is[2] + feature * y_is[3]
            if b < x_is[0] and feature < y_is[1] and not finite(y[at]):
                value = float32(0)
                for entry in range(plan[own], plan[own + 1]):
                    c = plan[sections[4] + entry] * int64(DEPTH)
                    x_at = b * x_is[2] + c * x_is[3]
                    w_at = start_of(plan[sections[5] + entry]) + i * LINE
                    for k in range(min(DEPTH, x_is[1] - c)):
                        value += x[x_at + k * x_is[3]] * values[w_at + k * TERM]
                y[at] = value

    return mend


@cache
def own_lines(J: int, JB: int) -> Any:
    """The places of a lane that has J lines of w and twice JB of x side by side."""

    @cuda.jit(device=True)
    def place(n):
        lane = uint32(cuda.threadIdx.x) % 32
        return 2 * JB * (lane % 4) + n // J, J * (lane // 4) + n % J

    return place


@cache
def mend_square(size: int, JB: int) -> Any:
    """Compute again what is not finite of this lane's outputs in a unit of dvalues."""

    @cuda.jit(device=True)
    def mend(x, x_is, x_first, dy, dy_is, dy_first, dvalues, at):
        lane = uint32(cuda.threadIdx.x) % 32
        _, in_features, _, _ = x_is
        _, out_features, _, _ = dy_is
        for n in range(2 * JB * 4):
            i, k = 2 * JB * (lane % 4) + n // 4, n % 4
            inside = x_first + i < in_features and dy_first + k < out_features
            if inside and not finite(dvalues[at + i * size + k]):
                dvalues[at + i * size + k] = one_product(
                    x, x_is, x_first + i, dy, dy_is, dy_first + k
                )

    return mend


@cuda.jit(device=True)
def mend_tile(x, x_is, x_first, dy, dy_is, dy_first, tile, start):
    """Compute again what is not finite of this lane's outputs in a square of dvalues.

    `tile` is the shared memory in which it lies from `start` on, see `block_tiles`.
    """
    lane = uint32(cuda.threadIdx.x) % 32
    g, q = lane // 4, lane % 4
    for n in range(32):
        i, k = 8 * (n // 8) + 2 * q + n // 4 % 2, n % 4
        at = start + 32 * i + 4 * (g ^ (i % 8)) + k
        if not finite(as_float32(tile[at])):
            value = one_product(x, x_is, x_first + i, dy, dy_is, dy_first + 4 * g + k)
            tile[at] = as_uint32(value)


@cuda.jit(device=True)
def one_product(x, x_is, i, dy, dy_is, k):
    """The sum over the batch of feature i of x times feature k of dy."""
    value = float32(0)
    for b in range(x_is[0]):
        value += x[b * x_is[2] + i * x_is[3]] * dy[b * dy_is[2] + k * dy_is[3]]
    return value


@cuda.jit(device=True)
def finite(value):
    return value - value == float32(0)


@cache
def square_start(size: int) -> Any:
    """Where square number s of 32 by 32 starts among the values; a smaller block is one square."""
    CUT = max(size // 32, 1)

    @cuda.jit(device=True)
    def start_of(square):
        s = int64(square)
        if CUT == 1:
            return s * (size * size)
        place = s % (CUT * CUT)
        return s // (CUT * CUT) * (size * size) + place // CUT * (32 * size) + place % CUT * 32

    return start_of
