"""Activations in memory of several orders, and products of a rung on them."""

import numpy as np

from numbsparse import ops
from numbsparse.device import to_device
from numbsparse.dtypes import finfo
from numbsparse.kernels.matmul import k0_reference

MEMORIES = ["batch-major", "feature-major", "feature-major, apart", "feature-major, inside"]


def placed(a, memory):
    """a (rows, features) on the GPU, and all memory that it is in, elsewhere NaN."""
    rows, features = a.shape
    if memory == "batch-major":
        whole = to_device(a)
        return whole, whole
    wide, first = {"feature-major": (rows, 0), "feature-major, apart": (rows + 2, 0)}.get(
        memory, (rows + 4, 1)
    )
    around = np.full((features, wide), np.nan, a.dtype)
    around[:, first : first + rows] = a.T
    whole = to_device(around)
    return whole[:, first : first + rows].T, whole


def error_of(precision):
    """Of the sum of all magnitudes."""
    return 66 * 2.0**-23 + (2.0**-9 if precision == "high" else 0)


def check(rung, name, x, values, layout, n_out, x_memory, y_memory, precision="highest"):
    """Against float64; y and what is around it are NaN before, and around it after."""
    (there, _), y_before = placed(x, x_memory), np.full((len(x), n_out), np.nan, x.dtype)
    y, around = placed(y_before, y_memory)
    compute = getattr(rung, name)
    compute(there, to_device(values), ops.index_beside(layout, around), y, precision)
    expected, magnitude = np.full_like(y_before, np.nan, np.float64), np.zeros(y_before.shape)
    error = error_of(precision)
    exact = [a.astype(np.float64) for a in (x, values)]
    with np.errstate(invalid="ignore"):
        getattr(k0_reference, name)(*exact, layout.index, expected)
        getattr(k0_reference, name)(*map(abs, exact), layout.index, magnitude)
        eps, least = (
            float(getattr(finfo(x.dtype), name)) for name in ("eps", "smallest_subnormal")
        )
        bound = error * magnitude + eps * abs(expected) + least / 2
        got = y.numpy().astype(np.float64)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(got[~finite], expected[~finite])
        assert (abs(got - expected)[finite] <= bound[finite]).all()  # NaN is not
    n_nan = np.isnan(around.numpy().astype(np.float64)).sum() - np.isnan(expected).sum()
    assert n_nan == around.size - y.size
