"""Views, joins and parts."""

import numpy as np
import pytest
from ops_helpers import Home, host, in_all_forms, in_all_homes, on_both_places

from numbsparse import ops


def is_view(result, of):
    if isinstance(of, np.ndarray):
        return np.shares_memory(result, of)
    return result.owner is of.owner


@on_both_places
@in_all_forms
@pytest.mark.parametrize(
    "shape", [(24,), (6, 4), (3, 8), (2, 3, 2, 2), (-1, 3), (2, 1, 3, 4)], ids=str
)
def test_reshape(home, form, shape, rng):
    a = rng.standard_normal((2, 3, 4)).astype("float32")
    got = ops.reshape(home.send(a, form=form), shape)
    np.testing.assert_array_equal(host(got), a.reshape(shape))


@on_both_places
@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ((), (24,)),
        ((slice(None), slice(None), slice(1, 3)), (2, 3, 1, 2)),
        ((slice(None), slice(None), slice(0, 4, 2)), (6, 2)),
        ((slice(None), slice(None), slice(0, 4, 2)), (1, 6, 1, 2, 1)),
        ((slice(None), 1), (2, 2, 2)),
        ((slice(None), slice(0, 1)), (2, 4)),
    ],
    ids=str,
)
def test_reshape_is_a_view_where_it_can_be(home, key, shape, rng):
    a = home.send(rng.standard_normal((2, 3, 4)))
    part = a[key]
    view = ops.reshape(part, shape)
    assert is_view(view, a)
    np.testing.assert_array_equal(host(view), host(part).reshape(shape))


@on_both_places
@pytest.mark.parametrize(
    ("key", "shape"),
    [((slice(None), slice(0, 2)), (16,)), ((slice(None), slice(0, 2)), (1, 16, 1))],
    ids=str,
)
def test_reshape_copies_where_it_must(home, key, shape, rng):
    a = home.send(rng.standard_normal((2, 3, 4)))
    copied = ops.reshape(a[key], shape)
    assert not is_view(copied, a)
    np.testing.assert_array_equal(host(copied), host(a)[key].reshape(shape))


@on_both_places
def test_reshape_without_values(home):
    assert ops.reshape(home.send(np.ones((0, 4)), form="T"), (0, 2, 2)).shape == (0, 2, 2)


@on_both_places
@pytest.mark.parametrize("axes", [None, (0, 1, 2), (2, 0, 1), (-1, 0, 1)], ids=str)
def test_transpose(home, axes, rng):
    a = home.send(rng.standard_normal((2, 3, 4)))
    view = ops.transpose(a, axes)
    assert is_view(view, a)
    np.testing.assert_array_equal(host(view), host(a).transpose(axes))


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenate(home, form, axis, rng):
    parts = [rng.standard_normal((3, 4)), rng.standard_normal((3, 4))]
    parts.append(parts[0][:, :0] if axis else parts[0][:0])
    got = home.fetch(ops.concatenate([home.send(part, form=form) for part in parts], axis))
    np.testing.assert_array_equal(got, home.rounded(np.concatenate(parts, axis)))


@pytest.mark.simulator
def test_arrays_that_adjoin_are_joined_without_a_copy():
    whole = Home("cuda", "float32").send(np.arange(12.0).reshape(6, 2))
    parts = [whole[:1], whole[1:3], whole[3:6]]
    joined = ops.concatenate(parts)
    assert joined.address == whole.address
    np.testing.assert_array_equal(joined.numpy(), whole.numpy())
    assert is_view(ops.stack([whole[2], whole[3]]), whole)
    for others in ([parts[0], parts[2]], parts[::-1], [whole[:3, :1], whole[3:, :1]]):
        assert not is_view(ops.concatenate(others), whole)
        expected = np.concatenate([other.numpy() for other in others])
        np.testing.assert_array_equal(ops.concatenate(others).numpy(), expected)


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_stack(home, form, axis, rng):
    parts = [rng.standard_normal((3, 2)) for _ in range(3)]
    got = home.fetch(ops.stack([home.send(part, form=form) for part in parts], axis))
    np.testing.assert_array_equal(got, home.rounded(np.stack(parts, axis)))


KEYS = [
    0,
    (1, -1),
    (1, 2, 3),
    slice(1, None),
    (slice(None), slice(0, 3, 2)),
    (..., 1),
    (slice(None), None, 2),
    np.int64(1),
    (),
    slice(2, 1),
]


@in_all_homes
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_getitem_and_put(home, key, rng):
    a = home.send(rng.standard_normal((2, 3, 4)))
    part = ops.getitem(a, key)
    expected = host(a)[key]
    np.testing.assert_array_equal(host(part), expected)
    assert host(part).ndim == np.ndim(expected)
    if np.size(expected):
        assert is_view(part, a)
    back = home.fetch(ops.put((2, 3, 4), key, part))
    whole = np.zeros((2, 3, 4))
    whole[key] = expected
    np.testing.assert_array_equal(back, whole)


@on_both_places
def test_refusals(home):
    a, longer = home.send(np.ones((2, 3))), home.send(np.ones((2, 3, 1)))
    integers = home.send([1, 2], dtype="int64")
    for shape in ((5,), (4, 2)):
        for of in (a, a.T):
            with pytest.raises(ValueError, match=r"reshape|shape"):
                ops.reshape(of, shape)
    for axes in ((0,), (0, 2), (0, 0)):
        with pytest.raises(ValueError, match=r"ax[ie]s"):
            ops.transpose(a, axes)
    for join in (ops.concatenate, ops.stack):
        with pytest.raises(ValueError, match="arrays takes at least one"):
            join([])
        with pytest.raises(
            ValueError, match=r"arrays take one shape.* got \(2, 3\) and \(2, 3, 1\)"
        ):
            join([a, longer])
        with pytest.raises(TypeError, match="arrays take one dtype, got float32 and int64"):
            join([a, integers])
        with pytest.raises(TypeError, match=r"arrays takes .* got list"):
            join([a, [1.0]])
        with pytest.raises(ValueError, match="arrays take one shape"):
            join([a, a[:, :2]])
        with pytest.raises(ValueError, match=r"axis takes integers from -[23] to [12], got 3"):
            join([a, a], 3)
    for key in ([0, 1], np.array([True, False]), True, "x"):
        with pytest.raises(TypeError, match="key takes integers, slices"):
            ops.getitem(a, key)
    with pytest.raises(IndexError, match="out of bounds"):
        ops.getitem(a, 2)
    with pytest.raises(ValueError, match=r"values take the shape \(3,\) at this key, got \(2,\)"):
        ops.put((2, 3), 0, home.send(np.ones(2)))


def test_joins_refuse_two_places():
    there, here = Home("cuda", "float32").send(np.ones(2)), np.ones(2, np.float32)
    for join in (ops.concatenate, ops.stack):
        with pytest.raises(ValueError, match="take one device"):
            join([there, here])
