"""Sums, means and maxima over axes."""

import numpy as np
import pytest
from ops_helpers import assert_close, in_all_forms, in_all_homes, on_both_places

from numbsparse import ops

CASES = [
    ((7,), None),
    ((7,), 0),
    ((), None),
    ((5, 9), 0),
    ((5, 9), 1),
    ((5, 9), -1),
    ((5, 9), None),
    ((5, 9), ()),
    ((2, 3, 5), (0, 2)),
    ((2, 3, 5), 1),
    ((3, 1, 2), (1,)),
    ((3, 0), 0),
]


@in_all_homes
@pytest.mark.parametrize(
    ("shape", "axis", "keepdims"),
    [*((*case, False) for case in CASES), ((5, 9), 0, True), ((2, 3, 5), (0, -1), True)],
    ids=str,
)
def test_sum(home, shape, axis, keepdims, rng):
    a = rng.standard_normal(shape)
    got = home.fetch(ops.sum(home.send(a), axis, keepdims))
    a = home.rounded(a)
    magnitude = np.abs(a).sum(axis, keepdims=keepdims)
    expected = a.sum(axis, keepdims=keepdims)
    assert_close(home, got, expected, steps=a.size, magnitude=magnitude)


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("axis", [None, 0, 1, 2, (0, 2)], ids=str)
def test_sum_of_views(home, form, axis, rng):
    a = rng.standard_normal((4, 3, 5))
    got = home.fetch(ops.sum(home.send(a, form=form), axis))
    a = home.rounded(a)
    assert_close(home, got, a.sum(axis), steps=a.size, magnitude=np.abs(a).sum(axis))


@in_all_homes
@pytest.mark.parametrize("name", ["mean", "max"])
@pytest.mark.parametrize(("shape", "axis"), [c for c in CASES if 0 not in c[0]], ids=str)
def test_mean_and_max(home, name, shape, axis, rng):
    a = rng.standard_normal(shape) - 2
    got = home.fetch(getattr(ops, name)(home.send(a), axis))
    a = home.rounded(a)
    expected = getattr(a, name)(axis)
    assert_close(home, got, expected, steps=a.size, magnitude=np.abs(a).mean(axis))


@in_all_homes
@pytest.mark.parametrize("shape", [(997,), (499, 2), (2, 499)], ids=str)
def test_long_sums_in_parts(home, shape, rng):
    a = rng.uniform(0, 1, shape)
    axis = int(np.argmax(shape))
    got = home.fetch(ops.sum(home.send(a), axis))
    expected = home.rounded(a).sum(axis)
    # Pairwise or in a tree: far fewer roundings than the 500 of one after the other.
    assert_close(home, got, expected, steps=500 if home.place == "cpu" else 100)
    largest = home.fetch(ops.max(home.send(a), axis))
    np.testing.assert_array_equal(largest, home.rounded(a).max(axis))
    mean = home.fetch(ops.mean(home.send(a), axis))
    assert_close(home, mean, expected / max(shape), steps=500)


@in_all_homes
def test_sums_are_not_kept_in_the_dtype(home):
    # In float16 the sum would stop at 2048, in bfloat16 at 256.
    if home.eps > 1e-6:
        a = home.send(np.ones(3008))
        assert home.fetch(ops.sum(a)) == 3008
        assert home.fetch(ops.mean(a)) == 1


@on_both_places
def test_max_keeps_nan(home):
    a = np.arange(12.0).reshape(3, 4)
    a[1, 2] = np.nan
    got = home.fetch(ops.max(home.send(a), 1))
    np.testing.assert_array_equal(got, [3, np.nan, 11])


@on_both_places
def test_max_of_minus_infinity(home):
    assert home.fetch(ops.max(home.send([-np.inf, -np.inf]))) == -np.inf


@on_both_places
def test_the_same_bits_every_time(home, rng):
    a = home.send(rng.standard_normal((40, 6)))
    for axis in (None, 0, 1):
        first, second = (home.fetch(ops.sum(a, axis)) for _ in range(2))
        np.testing.assert_array_equal(first, second)


@in_all_homes
@pytest.mark.parametrize("shape", [(5,), (3, 1), (1, 5), (), (1, 1, 1, 5), (3, 5)], ids=str)
def test_sum_to(home, shape, rng):
    larger = (2, 1, 3, 5) if len(shape) == 4 else (3, 5)
    a = rng.standard_normal(larger)
    sent = home.send(a)
    result = ops.sum_to(sent, shape)
    a = home.rounded(a)
    extra = a.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        extra + i for i, n in enumerate(shape) if n == 1 and larger[extra + i] != 1
    )
    expected = a.sum(axes).reshape(shape)
    magnitude = np.abs(a).sum(axes).reshape(shape)
    assert_close(home, home.fetch(result), expected, steps=a.size, magnitude=magnitude)
    assert (result is sent) == (shape == larger)


@on_both_places
def test_refusals(home):
    a, empty = home.send(np.ones((2, 3))), home.send(np.ones((2, 0)))
    for function in (ops.sum, ops.mean, ops.max):
        with pytest.raises(ValueError, match="axis takes integers from -2 to 1, got 2"):
            function(a, 2)
        with pytest.raises(TypeError, match=r"x takes .* got list"):
            function([1.0])
    for function in (ops.mean, ops.max):
        for axis in (None, 1):
            with pytest.raises(ValueError, match="x takes values along the axis"):
                function(empty, axis)
        assert function(empty, 0).shape == (0,)
    for shape in ((2,), (3, 3), (1, 2, 3)):
        with pytest.raises(ValueError, match="shape takes one that broadcasts"):
            ops.sum_to(a, shape)
