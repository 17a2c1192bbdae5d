"""float32 on tensor cores: as accurate as float32, for long sums and for any number."""

import numpy as np
import pytest

from numbsparse import Layout, device, ops, to_device
from numbsparse.kernels.matmul import LADDER, PRODUCTS
from numbsparse.testing import Case, check_rung

ON_GPU = device.is_available() and not device.SIMULATED
CASES = (
    ("k5_tensor_core", 32),
    ("k6_hopper", 32),
    ("k6_hopper", 64),
    ("k7_small_blocks", 8),
    ("k7_small_blocks", 16),
)


@pytest.fixture(params=CASES, ids=[f"{name}-B{size}" for name, size in CASES])
def rung_and_size(request):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    name, size = request.param
    reason = LADDER[name].unsupported("forward", size, np.dtype("float32"), "cuda", 1, "highest")
    if reason:
        pytest.skip(reason)
    return LADDER[name], size


@pytest.fixture
def rung(rung_and_size):
    return rung_and_size[0]


@pytest.fixture
def size(rung_and_size):
    return rung_and_size[1]


def run(rung, product, operands, layout, shape, precision="highest"):
    out = to_device(np.full(shape, np.nan, np.float32))
    index = ops.index_beside(layout, out)
    getattr(rung, product)(*map(to_device, operands), index, out, precision)
    return out.numpy()


def long_sums(rng, product, terms, size, batch=8):
    """Operands of a product with sums of that many positive terms, and the result in float64."""
    blocks = terms // size
    if product == "weight_grad":
        x, dy = (rng.random((terms, size), dtype=np.float32) for _ in range(2))
        return (x, dy), Layout([[1]]), (x.astype(float).T @ dy.astype(float))[None]
    x = rng.random((batch, terms), dtype=np.float32)
    values = rng.random((blocks, size, size), dtype=np.float32)
    transposed = product == "input_grad"
    w = (values.swapaxes(1, 2) if transposed else values).reshape(terms, size)
    layout = Layout(np.ones((1, blocks) if transposed else (blocks, 1), bool))
    return (x, values), layout, x.astype(float) @ w.astype(float)


@pytest.mark.every(2)
@pytest.mark.parametrize("product", PRODUCTS)
def test_long_sums_are_as_accurate_as_float32(rung, size, product, rng):
    terms, bound = (10240, 6e-7) if ON_GPU else (64, 2e-7)
    operands, layout, expected = long_sums(rng, product, terms, size)
    got = run(rung, product, operands, layout, expected.shape)
    assert np.linalg.norm(got - expected) <= bound * np.linalg.norm(expected)
    if device.SIMULATED:
        return  # of "high" precision the simulator runs those below
    rounded = run(rung, product, operands, layout, expected.shape, "high")
    assert np.linalg.norm(rounded - expected) <= 1e-3 * np.linalg.norm(expected)


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("product", PRODUCTS)
def test_infinities_and_nan_pass_and_large_values_stay(rung, size, product, rng):
    operands, layout, _ = long_sums(rng, product, max(32, size), size)
    x, other = operands
    x -= np.float32(0.5)
    x[0, 0], x[1, 1], x[2, -1] = np.inf, np.nan, -np.inf
    x[3, 3], x[4, 4] = 3.4028e38, 1e-30  # the nearest tf32 to the one is infinite
    other -= np.float32(0.5)
    got = run(rung, product, (x, other), layout, expected_shape(product, x, other))
    expected = plain(product, x, other)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(expected))
    finite = np.isfinite(expected)
    assert 0 < finite.sum() < finite.size
    np.testing.assert_allclose(got[finite], expected[finite], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got[np.isinf(got)], expected[np.isinf(got)])


NANS = np.uint32([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF]).view(np.float32)
"""NumPy's, that of an invalid operation on a CPU and on a GPU, and one of all bits."""


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.pairs
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_any_nan_stays_one(rung, size, product, precision, rng):
    """Rounding to fewer bits may not carry into the exponent."""
    (x, other), layout, _ = long_sums(rng, product, max(32, size), size)
    n = np.arange(len(NANS))
    w = other[0].T if product == "input_grad" else other if product == "weight_grad" else other[0]
    w[n + 1, n] = NANS
    if product == "weight_grad":
        x[n + 4, n] = NANS
    else:
        x[n, n + 4] = NANS
    expected = np.isnan(plain(product, x, other))
    got = run(rung, product, (x, other), layout, expected.shape, precision)
    assert 0 < expected.sum() < expected.size
    np.testing.assert_array_equal(np.isnan(got), expected)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("rung_and_size", CASES[:1], indirect=True)
@pytest.mark.parametrize(("product", "feature_major"), [("forward", False), ("input_grad", True)])
def test_infinities_pass_where_the_last_blocks_are_cut_off(rung, product, feature_major, rng):
    """What the operands hold beyond the edge is NaN, and not read."""
    B, batch, inner, outer = 16, 5, 40, 23
    w = np.full((3 * B, 2 * B), np.nan, np.float32)
    w[:inner, :outer] = rng.standard_normal((inner, outer), np.float32)
    values = w.reshape(3, B, 2, B).swapaxes(1, 2).reshape(-1, B, B)
    exact = w[:inner, :outer] if product == "forward" else w[:inner, :outer].T
    wide = np.full((48, 8) if feature_major else (8, 48), np.nan, np.float32)

    def part(array):
        return (array.T if feature_major else array)[:batch, : len(exact)]

    part(wide)[:] = rng.standard_normal((batch, len(exact)), np.float32)
    part(wide)[[0, 1, batch - 1], [0, len(exact) - 1, 2]] = np.inf, -np.inf, np.inf
    shape = batch, exact.shape[1]
    out = to_device(np.full(shape[::-1] if feature_major else shape, np.nan, np.float32))
    y = out.T if feature_major else out
    index = ops.index_beside(Layout(np.ones((3, 2))), out)
    getattr(rung, product)(part(to_device(wide)), to_device(values), index, y, "highest")
    expected = part(wide).astype(float) @ exact.astype(float)
    assert np.isinf(expected).sum() == 3 * exact.shape[1]
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rung_and_size", CASES[:1], indirect=True)
@pytest.mark.parametrize("product", PRODUCTS)
def test_blocks_of_more_than_a_tile(rung, product):
    """Each is cut, and its parts find their places."""
    check_rung(rung, product, Case(3, 64, 61, 64, density=1), "float32", "cuda")


def plain(product, x, other):
    with np.errstate(all="ignore"):
        if product == "weight_grad":
            return (x.astype(float).T @ other.astype(float)).astype(np.float32)[None]
        transposed = product == "input_grad"
        w = (other.swapaxes(1, 2) if transposed else other).reshape(x.shape[1], -1)
        return (x.astype(float) @ w.astype(float)).astype(np.float32)


def expected_shape(product, x, other):
    return plain(product, x, other).shape


@pytest.mark.parametrize(
    ("name", "size"), [*CASES, ("k1_naive", 32), ("k3_registers", 32), ("k8_small_batch", 32)]
)
def test_single_products_keep_to_what_their_rung_says(rng, name, size):
    rung = LADDER[name]
    if reason := rung.unsupported("weight_grad", size, np.dtype("float32"), "cuda", 1, "highest"):
        pytest.skip(reason)
    # Just over a power of two, where the errors of two tf32 are the largest part of an operand.
    ones = 1 + rng.integers(2**12, size=(2, 1, 2 * size)) / 2.0**23
    x, dy = ones.astype(np.float32)
    got = run(rung, "weight_grad", (x, dy), Layout(np.ones((2, 2))), (4, size, size))
    exact = (x.T.astype(float) @ dy).reshape(2, size, 2, size).swapaxes(1, 2).reshape(got.shape)
    off = abs(got - exact).max() / 2.0**-23
    assert off <= getattr(rung, "PRODUCT_ERROR", 0) + 1  # and one rounding to float32
    assert off > getattr(rung, "PRODUCT_ERROR", 0) / 3  # that much is needed


SHORT = [(*case, terms) for case in CASES for terms in (64, 256)]
SHORT += [("k8_small_batch", 32, 64), ("k8_small_batch", 32, 256)]


@pytest.mark.gpu(reason="the simulator's tensor cores cut nothing off")
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("name", "size", "terms"), SHORT, ids=str)
def test_short_sums_are_as_accurate_as_a_chain_of_float32(rng, name, size, terms, product):
    rung, lines = LADDER[name], 512
    batch = terms if product == "weight_grad" else 64
    reason = rung.unsupported(product, size, np.dtype("float32"), "cuda", batch, "highest")
    if reason:
        pytest.skip(reason)
    if product == "weight_grad":
        a, b = (rng.standard_normal((terms, lines), np.float32) for _ in range(2))
        layout, n = Layout(np.ones((lines // size, lines // size), bool)), lines // size
        got = run(rung, product, (a, b), layout, (n * n, size, size))
        got = got.reshape(n, n, size, size).swapaxes(1, 2).reshape(lines, lines)
        a = a.T
    else:
        down, across = (lines, terms) if product == "input_grad" else (terms, lines)
        layout = Layout(np.ones((down // size, across // size), bool))
        a, w = rng.standard_normal((64, terms), np.float32), rng.standard_normal((down, across))
        w = w.astype(np.float32)
        blocks = w.reshape(down // size, size, -1, size).swapaxes(1, 2).reshape(-1, size, size)
        got = run(rung, product, (a, np.ascontiguousarray(blocks)), layout, (64, lines))
        b = w.T if product == "input_grad" else w
    exact, chain = a.astype(float) @ b.astype(float), np.zeros(got.shape, np.float32)
    for k in range(terms):  # as a float32 product adds: rounded after each
        chain = (chain + np.outer(a[:, k], b[k].astype(float))).astype(np.float32)
    assert np.linalg.norm(got - exact) <= np.linalg.norm(chain - exact)
