"""What the tests of layouts made on a device share."""

import numpy as np
from conftest import host

from numbsparse import Layout

UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def coordinates(pattern, rng, none=0, dtype=np.int64):
    """Those of a pattern's blocks, shuffled, with `none` that stand for no block."""
    rows, columns = (np.append(lines, np.full(none, -1)) for lines in np.nonzero(pattern))
    columns[len(columns) - none :: 2] = 0  # one of the two says so
    order = rng.permutation(rows.size)
    return rows[order].astype(dtype), columns[order].astype(dtype)


def made(pattern, rng, put, *, more=2, **how):
    rows, columns = coordinates(pattern, rng, **how)
    capacity = int(pattern.sum()) + more
    return Layout.on_device(put(rows), put(columns), pattern.shape, capacity=capacity)


def close(y, a, b, dtype):
    """y is a @ b, but for rounding it and its sums."""
    exact, size = a @ b, abs(a) @ abs(b)
    bound = 2 * UNIT[dtype] * abs(exact) + (b.shape[0] + 16) * 2**-23 * size
    assert (abs(host(y).astype(np.float64) - exact) <= bound).all()
