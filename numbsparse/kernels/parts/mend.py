"""Outputs that a split into tf32 made NaN, again by plain sums of float32: rare, so simple.

An infinity splits into hi = inf and lo = inf - inf, as does a value that rounds up to one. Both
make NaN of every sum that they enter, so NaN marks the outputs to look at.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64


@cache
def mender_of_lines(B: int) -> Any:
    """mend(y, n, feature, dense): y[n, feature] of y = x @ w, if that is NaN.

    y : (values, row stride, column stride, batch, features)
    dense : (x, strides of x, its features, w, strides along the sum and across, and which blocks
        each line of w has: indptr, indices, blocks)
    """

    @cuda.jit(device=True)
    def mend(y, n, feature, dense):
        values, row_stride, column_stride, _, _ = y
        x, x_strides, in_features, w, w_strides, indptr, indices, blocks = dense
        at = n * row_stride + feature * column_stride
        if values[at] == values[at]:
            return
        total = float32(0)
        for entry in range(indptr[feature // B], indptr[feature // B + 1]):
            first, block = indices[entry] * B, int64(blocks[entry]) * (B * B)
            block += feature % B * w_strides[1]
            for i in range(min(B, in_features - first)):
                value = x[n * x_strides[0] + (first + i) * x_strides[1]]
                total += value * w[block + i * w_strides[0]]
        values[at] = total

    return mend


@cache
def mender_of_blocks(B: int, swapped: bool, x_transposed: bool, dy_transposed: bool) -> Any:
    """mend(dvalues, at, dense): number `at` of dvalues, (blocks, B, B), if that is NaN.

    dense : (x, dy, (stride of x, of dy, features of x, of dy, batch), block rows, block columns),
        x or dy feature-major where transposed, and x and dy in each other's place where swapped
    """

    @cuda.jit(device=True)
    def mend(dvalues, at, dense):
        x, dy, (x_stride, dy_stride, in_features, out_features, batch), rows, columns = dense
        if dvalues[at] == dvalues[at]:
            return
        block = at // (B * B)
        i, j = rows[block] * int64(B) + at // B % B, columns[block] * int64(B) + at % B
        feature, column = (j, i) if swapped else (i, j)
        total = float32(0)
        if feature < in_features and column < out_features:
            for n in range(batch):
                left = x[feature * x_stride + n if x_transposed else n * x_stride + feature]
                right = dy[column * dy_stride + n if dy_transposed else n * dy_stride + column]
                total += left * right
        dvalues[at] = total

    return mend
