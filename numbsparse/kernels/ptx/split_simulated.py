"""`wgmma` of tf32 with the first operand in registers, in the simulator."""

from functools import cache
from typing import Any

import numpy as np

from numbsparse.kernels.ptx.meaning import float32_of_tf32
from numbsparse.kernels.ptx.simulated import flat_bytes
from numbsparse.kernels.ptx.wgmma_simulated import accumulators, check_start, multiplied, read


@cache
def wgmma_split(
    n: int, k_steps: int, exact: bool, units: int = 1, apart: bool = False, alone: bool = False
) -> Any:
    """acc += a @ b, 64 x 8 k_steps times 8 k_steps x n: with exact, lo @ hi + hi @ lo + hi @ hi.

    Warp w of the warpgroup has rows 16 w to 16 w + 15 of a, in registers as `meaning.A_16x8`, four
    for each 8 terms, and of acc, as `meaning.C_16x8` for every 8 columns. b is in shared memory
    as matrices of 8 columns x 4 terms, 128 bytes each: n / 8 side by side, then the next terms;
    after all of hi the same of lo; or, with `apart`, each 8 columns by themselves, terms of hi and
    then of lo, be it exact or not. The products start from zero, and acc is added in float32. Two
    units are two such products, one after another in acc, hi and lo, each with a b of its own.
    With `alone`, b has no lo, and tensor cores add to acc.
    """
    row, column = accumulators(n)
    halves = 1 if alone else 2

    def split_meaning(hi, lo, i, shared):
        a = [_rows(part, k_steps) for part in (hi, lo)]
        check_start(shared, 4 * int(i[0]))
        start = int(i[0]) * 4
        items, places = shared[start:], start + np.arange(halves * 32 * n * k_steps)
        if apart:
            read(shared, places.reshape(n // 8, halves, -1)[:, : 1 + exact])
            strips = items[: places.size].reshape(n // 8, halves, -1)[:, : 1 + exact]
            b = [
                np.hstack([_terms(strip, 8, k_steps) for strip in part])
                for part in strips.swapaxes(0, 1)
            ]
        else:
            items = items[: (1 + exact) * 32 * n * k_steps]
            read(shared, places[: items.size])
            b = [_terms(part, n, k_steps) for part in np.split(items, 1 + exact)]
        # In float64: the bits of a column do not depend on how many others there are.
        a, b = ([part.astype(np.float64) for part in parts] for parts in (a, b))
        product = a[0] @ b[0]
        if exact:
            product = a[1] @ b[0] + a[0] @ b[1] + product
        return product[row, column].astype(np.float32)

    def multiply(acc, hi, lo, shared, *places):
        parts = (a.reshape(units, -1) for a in (acc, hi, lo))
        for own, hi_, lo_, i in zip(*parts, places, strict=True):
            operands, bytes_ = (hi_.copy(), lo_.copy(), int(i)), (flat_bytes(shared),)
            own += multiplied(split_meaning, *operands, shared=bytes_)

    return multiply


def _rows(registers, k_steps):
    """(64, 8 k_steps) of registers (128, 4 k_steps)."""
    t, i = np.arange(128)[:, None], np.arange(4 * k_steps)
    a = np.empty((64, 8 * k_steps), np.float32)
    row = t // 32 * 16 + t % 32 // 4 + i % 2 * 8
    a[row, i // 4 * 8 + i // 2 % 2 * 4 + t % 4] = float32_of_tf32(registers)
    return a


def _terms(part, n, k_steps):
    """(8 k_steps, n) of matrices (2 k_steps, n / 8, 8 columns, 4 terms)."""
    matrices = float32_of_tf32(part.view(np.uint32)).reshape(2 * k_steps, n // 8, 8, 4)
    return matrices.transpose(0, 3, 1, 2).reshape(8 * k_steps, n)
