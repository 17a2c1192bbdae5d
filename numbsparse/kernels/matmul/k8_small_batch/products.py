"""32 terms of a sum for 32 by 32 outputs: lines of A times lines of B, by the tensor cores.

Lane 4 g + q brings J lines of A and JB lines of B (see `fragments`) and gets, in acc[m, n,
2 r + p], the product of A line J g + 2 m + r and B line JB (2 q + p) + n. With one line of A a lane
half of each mma is idle.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, float32, uint32

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.sums import add as add_sums
from numbsparse.kernels.matmul.k8_small_batch.sums import clear as clear_sums
from numbsparse.kernels.ptx import mma_m16n8k8_tf32, mma_m16n8k16_bf16, mma_m16n8k16_f16

MMA = {
    "float16": mma_m16n8k16_f16,
    "bfloat16": mma_m16n8k16_bf16,
    "float32": mma_m16n8k8_tf32,
}


def tiles(J: int) -> int:
    """How often 16 lines, two a lane, go into those of A."""
    return max(J // 2, 1)


@cache
def products(form: Form, J: int, JB: int) -> Any:
    """acc += A times B, over half the terms of a run: what one mma takes.

    Split float32 are three products, which start from zero and are added in float32: a tensor core
    cuts off what it adds, always towards zero, and of the 12 products of a unit that would be seen.
    """
    add, STEP = add_products(form, J, JB), (tiles(J), JB, 4)
    clear, add_up = clear_sums(tiles(J), JB), add_sums(tiles(J), JB)

    @cuda.jit(device=True)
    def once(a, a_lo, b, b_lo, acc):
        add(a, b, acc)

    @cuda.jit(device=True)
    def thrice(a, a_lo, b, b_lo, acc):
        step = cuda.local.array(STEP, float32)
        clear(step)
        # The smallest first; lo times lo is less than what a float32 holds.
        add(a_lo, b, step)
        add(a, b_lo, step)
        add(a, b, step)
        add_up(acc, step)

    return thrice if form.split else once


@cache
def add_products(form: Form, J: int, JB: int) -> Any:
    M, SECOND = tiles(J), min(J - 1, 1)
    mma = MMA[form.dtype]

    @cuda.jit(device=True)
    def add(a, b, acc):
        for m in range(M):
            a0, a2 = a[2 * m, 0], a[2 * m, 1]
            a1 = a3 = uint32(0)
            if J > 1:
                a1, a3 = a[2 * m + SECOND, 0], a[2 * m + SECOND, 1]
            for n in range(JB):
                c = acc[m, n]
                c[0], c[1], c[2], c[3] = mma(
                    a0, a1, a2, a3, b[n, 0], b[n, 1], c[0], c[1], c[2], c[3]
                )

    return add
