"""k8_small_batch reads feature-major activations of an odd batch where they are."""

from itertools import product

import numpy as np
import pytest
from conftest import HALVES
from ptx_helpers import needs_ampere

from numbsparse import Layout, ops
from numbsparse.device import to_device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import k0_reference
from numbsparse.kernels.matmul import k8_small_batch as rung
from numbsparse.kernels.parts import aligned
from numbsparse.kernels.parts.tiles import WIDTH

pytestmark = needs_ampere
DTYPES = ["float32", *HALVES]
NUMBERS = [("float32", "high"), *((dtype, "highest") for dtype in DTYPES)]
MEMORIES = ["batch-major", "feature-major", "feature-major, apart", "feature-major, inside"]
ROWS = [range(2, 17), range(17, 32), range(33, 63)]


@pytest.fixture
def copies(monkeypatch):
    """The shapes of what is copied."""
    shapes, copy = [], aligned.copy_matrix
    monkeypatch.setattr(aligned, "copy_matrix", lambda to, a: (shapes.append(a.shape), copy(to, a)))
    return shapes


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


def drawn_case(rng, name, B, dtype):
    pattern = rng.random((3, 4)) < 0.6
    pattern[1, 2], pattern[:, 0] = True, False  # a line of outputs is empty, one is not
    layout = Layout(pattern)
    n_in, n_out = (B * n - int(rng.integers(0, min(B, 20))) for n in (3, 4))
    if name == "input_grad":
        n_in, n_out = n_out, n_in
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(as_dtype(dtype))
    return layout, values, n_in, n_out


@pytest.mark.pairs
@pytest.mark.parametrize("rows", ROWS, ids=["few", "up to 32", "more"])
@pytest.mark.parametrize("y_memory", MEMORIES)
@pytest.mark.parametrize("of", list(product(NUMBERS, [8, 16, 32])), ids=str)
@pytest.mark.parametrize("whole", [False, True], ids=["ragged", "whole"])
@pytest.mark.parametrize("name", ["forward", "input_grad"])
def test_gapless_features_are_not_copied(name, whole, of, y_memory, rows, rng, copies):
    (dtype, precision), B = of
    layout, values, n_in, n_out = drawn_case(rng, name, B, dtype)
    if whole:
        n_in, n_out = (-(-n // B) * B for n in (n_in, n_out))
    batch = int(rng.choice(rows))
    while batch * values.itemsize % aligned.BYTES == 0:  # then x.T is aligned
        batch += 1
    x = rng.standard_normal((batch, n_in)).astype(values.dtype)
    check(name, x, values, layout, n_out, "feature-major", y_memory, precision)
    assert copies == []


@pytest.mark.pairs
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("batch", [5, 2 * WIDTH + 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["forward", "input_grad"])
def test_other_memory_is_copied(name, dtype, batch, memory, rng, copies):
    if memory == "feature-major" and batch == 5:
        pytest.skip("is not copied")
    layout, values, _, _ = drawn_case(rng, name, 8, dtype)
    n_in, n_out = (24, 32) if name == "forward" else (32, 24)
    x = rng.standard_normal((batch, n_in)).astype(values.dtype)
    check(name, x, values, layout, n_out, memory, "feature-major, inside")
    assert copies == ([] if memory == "batch-major" else [(n_in, batch)])


@pytest.mark.filterwarnings("ignore:.*invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("dtype", "B"), [("float32", 32), ("float16", 8)])
def test_infinity_and_nan_are_of_their_row_and_their_blocks_alone(dtype, B, rng):
    """Where a float32 is split, sums that are NaN are computed again: those that are there."""
    layout, values, n_in, n_out = drawn_case(rng, "forward", B, dtype)
    x = rng.standard_normal((9, n_in)).astype(dtype)
    x[3, n_in - 1], x[7, 0] = np.inf, np.nan
    check("forward", x, values, layout, n_out, "feature-major", "feature-major")


def check(name, x, values, layout, n_out, x_memory, y_memory, precision="highest"):
    """Against float64; y and what is around it are NaN before, and around it after."""
    (there, _), y_before = placed(x, x_memory), np.full((len(x), n_out), np.nan, x.dtype)
    y, around = placed(y_before, y_memory)
    compute = getattr(rung, name)
    compute(there, to_device(values), ops.index_beside(layout, around), y, precision)
    expected, magnitude = np.full_like(y_before, np.nan, np.float64), np.zeros(y_before.shape)
    error = 66 * 2.0**-23 + (2.0**-9 if precision == "high" else 0)
    exact = [a.astype(np.float64) for a in (x, values)]
    with np.errstate(invalid="ignore"):
        getattr(k0_reference, name)(*exact, layout.index, expected)
        getattr(k0_reference, name)(*map(abs, exact), layout.index, magnitude)
        bound = error * magnitude + float(finfo(x.dtype).eps) * abs(expected)
        got = y.numpy().astype(np.float64)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(got[~finite], expected[~finite])
        assert (abs(got - expected)[finite] <= bound[finite]).all()  # NaN is not
    n_nan = np.isnan(around.numpy().astype(np.float64)).sum() - np.isnan(expected).sum()
    assert n_nan == around.size - y.size
