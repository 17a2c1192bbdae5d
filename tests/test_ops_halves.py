"""concat_elu and glu, and their gradients, against float64."""

import numpy as np
import pytest
from ops_helpers import assert_close, in_all_forms, in_all_homes, numeric_grad

from numbsparse import ops

SHAPES = [(4,), (3, 10), (2, 3, 6), (0, 4), (5, 0), (1, 66)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def concat_elu(x):
    return np.concatenate([elu(x), elu(-x)], axis=-1)


def glu(x):
    a, b = np.split(x, 2, axis=-1)
    return a / (1 + np.exp(-b))


FUNCTIONS = {"concat_elu": concat_elu, "glu": glu}
functions = pytest.mark.parametrize("name", FUNCTIONS)


@in_all_homes
@shapes
@functions
def test_halves(home, shape, name, rng):
    x = rng.uniform(-4, 4, shape)
    got = home.fetch(getattr(ops, name)(home.send(x)))
    assert_close(home, got, FUNCTIONS[name](home.rounded(x)), steps=8)


@in_all_homes
@in_all_forms
@functions
def test_halves_of_views(home, form, name, rng):
    x = rng.uniform(-4, 4, (6, 4))
    got = home.fetch(getattr(ops, name)(home.send(x, form=form)))
    assert_close(home, got, FUNCTIONS[name](home.rounded(x)), steps=8)


@in_all_homes
@functions
def test_halves_far_out(home, name):
    x = [[-1e4, 1e4, -60.0, 60.0], [0.0, -0.0, -1e4, 1e4]]
    got = home.fetch(getattr(ops, name)(home.send(x)))
    with np.errstate(over="ignore"):
        expected = FUNCTIONS[name](home.rounded(x))
    assert_close(home, got, expected, steps=8)


@in_all_homes
@shapes
@functions
def test_grads(home, shape, name, rng):
    x = rng.uniform(-4, 4, shape)
    dy = rng.standard_normal(FUNCTIONS[name](x).shape)
    grad = getattr(ops, f"{name}_grad")
    got = home.fetch(grad(home.send(x), home.send(dy)))
    expected = grad(home.rounded(x), home.rounded(dy))  # itself held against differences below
    assert_close(home, got, expected, steps=16, magnitude=8 * np.abs(dy).max(initial=0))


@in_all_homes
@in_all_forms
@functions
def test_grads_of_views(home, form, name, rng):
    x = rng.uniform(-4, 4, (6, 4))
    dy = rng.standard_normal(FUNCTIONS[name](x).shape)
    grad = getattr(ops, f"{name}_grad")
    got = home.fetch(grad(home.send(x, form=form), home.send(dy, form=form)))
    np.testing.assert_array_equal(got, home.fetch(grad(home.send(x), home.send(dy))))


@functions
def test_grads_are_derivatives(name, rng):
    x = rng.uniform(-3, 3, (4, 6))
    dy = rng.standard_normal(FUNCTIONS[name](x).shape)
    expected = numeric_grad(getattr(ops, name), x, dy)
    np.testing.assert_allclose(getattr(ops, f"{name}_grad")(x, dy), expected, atol=1e-8)


F32 = np.ones((2, 4), np.float32)
REFUSED = {
    "odd": (lambda: ops.glu(F32[:, :3]), ValueError, r"even last axis, got the shape \(2, 3\)"),
    "no axis": (lambda: ops.concat_elu(np.ones(())), ValueError, "at least one axis"),
    "shape": (lambda: ops.concat_elu_grad(F32, F32), ValueError, r"dy takes \(2, 8\) of float32"),
    "dtypes": (lambda: ops.glu_grad(F32, F32[:, :2].astype(float)), TypeError, "x and dy take one"),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
