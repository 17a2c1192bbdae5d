"""Elementwise functions against NumPy in float64, in every place, dtype and order of memory."""

import numpy as np
import pytest
from conftest import HAS_BFLOAT16, needs_bfloat16
from ops_helpers import (
    HOMES,
    Home,
    assert_close,
    in_all_forms,
    in_all_homes,
    numeric_grad,
    on_both_places,
)
from scipy.special import ndtr

from numbsparse import ops
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels import elementwise as ops_kernels

BINARY = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
}


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


UNARY = {
    "negative": np.negative,
    "exp": np.exp,
    "expm1": np.expm1,
    "log": lambda x: np.log(np.abs(x)),
    "sqrt": lambda x: np.sqrt(np.abs(x)),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "softplus": lambda x: np.logaddexp(0, x),
    "gelu": lambda x: x * ndtr(x),
    "gelu_tanh": gelu_tanh,
}
SHAPES = [(0,), (1,), (7,), (), (3, 0), (2, 1, 3)]
PAIRS = [((3, 1, 5), (4, 5)), ((2, 3), (3,)), ((4, 1), (1, 3)), ((), (5,)), ((33, 2), (33, 2))]


@in_all_homes
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (3, 5)) for name in UNARY), *(("negative", shape) for shape in SHAPES)],
    ids=str,
)
def test_unary(home, name, shape, rng):
    x = rng.uniform(-4, 4, shape)
    x = np.abs(x) if name in ("log", "sqrt") else x
    got = home.fetch(getattr(ops, name)(home.send(x)))
    x = home.rounded(x)
    # 1 + tanh(u) cancels for negative x: the error is one of x. Where x is far below 0 the tail of
    # the normal distribution changes by x**2 times what -x/sqrt(2) is off, relatively.
    magnitude = np.abs(x) + 1 if name in ("gelu_tanh", "log") else None
    if name == "gelu":
        magnitude = np.abs(UNARY[name](x)) * np.where(x < 0, 1 + x**2 / 8, 1)
    assert_close(home, got, UNARY[name](x), steps=8, magnitude=magnitude)


@in_all_homes
@in_all_forms
def test_unary_of_views(home, form, rng):
    x = rng.uniform(-4, 4, (4, 3, 2))
    got = home.fetch(ops.tanh(home.send(x, form=form)))
    assert_close(home, got, np.tanh(home.rounded(x)), steps=8)


@in_all_homes
@pytest.mark.parametrize(
    ("name", "shapes"),
    [*((name, PAIRS[0]) for name in BINARY), *(("subtract", shapes) for shapes in PAIRS[1:])],
    ids=str,
)
def test_binary(home, name, shapes, rng):
    a, b = (rng.uniform(1, 4, shape) for shape in shapes)
    got = home.fetch(getattr(ops, name)(home.send(a), home.send(b)))
    assert_close(home, got, BINARY[name](home.rounded(a), home.rounded(b)))


LARGE = ops_kernels.LARGE
TABLES = [(LARGE,), (LARGE + 37,), (LARGE // 5 + 1, 5), (LARGE // 48 + 2, 48)]


@in_all_homes
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shape", TABLES, ids=str)
def test_binary_of_large_arrays(home, name, shape, rng):
    """Alike, and a row beside a table, where a thread has several values."""
    a, b = rng.uniform(1, 4, shape), rng.uniform(1, 4, shape)
    for other in (b, b[0]) if len(shape) == 2 else (b,):
        got = home.fetch(getattr(ops, name)(home.send(a), home.send(other)))
        assert_close(home, got, BINARY[name](home.rounded(a), home.rounded(other)))
    got = home.fetch(getattr(ops, name)(home.send(b[0] if b.ndim == 2 else b), home.send(a)))
    assert_close(home, got, BINARY[name](home.rounded(b[0] if b.ndim == 2 else b), home.rounded(a)))


@in_all_homes
@in_all_forms
def test_binary_of_views(home, form, rng):
    a, b = rng.standard_normal((4, 3)), rng.standard_normal((4, 3))
    got = home.fetch(ops.subtract(home.send(a, form=form), home.send(b)))
    assert_close(home, got, home.rounded(a) - home.rounded(b))
    got = home.fetch(ops.subtract(home.send(a, form=form), home.send(b, form=form)))
    assert_close(home, got, home.rounded(a) - home.rounded(b))


@in_all_homes
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("number", [2, 0.3, np.float64(0.3)], ids=repr)
def test_binary_with_a_number(home, name, number, rng):
    a = rng.uniform(1, 4, (5,))
    function, expected = getattr(ops, name), BINARY[name]
    rounded = np.asarray(number, home.compute_dtype).astype(float)
    right = home.fetch(function(home.send(a), number))
    assert_close(home, right, expected(home.rounded(a), rounded))
    left = home.fetch(function(number, home.send(a)))
    assert_close(home, left, expected(rounded, home.rounded(a)))


@in_all_homes
@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 5, 0.5, -1, -1.5])
def test_power(home, exponent, rng):
    a = rng.uniform(0.5, 2, (7,))
    got = home.fetch(ops.power(home.send(a), exponent))
    assert_close(home, got, home.rounded(a) ** exponent, steps=16)


@in_all_homes
@pytest.mark.parametrize(
    "name", ["sigmoid", "tanh", "gelu", "gelu_tanh", "relu", "elu", "softplus"]
)
def test_far_out(home, name):
    x = [-1e4, -60.0, -30.0, -0.0, 0.0, 30.0, 60.0, 1e4]
    got = home.fetch(getattr(ops, name)(home.send(x)))
    with np.errstate(over="ignore"):
        expected = UNARY[name](home.rounded(x))
    magnitude = np.abs(x) if name.startswith("gelu") else None
    assert_close(home, got, expected, steps=16, magnitude=magnitude)


@in_all_homes
@pytest.mark.parametrize("name", ["exp", "expm1", "log", "sqrt", "power"])
def test_beyond_the_ends_results_are_infinite_or_nan(home, name):
    """In the simulator, too, where Python would raise errors."""
    x, more = [-1000.0, -1.0, 0.0, 1000.0, np.inf, np.nan], (-1.0,) * (name == "power")
    with np.errstate(all="ignore"):
        got = home.fetch(getattr(ops, name)(home.send(x), *more))
        expected = home.rounded(getattr(np, name)(home.rounded(x), *more))
    np.testing.assert_allclose(got, expected, rtol=4 * home.eps)


@in_all_homes
def test_gelu_at_both_ends(home):
    largest = float(finfo(home.dtype).max)
    x, ones = home.send([-np.inf, -largest, largest, np.inf]), home.send([1.0, 1, 1, 1])
    for value, slope in ((ops.gelu, ops.gelu_grad), (ops.gelu_tanh, ops.gelu_tanh_grad)):
        np.testing.assert_array_equal(home.fetch(value(x)), [0, 0, largest, np.inf])
        np.testing.assert_array_equal(home.fetch(slope(x, ones)), [0, 0, 1, 1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_keeps_its_digits_where_it_is_small(dtype):
    """1 + erf(x / sqrt(2)) has none left from -6 on in float32, from -9 on in float64."""
    x = np.linspace(-10, -1, 50).astype(dtype)
    expected = x.astype(np.float64) * ndtr(x.astype(np.float64))
    np.testing.assert_allclose(ops.gelu(x), expected, rtol=200 * np.finfo(dtype).eps)


def test_gelu_of_float32_is_as_accurate_far_out(rng):
    x = rng.uniform(-13, 13, 10_000).astype(np.float32)
    expected = x.astype(np.float64) * ndtr(x.astype(np.float64))
    np.testing.assert_allclose(ops.gelu(x), expected, rtol=5 * np.finfo(np.float32).eps)
    memory = np.zeros(x.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(np.float32)
    unaligned[:] = x
    every = x.reshape(20, 500)
    for view in (unaligned, x[::-1], every.T, every[:, ::3], np.broadcast_to(x[:1], 5), x[:0]):
        one_by_one = [ops.gelu(np.array(number)) for number in view.flat]
        np.testing.assert_array_equal(ops.gelu(view).reshape(-1), one_by_one)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(512, 97), (1024, 1100), (1000, 70), (2048, 8), (513, 64)])
def test_large_matrices_in_fortran_s_order(rng, shape, dtype):
    """Their results are in C order, also those that go by way of a buffer."""
    a, b = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    f, g = np.asfortranarray(a), np.asfortranarray(b)
    for got, right in (
        (ops.copy(f), a),
        (ops.add(f, g), a + b),
        (ops.multiply(f, b), a * b),
        (ops.subtract(0.5, f), 0.5 - a),
        (ops.exp(f), np.exp(a)),
        (ops.power(f, 3), a * a * a),
        (ops.power(f, 1), a),
        (ops.relu_grad(f, g), np.where(a > 0, b, 0)),
        (ops.gelu(f), ops.gelu(a)),
    ):
        assert got.flags.c_contiguous
        assert got.dtype == dtype
        assert not np.shares_memory(got, f)
        np.testing.assert_array_equal(got, right)


@in_all_homes
def test_relu_stops_infinite_gradients(home):
    x, dy = home.send([-1.0, 0.0, 2.0]), home.send([np.inf, np.inf, -np.inf])
    np.testing.assert_array_equal(home.fetch(ops.relu_grad(x, dy)), [0, 0, -np.inf])


@in_all_homes
@pytest.mark.parametrize("name", UNARY)
def test_without_axes(home, name):
    got = home.fetch(getattr(ops, name)(home.send(0.5)))
    assert_close(home, got, UNARY[name](home.rounded(0.5)), steps=8, magnitude=1.0)


@on_both_places
def test_nan_is_kept(home):
    x = home.send([np.nan, -1.0, 2.0])
    zeros = home.send([0.0, 0.0, 0.0])
    np.testing.assert_array_equal(np.isnan(home.fetch(ops.elu(x))), [True, False, False])
    np.testing.assert_array_equal(np.isnan(home.fetch(ops.softplus(x))), [True, False, False])
    for result in (ops.relu(x), ops.maximum(x, 0.0), ops.maximum(x, zeros), ops.maximum(zeros, x)):
        np.testing.assert_array_equal(home.fetch(result), [np.nan, 0, 2])


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("name", ["relu_grad", "elu_grad", "gelu_grad", "gelu_tanh_grad"])
def test_grads(home, name, form, rng):
    x, dy = rng.uniform(-3, 3, (3, 5)), rng.standard_normal((3, 5))
    x[0, 0] = 0
    got = home.fetch(getattr(ops, name)(home.send(x, form=form), home.send(dy)))
    expected = getattr(ops, name)(home.rounded(x), home.rounded(dy))
    assert_close(home, got, expected, steps=16, magnitude=np.abs(home.rounded(dy)) * 4)


@in_all_homes
def test_expm1_near_zero(home):
    x = np.array([1e-4, -1e-4, 3e-3])
    got = home.fetch(ops.expm1(home.send(x)))
    assert_close(home, got, np.expm1(home.rounded(x)))


@pytest.mark.parametrize("name", ["relu", "elu", "gelu", "gelu_tanh"])
def test_grads_are_derivatives(name, rng):
    x, dy = rng.uniform(-3, 3, (4, 5)), rng.standard_normal((4, 5))
    expected = numeric_grad(getattr(ops, name), x, dy)
    np.testing.assert_allclose(getattr(ops, f"{name}_grad")(x, dy), expected, atol=1e-8)


@in_all_homes
@in_all_forms
def test_copies(home, form, rng):
    a = rng.standard_normal((3, 4))
    for shape in ((3, 4), (2, 3, 4)):
        got = home.fetch(ops.broadcast_to(home.send(a, form=form), shape))
        np.testing.assert_array_equal(got, np.broadcast_to(home.rounded(a), shape))
    got = home.fetch(ops.copy(home.send(a, form=form)))
    np.testing.assert_array_equal(got, home.rounded(a))
    target = home.send(np.full((3, 8), np.nan))
    ops.copy_into(target[:, ::2], home.send(a, form=form))
    got = home.fetch(target)
    np.testing.assert_array_equal(got[:, ::2], home.rounded(a))
    assert np.isnan(got[:, 1::2]).all()


@in_all_homes
def test_copies_within_one_array(home):
    """As NumPy does: what was read is what was there before, by whichever thread."""
    for target, source in (
        (lambda a: a[1:], lambda a: a[:-1]),
        (lambda a: a[:-2], lambda a: a[2:]),
        (lambda a: a, lambda a: a.T),
        (lambda a: a[:, ::2], lambda a: a[:, 10:]),
        (lambda a: a, lambda a: a),
    ):
        a = home.send(np.arange(400.0).reshape(20, 20) % 127)
        expected = home.fetch(a).copy()
        target(expected)[...] = source(expected).copy()
        ops.copy_into(target(a), source(a))
        np.testing.assert_array_equal(home.fetch(a), expected)


@on_both_places
def test_copy_of_integers(home):
    indices = home.send([[1, 2**40], [-3, 4]], dtype="int64", form="T")
    got = home.fetch(ops.copy(indices), dtype="int64")
    np.testing.assert_array_equal(got, [[1, 2**40], [-3, 4]])


# Halfway between two bfloat16, up and down to the even one; the largest numbers, which round to
# infinity; one below the smallest float16.
EDGES = [
    [1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1 + 2.0**-8 + 2.0**-20],
    [np.nan, np.inf, -np.inf, -0.0],
    [3.4e38, 70000.0, 1e-8, -3.4e38],
]
CASTS = ["float16", "float32", "float64"] + ["bfloat16"] * HAS_BFLOAT16


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("target", CASTS)
@pytest.mark.filterwarnings("ignore:.*overflow encountered in cast")
def test_cast(home, form, target, rng):
    if home.place == "cuda" and target == "float64":
        return  # refused, below
    scale = 10.0 ** rng.integers(-9, 9, (3, 4))
    a = np.append(rng.standard_normal((3, 4)) * scale, EDGES, axis=0)
    got = home.fetch(ops.cast(home.send(a, form=form), target), dtype=as_dtype(target))
    expected = np.asarray(a, as_dtype(home.dtype)).astype(as_dtype(target)).astype(float)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


@pytest.mark.parametrize("dtype", CASTS)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_cast_on_the_cpu(dtype):
    a = np.array(EDGES, as_dtype(dtype))
    for target in CASTS:
        got = ops.cast(a, target)
        assert got.dtype == as_dtype(target)
        np.testing.assert_array_equal(got.astype(float), a.astype(as_dtype(target)).astype(float))


@needs_bfloat16
@pytest.mark.parametrize("home", [HOMES[0], HOMES[2]], ids=str)
def test_every_nan_stays_a_nan(home):
    # The first is NaN by a bit that bfloat16 lacks; rounding the last up would carry into the sign.
    nans = np.array([0x7F800001, 0xFF80FFFF, 0x7FC00000, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(home.fetch(ops.cast(home.send(nans), "bfloat16"), as_dtype("bfloat16"))).all()


@needs_bfloat16
def test_bfloat16_beside_integers_is_refused():
    home = Home("cuda", "bfloat16")
    half, bits = home.send(np.ones(3)), home.send(np.ones(3), dtype="uint16")
    for target, source in ((half, bits), (bits, half)):
        with pytest.raises(TypeError, match="target and source take floats with bfloat16"):
            ops.copy_into(target, source)
    with pytest.raises(TypeError, match="got uint16"):
        ops.exp(bits)


@in_all_homes
def test_create(home):
    home.send(0)  # skips where there is no GPU
    for array, value in (
        (ops.full((3, 2), 0.1, home.dtype, home.place), 0.1),
        (ops.full((3, 2), -0.0, home.dtype, home.place), -0.0),
        (ops.zeros((3, 2), home.dtype, home.place), 0),
        (ops.full_like(home.send(np.ones((3, 2))), -2), -2),
        (ops.zeros_like(home.send(np.ones((3, 2)))), 0),
    ):
        got = home.fetch(array)
        np.testing.assert_array_equal(got, home.rounded(np.full((3, 2), value)))
        np.testing.assert_array_equal(np.signbit(got), np.copysign(1, value) < 0)
    assert ops.zeros(4, home.dtype, home.place).shape == (4,)
    assert ops.zeros((0, 4), home.dtype, home.place).shape == (0, 4)


F32, F64 = np.ones(3, np.float32), np.ones(3)
REFUSED = {
    "no array": (lambda: ops.add(1.0, 2.0), TypeError, "at least one array"),
    "list": (lambda: ops.add([1.0], F32), TypeError, "a takes .* got list"),
    "dtypes": (lambda: ops.multiply(F32, F64), TypeError, "a and b .* float32 and float64"),
    "integers": (lambda: ops.exp(np.arange(3)), TypeError, "a takes .* got int64"),
    "a number, integers": (lambda: ops.add(0.5, np.arange(3)), TypeError, "b takes .* got int64"),
    "integers, a number": (lambda: ops.add(np.arange(3), 0.5), TypeError, "a takes .* got int64"),
    "shapes": (lambda: ops.add(F32, F32[:2]), ValueError, r"a and b .* \(3,\) and \(2,\)"),
    "no broadcast": (lambda: ops.relu_grad(F32, F32[:1]), ValueError, "x and dy take one shape"),
    "exponent": (lambda: ops.power(F32, F32), TypeError, "exponent takes a number"),
    "complex": (lambda: ops.multiply(F32, np.complex64(1j)), TypeError, "b takes .* got numpy.c"),
    "complex exponent": (lambda: ops.power(F32, np.complex64(1j)), TypeError, "exponent takes"),
    "cast": (lambda: ops.cast(F32, "int32"), TypeError, "dtype takes .* got int32"),
    "copy": (lambda: ops.copy([1]), TypeError, "a takes .* got list"),
    "copy_into": (lambda: ops.copy_into(F32[:2], F32), ValueError, "target and source take"),
    "copy_into what is read-only": (
        lambda: ops.copy_into(np.broadcast_to(F32[0], 3), F32),
        ValueError,
        "target is written in place, and this array is read-only",
    ),
    "broadcast_to": (lambda: ops.broadcast_to(F32, (3, 1)), ValueError, "shape takes"),
    "broadcast_to fewer": (lambda: ops.broadcast_to(F32, ()), ValueError, "shape takes"),
    "broadcast_to other": (lambda: ops.broadcast_to(F32, (2,)), ValueError, "shape takes"),
    "place": (lambda: ops.zeros(3, "float32", "gpu"), ValueError, "place takes"),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refusals_on_a_gpu():
    half, single = Home("cuda", "float16").send(np.ones(3)), Home("cuda", "float32").send(F32)
    for a, b in ((single, F32), (F32, single)):
        with pytest.raises(ValueError, match="a and b take one device"):
            ops.add(a, b)
    with pytest.raises(ValueError, match="target and source take one device"):
        ops.copy_into(F32, single)
    with pytest.raises(TypeError, match="a and b take one dtype, got float16 and float32"):
        ops.add(half, single)
    with pytest.raises(
        TypeError, match="x takes float16, bfloat16 or float32 on a GPU, got float64"
    ):
        ops.tanh(HOMES[2].send(F64, dtype="float64"))
    with pytest.raises(ValueError, match="a and b take shapes that broadcast"):
        ops.add(single, single[:2])
    with pytest.raises(TypeError, match="dtype takes float16, bfloat16 or float32"):
        ops.zeros(3, "int64", "cuda")
    with pytest.raises(TypeError, match="dtype takes float16, bfloat16 or float32 on a GPU"):
        ops.cast(single, "float64")
