"""Tiles of halves multiplied the other way round, w x.T: a lane then has neighbouring rows of y.

An mma leaves a lane two neighbours along its second operand: with w there, two features of one row;
with x there, two rows of one feature, which is a word of a y that lies feature by feature. Both
operands have the same fragments, so they change places at no cost.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, uint32

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.products import MMA
from numbsparse.kernels.matmul.k8_small_batch.tiles import take_halves


@cache
def multiply_swapped(
    form: Form, x_across: bool, w_across: bool, x_groups: int, paired: bool
) -> Any:
    """acc += w x.T of a tile of w and one of x: acc[m, t, 2 r + p] is that of w's line number g of
    group 2 m + r and x's line number 2 q + p of group t."""
    X, W = (x_groups, 2), (4, 2)
    take_x, take_w = take_halves(x_across, x_groups, False), take_halves(w_across, 4, paired)
    mma = MMA[form.dtype]

    @cuda.jit(device=True)
    def step(tile, x_start, w_start, s, acc):
        x, w = cuda.local.array(X, uint32), cuda.local.array(W, uint32)
        take_x(tile, x_start, s, x)
        take_w(tile, w_start, s, w)
        for m in range(2):
            a0, a1, a2, a3 = w[2 * m, 0], w[2 * m + 1, 0], w[2 * m, 1], w[2 * m + 1, 1]
            for t in range(x_groups):
                c = acc[m, t]
                c[0], c[1], c[2], c[3] = mma(
                    a0, a1, a2, a3, x[t, 0], x[t, 1], c[0], c[1], c[2], c[3]
                )

    @cuda.jit(device=True)
    def multiply(tile, x_start, w_start, acc):
        # Written out, as in `tiles`.
        step(tile, x_start, w_start, uint32(0), acc)
        step(tile, x_start, w_start, uint32(1), acc)

    return multiply
