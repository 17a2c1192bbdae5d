"""What goes along the last axis: softmax, cross-entropy, layer normalization."""

import numpy as np
import pytest
import scipy.special
from ops_helpers import (
    Home,
    assert_close,
    in_all_forms,
    in_all_homes,
    numeric_grad,
    on_both_places,
)

from numbsparse import ops

SHAPES = [(1, 1), (3, 7), (2, 33), (0, 4), (3, 0), (2, 3, 5), (6,)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def softmax(x):
    return scipy.special.softmax(x, axis=-1) if x.size else x


def log_softmax(x):
    return scipy.special.log_softmax(x, axis=-1) if x.size else x


@in_all_homes
@shapes
def test_softmax(home, shape, rng):
    x = rng.uniform(-4, 4, shape)
    got, log_got = (home.fetch(f(home.send(x))) for f in (ops.softmax, ops.log_softmax))
    x = home.rounded(x)
    assert_close(home, got, softmax(x), steps=16 + 2 * shape[-1])
    assert_close(home, log_got, log_softmax(x), steps=16 + 2 * shape[-1], magnitude=np.abs(x) + 4)


@in_all_homes
@in_all_forms
def test_softmax_of_views(home, form, rng):
    x = rng.uniform(-4, 4, (2, 3, 5))
    got = home.fetch(ops.softmax(home.send(x, form=form)))
    assert_close(home, got, softmax(home.rounded(x)), steps=32)


@in_all_homes
def test_softmax_far_out(home):
    x = [[-1e4, 1e4, 0], [1e4, 1e4, 1e4], [-1e4, -1e4, -1e4], [-np.inf, 0, 0]]
    got = home.fetch(ops.softmax(home.send(x)))
    third = home.rounded(1 / 3)
    expected = [[0, 1, 0], [third] * 3, [third] * 3, [0, 0.5, 0.5]]
    np.testing.assert_allclose(got, expected, rtol=2 * home.eps)
    got = home.fetch(ops.log_softmax(home.send(x[:3])))
    np.testing.assert_allclose(got[0], home.rounded([-2e4, 0, -1e4]))


@in_all_homes
@pytest.mark.filterwarnings("ignore:invalid value")  # of the simulator
def test_rows_without_a_largest_finite_value_are_nan(home):
    """As of torch: infinity less infinity is. Others beside them are not."""
    inf = np.inf
    x = [[inf, 0, 1], [0, inf, inf], [inf, -inf, 0], [-inf] * 3, [0, np.nan, inf], [-inf, 0, 0]]
    expected = np.repeat([True, False], [5, 1])
    sent, targets = home.send(np.array(x)), home.send(np.array([1, 0, 1, 2, 0, 2]), dtype="int64")
    losses, probabilities = ops.cross_entropy(sent, targets)
    np.testing.assert_array_equal(np.isnan(home.fetch(losses, home.compute_dtype)), expected)
    for y in (ops.softmax(sent), ops.log_softmax(sent), probabilities):
        np.testing.assert_array_equal(np.isnan(home.fetch(y)), np.tile(expected[:, None], 3))


@on_both_places
@pytest.mark.parametrize("length", [2, 13, 16])
def test_the_largest_value_is_found_wherever_it_is(home, length):
    """Of any other, exp overflows."""
    x = np.where(np.eye(length), 1e4, -1e4)
    np.testing.assert_array_equal(home.fetch(ops.softmax(home.send(x))), np.eye(length))
    got = home.fetch(ops.log_softmax(home.send(x)))
    np.testing.assert_array_equal(got, np.where(np.eye(length), 0, -2e4))


@in_all_homes
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[-1]], ids=str)
@pytest.mark.parametrize("form", ["C", "slice"])
def test_logsumexp(home, shape, form, rng):
    x = rng.uniform(-4, 4, shape)
    got = home.fetch(ops.logsumexp(home.send(x, form=form)))
    expected = scipy.special.logsumexp(home.rounded(x), axis=-1) if x.size else np.zeros(0)
    assert_close(home, got, expected, steps=16 + 2 * shape[-1], magnitude=np.abs(expected) + 4)


@in_all_homes
def test_logsumexp_far_out(home):
    x = [[-1e4, 1e4, 0], [-np.inf] * 3, [-np.inf, 0, -np.inf], [0, np.inf, 0], [0, np.nan, 0]]
    got = home.fetch(ops.logsumexp(home.send(x)))
    np.testing.assert_array_equal(got, [home.rounded(1e4), -np.inf, 0, np.inf, np.nan])


def test_logsumexp_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"x takes values along the last axis.* \(3, 0\)"):
        ops.logsumexp(np.ones((3, 0)))


@in_all_homes
@shapes
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_grads(home, name, shape, rng):
    forward = softmax if name == "softmax" else log_softmax
    y, dy = forward(rng.uniform(-2, 2, shape)), rng.standard_normal(shape)
    grad = getattr(ops, f"{name}_grad")
    got = home.fetch(grad(home.send(y), home.send(dy)))
    y, dy = home.rounded(y), home.rounded(dy)
    total = np.abs(dy).sum(-1, keepdims=True)
    if name == "softmax":
        expected = y * (dy - (y * dy).sum(-1, keepdims=True))
    else:
        expected = dy - np.exp(y) * dy.sum(-1, keepdims=True)
    assert_close(home, got, expected, steps=16 + 2 * shape[-1], magnitude=total)


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("name", ["softmax_grad", "log_softmax_grad"])
def test_softmax_grads_of_views(home, name, form, rng):
    y, dy = -rng.uniform(0, 1, (3, 4)), rng.standard_normal((3, 4))
    grad = getattr(ops, name)
    got = home.fetch(grad(home.send(y, form=form), home.send(dy, form=form)))
    np.testing.assert_array_equal(got, home.fetch(grad(home.send(y), home.send(dy))))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_grads_are_derivatives(name, rng):
    x, dy = rng.standard_normal((3, 5)), rng.standard_normal((3, 5))
    forward, backward = getattr(ops, name), getattr(ops, f"{name}_grad")
    np.testing.assert_allclose(
        backward(forward(x), dy), numeric_grad(forward, x, dy), rtol=1e-6, atol=1e-8
    )


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("integers", ["int32", "int64"])
def test_cross_entropy(home, form, integers, rng):
    logits, targets = rng.uniform(-4, 4, (5, 11)), rng.integers(0, 11, 5)
    sent = home.send(targets, dtype=integers)
    losses, probabilities = ops.cross_entropy(home.send(logits, form=form), sent)
    logits = home.rounded(logits)
    expected = -log_softmax(logits)[np.arange(5), targets]
    got = home.fetch(losses, dtype=home.compute_dtype)
    np.testing.assert_allclose(got, expected, rtol=0, atol=64 * home.sum_eps)
    assert_close(home, home.fetch(probabilities), softmax(logits), steps=64)

    dlosses = np.asarray(rng.standard_normal(5), home.compute_dtype)
    p = rng.uniform(0, 1, (5, 11))
    got = home.fetch(
        ops.cross_entropy_grad(
            home.send(p, form=form), sent, home.send(dlosses, dtype=home.compute_dtype)
        )
    )
    expected = (home.rounded(p) - np.eye(11)[targets]) * dlosses[:, None]
    assert_close(home, got, expected, magnitude=np.abs(dlosses[:, None]))


@on_both_places
def test_cross_entropy_of_no_rows(home):
    targets = home.send(np.ones(0), dtype="int64")
    losses, probabilities = ops.cross_entropy(home.send(np.ones((0, 3))), targets)
    assert losses.shape == (0,)
    assert probabilities.shape == (0, 3)
    assert ops.cross_entropy_grad(probabilities, targets, losses).shape == (0, 3)


def test_cross_entropy_grad_is_the_derivative(rng):
    logits, targets, dlosses = rng.standard_normal((4, 6)), rng.integers(0, 6, 4), rng.random(4)
    _, probabilities = ops.cross_entropy(logits, targets)
    expected = numeric_grad(lambda x: ops.cross_entropy(x, targets)[0], logits, dlosses)
    got = ops.cross_entropy_grad(probabilities, targets, dlosses)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.simulator
def test_targets_out_of_range_on_a_gpu_are_nan(rng):
    home = Home("cuda", "float32")
    logits = home.send(rng.standard_normal((4, 3)))
    targets = home.send([0, -1, 3, 2], dtype="int64")
    losses, probabilities = ops.cross_entropy(logits, targets)
    np.testing.assert_array_equal(np.isnan(home.fetch(losses)), [False, True, True, False])
    assert np.isfinite(home.fetch(probabilities)).all()
    dlogits = home.fetch(ops.cross_entropy_grad(probabilities, targets, home.send(np.ones(4))))
    np.testing.assert_array_equal(np.isnan(dlogits).all(1), [False, True, True, False])


def layer_norm(x, eps):
    inverse_std = 1 / np.sqrt(x.var(-1) + eps)
    return (x - x.mean(-1, keepdims=True)) * inverse_std[..., None], inverse_std.reshape(-1)


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("shape", [(3, 7), (2, 33), (2, 3, 5), (0, 4), (6,), (2, 1)], ids=str)
def test_layer_norm(home, form, shape, rng):
    x = rng.standard_normal(shape) + 3  # a mean that would cancel from the squares
    normalised, inverse_std = ops.layer_norm(home.send(x, form=form), 1e-5)
    expected, expected_inverse = layer_norm(home.rounded(x), 1e-5)
    # The error of x - mean, in units of the standard deviation.
    scale = (expected_inverse * 8).max(initial=1)
    got = home.fetch(inverse_std, dtype=home.compute_dtype)
    np.testing.assert_allclose(got, expected_inverse, rtol=64 * home.sum_eps * scale)
    got = home.fetch(normalised)
    assert_close(home, got, expected, steps=16 + shape[-1], magnitude=scale + np.abs(expected))


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 5), (0, 4), (6,)], ids=str)
def test_layer_norm_grad(home, form, shape, rng):
    y, dy = rng.standard_normal(shape), rng.standard_normal(shape)
    inverse_std = rng.uniform(0.5, 2, y[..., 0].size)
    got = home.fetch(
        ops.layer_norm_grad(
            home.send(y, form=form),
            home.send(inverse_std, dtype=home.compute_dtype),
            home.send(dy, form=form),
        )
    )
    y, dy = home.rounded(y), home.rounded(dy)
    inverse_std = np.asarray(inverse_std, home.compute_dtype).astype(float)
    inverse_std = inverse_std.reshape(*shape[:-1], 1)
    mean_dot = (y * dy).mean(-1, keepdims=True)
    expected = inverse_std * (dy - dy.mean(-1, keepdims=True) - y * mean_dot)
    magnitude = 2 * (np.abs(dy) + 1 + np.abs(y) * np.abs(y * dy).mean(-1, keepdims=True))
    assert_close(home, got, expected, steps=16 + shape[-1], magnitude=magnitude)


def test_layer_norm_grad_is_the_derivative(rng):
    x, dy = rng.standard_normal((3, 6)), rng.standard_normal((3, 6))
    got = ops.layer_norm_grad(*ops.layer_norm(x, 1e-5), dy)
    expected = numeric_grad(lambda x: ops.layer_norm(x, 1e-5)[0], x, dy)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-8)


@on_both_places
def test_refusals(home):
    x, row = home.send(np.ones((2, 3))), home.send(np.ones(2))
    targets = home.send([0, 1], dtype="int64")
    for function in (ops.softmax, ops.log_softmax):
        with pytest.raises(ValueError, match="x takes at least one axis"):
            function(home.send(1.0))
    for function in (ops.softmax_grad, ops.log_softmax_grad):
        with pytest.raises(ValueError, match="y and dy take one shape"):
            function(x, row)
    with pytest.raises(ValueError, match="logits and targets take the shapes"):
        ops.cross_entropy(x, targets[:1])
    with pytest.raises(ValueError, match="logits and targets take the shapes"):
        ops.cross_entropy(row, targets)
    with pytest.raises(ValueError, match=r"logits and targets .* got \(2, 0\) and \(2,\)"):
        ops.cross_entropy(x[:, :0], targets)
    with pytest.raises(TypeError, match=r"targets takes .* got float32"):
        ops.cross_entropy(x, row)
    with pytest.raises(TypeError, match=r"targets takes .* got list"):
        ops.cross_entropy(x, [0, 1])
    other = "float16" if home.place == "cuda" else "float64"
    with pytest.raises(TypeError, match=f"dlosses takes float32 with .* float32, got {other}"):
        ops.cross_entropy_grad(x, targets, home.send([0, 1], dtype=other))
    with pytest.raises(ValueError, match=r"dlosses takes the shape \(2,\), got \(3,\)"):
        ops.cross_entropy_grad(x, targets, home.send(np.ones(3)))
    with pytest.raises(ValueError, match="x takes a last axis of at least 1"):
        ops.layer_norm(home.send(np.ones((2, 0))), 1e-5)
    with pytest.raises(ValueError, match="eps takes a number of at least 0, got -1"):
        ops.layer_norm(x, -1)
    with pytest.raises(ValueError, match="eps takes"):
        ops.layer_norm(x, float("nan"))
    with pytest.raises(ValueError, match=r"inverse_std takes the shape \(2,\), got \(3,\)"):
        ops.layer_norm_grad(x, home.send(np.ones(3)), x)
    with pytest.raises(ValueError, match="normalised and dnormalised take one shape"):
        ops.layer_norm_grad(x, row, row)


@pytest.mark.parametrize("targets", [[0, 3], [-1, 0]], ids=str)
@pytest.mark.parametrize("integers", ["int32", "int64", "uint8"])
def test_targets_out_of_range_on_the_cpu(targets, integers):
    targets = np.array(targets).astype(integers)
    with pytest.raises(ValueError, match="targets takes integers from 0 to 2, got"):
        ops.cross_entropy(np.ones((2, 3)), targets)
    with pytest.raises(ValueError, match="targets takes integers from 0 to 2, got"):
        ops.cross_entropy_grad(np.ones((2, 3)), targets, np.ones(2))


def test_two_places_are_refused():
    there, here = Home("cuda", "float32").send(np.ones((2, 3))), np.ones((2, 3), np.float32)
    with pytest.raises(ValueError, match="y and dy take one device"):
        ops.softmax_grad(there, here)
    with pytest.raises(ValueError, match="logits and targets take one device"):
        ops.cross_entropy(there, np.array([0, 1]))
    with pytest.raises(ValueError, match="normalised and inverse_std take one device"):
        ops.layer_norm_grad(there, here[:, 0], there)
