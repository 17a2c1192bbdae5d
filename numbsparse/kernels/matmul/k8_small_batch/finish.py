"""The end of a line of y: whoever has all of its sums writes it."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda, int64

from numbsparse.kernels.matmul.k8_small_batch.fragments import Form
from numbsparse.kernels.matmul.k8_small_batch.repair import all_finite
from numbsparse.kernels.matmul.k8_small_batch.sums import join_parts


@cache
def finishing(form: Form, M: int, JB: int, put: Any, mend: Any) -> Any:
    """Write a line; of a line in parts, leave this part, and let the last one to come write it.

    `put` writes the sums of a line, `mend` computes again those of a split that are not finite.
    """
    join, finite, SPLIT = join_parts(M, JB), all_finite(M, JB), form.split

    @cuda.jit(device=True)
    def finish(x, x_is, values, plan, sections, partials, tickets, name, y, y_is, acc):
        line, complete = int64(name), True
        if name < 0:
            cut = sections[1] - 3 * (int64(name) + 1)
            line, first, many = int64(plan[cut]), int64(plan[cut + 1]), int64(plan[cut + 2])
            complete = join(partials, tickets, -1 - int64(name), first, many, acc)
        if complete:
            put(y, line, y_is, acc)
            if SPLIT and not finite(acc):
                mend(x, x_is, values, plan, sections, line, y, y_is)

    return finish
