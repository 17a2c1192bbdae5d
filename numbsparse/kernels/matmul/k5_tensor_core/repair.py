"""Outputs that a split into tf32 made NaN, computed anew in float32: rare, so simple and slow.

An infinity splits into hi = inf and lo = inf - inf, as does a value that rounds up to one. Both
make NaN of every sum that they enter, so NaN is the mark of the outputs to look at.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, int64

from numbsparse.kernels.matmul.k5_tensor_core.fetches import Tile


@cache
def any_nan(*shape: int) -> Any:
    """Whether accumulators (columns or cells, strips, strips, 4) of a thread hold a NaN: 0 or 1."""
    COUNT, TA, TB, _ = shape

    @cuda.jit(device=True)
    def nan_in(acc):
        found = 0
        for c in range(COUNT):
            for m in range(TA):
                for n in range(TB):
                    for i in range(4):
                        if acc[c, m, n, i] != acc[c, m, n, i]:
                            found = 1
        return found

    return nan_in


@cache
def repair_line(B: int, tile: Tile, turned: bool, x_turned: bool, y_turned: bool) -> Any:
    """Of the tile that a block of threads wrote, where y is NaN: y = x @ w by plain sums."""
    BM, BN, COLUMNS = tile.BM, tile.BN, max(tile.BN // B, 1)
    THREADS = tile.threads

    @cuda.jit(device=True)
    def repair(
        x,
        stride,
        batch,
        in_features,
        values,
        indices,
        blocks,
        first,
        last,
        y,
        top,
        left,
        out_features,
    ):
        for item in range(cuda.threadIdx.x, BM * BN, THREADS):
            in_row, in_column = (item % BM, item // BM) if y_turned else (item // BN, item % BN)
            row, feature = top + in_row, int64(left + in_column)
            if row >= batch or feature >= out_features:
                continue
            at = feature * batch + row if y_turned else row * out_features + feature
            if y[at] == y[at]:
                continue
            total = float32(0)
            for entry in range(first, last):
                block = blocks[entry * COLUMNS + in_column // B % COLUMNS]
                if block < 0:
                    continue
                c, j = indices[entry] * B, feature % B
                for i in range(min(B, in_features - c)):
                    at_x = (c + i) * stride + row if x_turned else row * stride + c + i
                    at_w = j * B + i if turned else i * B + j
                    total += x[at_x] * values[int64(block) * (B * B) + at_w]
            y[at] = total

    return repair
