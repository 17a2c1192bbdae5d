"""Rows of a table, and the sum back into it."""

import numpy as np
import pytest
from ops_helpers import Home, assert_close, in_all_forms, in_all_homes, on_both_places

from numbsparse import ops


@in_all_homes
@in_all_forms
@pytest.mark.parametrize("shape", [(0,), (), (7,), (2, 3)], ids=str)
def test_take_rows(home, form, shape, rng):
    table, indices = rng.standard_normal((5, 3)), rng.integers(0, 5, shape)
    got = home.fetch(
        ops.take_rows(home.send(table, form=form), home.send(indices, dtype="int32", form=form))
    )
    np.testing.assert_array_equal(got, home.rounded(table)[indices])


@in_all_homes
@in_all_forms
@pytest.mark.parametrize(
    ("rows", "shape", "width"), [(4, (21,), 3), (3, (9,), 5), (3, (2, 5), 9), (2, (0,), 3)]
)
def test_sum_rows(home, form, rows, shape, width, rng):
    indices = rng.integers(0, rows, shape)
    dy = rng.standard_normal((*shape, width))
    got = home.fetch(
        ops.sum_rows(home.send(dy, form=form), home.send(indices, dtype="int64", form=form), rows)
    )
    dy = home.rounded(dy)
    expected, magnitude = np.zeros((rows, width)), np.zeros((rows, width))
    np.add.at(expected, indices, dy)
    np.add.at(magnitude, indices, np.abs(dy))
    assert_close(home, got, expected, steps=indices.size, magnitude=magnitude)


@on_both_places
def test_sum_rows_adds_in_order(home, rng):
    indices, dy = rng.integers(0, 3, 40), rng.standard_normal((40, 2)).astype("float32")
    results = [
        home.fetch(ops.sum_rows(home.send(dy), home.send(indices, dtype="int64"), 3))
        for _ in range(2)
    ]
    in_order = np.zeros((3, 2), np.float32)
    for i, row in enumerate(indices):
        in_order[row] += dy[i]
    for result in results:
        np.testing.assert_array_equal(result, in_order)


@pytest.mark.simulator
def test_out_of_range_on_a_gpu(rng):
    home = Home("cuda", "float32")
    table, indices = rng.standard_normal((3, 2)), np.array([0, -1, 3, 2**40, 2])
    sent = home.send(indices, dtype="int64")
    taken = home.fetch(ops.take_rows(home.send(table), sent))
    nan = np.full(2, np.nan)
    np.testing.assert_array_equal(
        taken, [*home.rounded(table[:1]), nan, nan, nan, *home.rounded(table[2:])]
    )
    dy = rng.standard_normal((5, 2))
    summed = home.fetch(ops.sum_rows(home.send(dy), sent, 3))
    np.testing.assert_array_equal(summed, home.rounded([dy[0], [0, 0], dy[4]]))


ORDERS = [f"{order}{kind}{size}" for order in "<>" for kind in "iu" for size in (1, 2, 4, 8)]


@pytest.mark.parametrize("dtype", ORDERS)
def test_integers_of_any_size_and_byte_order(dtype, rng):
    table, indices = rng.standard_normal((5, 3)), rng.integers(0, 5, 8)
    np.testing.assert_array_equal(ops.take_rows(table, indices.astype(dtype)), table[indices])
    expected = ops.cross_entropy(table[:, [0, 1, 2, 0, 1]], indices[:5])
    got = ops.cross_entropy(table[:, [0, 1, 2, 0, 1]], indices[:5].astype(dtype))
    np.testing.assert_array_equal(got[0], expected[0])


@pytest.mark.parametrize("dtype", ["<i8", ">i2"])
@pytest.mark.parametrize("indices", [[0, 3], [-1, 0]], ids=str)
def test_out_of_range_on_the_cpu(indices, dtype):
    indices = np.array(indices, dtype)
    with pytest.raises(ValueError, match="indices takes integers from 0 to 2, got"):
        ops.take_rows(np.ones((3, 2)), indices)
    with pytest.raises(ValueError, match="indices takes integers from 0 to 2, got"):
        ops.sum_rows(np.ones((2, 2)), indices, 3)


@on_both_places
def test_refusals(home):
    table, indices = home.send(np.ones((3, 2))), home.send([0, 1], dtype="int64")
    with pytest.raises(ValueError, match=r"table takes the shape \(rows, width\)"):
        ops.take_rows(table[0], indices)
    with pytest.raises(TypeError, match=r"indices takes .* got float32"):
        ops.take_rows(table, table)
    with pytest.raises(TypeError, match=r"indices takes .* got list"):
        ops.take_rows(table, [0])
    with pytest.raises(ValueError, match=r"dy takes the shape \(\*indices.shape, width\)"):
        ops.sum_rows(table, indices, 3)
    with pytest.raises(ValueError, match=r"dy takes the shape \(\*indices.shape, width\)"):
        ops.sum_rows(*(home.send(np.array(1), dtype=d) for d in ("float32", "int64")), 3)
    with pytest.raises(ValueError, match="rows takes an integer of at least 0, got -1"):
        ops.sum_rows(table[:2], indices, -1)


def test_two_places_are_refused():
    table = Home("cuda", "float32").send(np.ones((3, 2)))
    with pytest.raises(ValueError, match="table and indices take one device"):
        ops.take_rows(table, np.array([0]))
    with pytest.raises(ValueError, match="dy and indices take one device"):
        ops.sum_rows(table, np.array([0, 1, 2]), 3)
