"""Layout: patterns and index arrays that agree."""

import operator
import pickle
import threading

import numpy as np
import pytest
import scipy.sparse

import numbsparse as ns
from numbsparse.layout import Index, Layout, Walk, positions_among

PATTERNS = {
    "dense": np.ones((3, 5), bool),
    "random": np.random.default_rng(0).random((7, 4)) < 0.4,
    "one row": np.array([[True, False, True]]),
    "no block": np.zeros((2, 3), bool),
    "skewed": ns.patterns.barabasi_albert(20, 2, seed=0),
}


@pytest.fixture(params=PATTERNS)
def pattern(request):
    return PATTERNS[request.param]


def test_agrees_with_scipy(pattern):
    layout = Layout(pattern)
    expected = scipy.sparse.csr_array(pattern)
    assert layout.shape == pattern.shape
    assert layout.n_blocks == pattern.sum()
    assert layout.density == pattern.mean()
    np.testing.assert_array_equal(layout.indptr, expected.indptr)
    np.testing.assert_array_equal(layout.indices, expected.indices)
    np.testing.assert_array_equal(layout.pattern, pattern)


@pytest.mark.parametrize("walk", ["rows", "columns"])
def test_walks_meet_every_block_once_in_order(pattern, walk):
    layout = Layout(pattern)
    indptr, indices, blocks = getattr(layout.index, walk)
    own, other = layout.index.block_rows, layout.index.block_columns
    if walk == "columns":
        own, other = other, own
    for line in range(len(indptr) - 1):
        mine = slice(indptr[line], indptr[line + 1])
        assert (np.diff(indices[mine]) > 0).all()
        assert (own[blocks[mine]] == line).all()
        np.testing.assert_array_equal(other[blocks[mine]], indices[mine])
    np.testing.assert_array_equal(np.sort(blocks), np.arange(layout.n_blocks))


def test_index_is_int32_and_read_only(pattern):
    index = Layout(pattern).index
    for array in (*index.rows, *index.columns, index.block_rows, index.block_columns):
        assert array.dtype == np.int32
        assert not array.flags.writeable


def test_an_index_of_other_arrays_is_read_only_too():
    """As those of convolutions and of gates are: plans are compiled once for all of them."""
    walk = Walk(*(np.zeros(2, np.int32) for _ in range(3)))
    index = Index(walk, walk, *np.zeros((2, 1), np.int32))
    for array in (*index.rows, index.block_rows, index.block_columns):
        assert not array.flags.writeable


def test_transposed(pattern):
    layout = Layout(pattern)
    assert Layout(pattern.T) == layout.T
    assert layout.T.T is layout


def test_from_arrays_and_pickle(pattern):
    layout = Layout(pattern)
    assert Layout.from_arrays(layout.indptr, layout.indices, layout.shape) == layout
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert hash(again) == hash(layout)


def test_equality():
    assert Layout([[1, 0]]) != Layout([[0, 1]])
    assert Layout([[1, 0]]) != Layout([[1], [0]])
    assert Layout([[1, 0]]) != "another thing"


@pytest.mark.parametrize(
    ("indptr", "indices", "names"),
    [
        ([0, 1], [0], "indptr"),
        ([0, 2, 1], [0, 1], "indptr"),
        ([1, 1, 2], [0, 1], "indptr"),
        ([0, 1, 2], [0], "indices"),
        ([0, 1, 2], [0, 3], "indices"),
        ([0, 1, 2], [0, -1], "indices"),
        ([0, 2, 2], [1, 0], "indices"),
        ([0, 2, 2], [1, 1], "indices"),
    ],
)
def test_from_arrays_refuses(indptr, indices, names):
    with pytest.raises(ValueError, match=names):
        Layout.from_arrays(indptr, indices, (2, 3))


@pytest.mark.parametrize("shape", [(2, 2**31), (2**31, 2), (0, 3), (2, 0)], ids=str)
def test_a_side_has_as_many_blocks_as_int32_counts(shape):
    with pytest.raises(ValueError, match="shape takes an integer from 1 to 2147483647"):
        Layout.from_arrays([0, 0, 0], [], shape)


@pytest.mark.parametrize(
    ("indptr", "indices", "error", "says"),
    [
        (np.array([0, 2, 1], np.uint32), [0], ValueError, "indptr takes 3 rising numbers"),
        (np.array([0, 2**32 - 1, 1], np.uint32), [0], ValueError, "indptr takes 3 rising numbers"),
        (np.array([0, 1, 2**64 - 1], np.uint64), [0], ValueError, "indptr takes 3 rising numbers"),
        ([0, 0.5, 1], [0], TypeError, "indptr takes integers, got float64"),
        ([0, 1, 1], [0.5], TypeError, "indices takes integers, got float64"),
        ([0, 1, 1], [True], TypeError, "indices takes integers, got bool"),
        ([0, 2, 2], np.array([1, 0], np.uint64), ValueError, "rising numbers within each"),
        ([0, 1, 1], [[0]], ValueError, r"indices takes the shape \(1,\)"),
    ],
)
def test_from_arrays_counts_in_integers(indptr, indices, error, says):
    with pytest.raises(error, match=says):
        Layout.from_arrays(indptr, indices, (2, 3))


def test_empty_columns_take_no_memory_before_they_are_walked():
    layout = Layout.from_arrays([0, 1, 2], [5, 2**31 - 2], (2, 2**31 - 1))
    assert repr(layout) == "Layout(2 x 2147483647, 2 blocks, density 4.66e-10)"


@pytest.mark.parametrize("bad", [[[np.nan, 1.0]], [[0.5, 1]], [1, 0], np.zeros((0, 3)), [[2]]])
def test_refuses_what_is_no_pattern(bad):
    with pytest.raises(ValueError, match="pattern"):
        Layout(bad)


@pytest.mark.parametrize("spread", [1, 3, 100])
def test_blocks_are_found_by_a_table_or_by_a_search(spread, rng):
    rising = np.sort(rng.choice(20 * spread, 20, replace=False))
    wanted = np.append(rng.integers(-5, 20 * spread + 5, 50), rising)
    places = {number: i for i, number in enumerate(rising)}
    found = positions_among(rising, wanted)
    np.testing.assert_array_equal(found, [places.get(number, -1) for number in wanted])
    assert [positions_among(rising, number) for number in wanted] == found.tolist()
    assert found.dtype == np.int64


def test_blocks_off_the_grid_are_found_nowhere(pattern, rng):
    layout = Layout(pattern)
    rows, columns = rng.integers(-2, [n + 2 for n in pattern.shape], size=(200, 2)).T
    stored = {tuple(block): i for i, block in enumerate(np.argwhere(pattern).tolist())}
    expected = [
        stored.get(block, -1) for block in zip(rows.tolist(), columns.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(layout.find(rows, columns), expected)
    far = np.array([2**n for n in range(20, 64)], np.uint64)  # times a side they are 0 again
    for numbers in (far, -far[:-1].astype(np.int64)):
        assert set(layout.find(numbers, 0)) == set(layout.find(0, numbers)) == {-1}


def test_positions_are_in_layouts():
    with pytest.raises(TypeError, match="positions_in takes a Layout, got list"):
        Layout([[1]]).positions_in([[1]])
    for join in (operator.or_, operator.and_, operator.sub):
        with pytest.raises(TypeError, match=r"^[|&-] takes a Layout, got list"):
            join(Layout([[1]]), [[1]])


def test_positions_are_right_while_another_thread_asks_for_others():
    layout, one, other = Layout([[1, 1, 1]]), Layout([[1, 0, 1]]), Layout([[0, 1, 1]])

    def meanwhile():
        layout._met = None
        layout.positions_in(other)
        return one

    layout._met = meanwhile, one._positions(layout.flat_indices)
    np.testing.assert_array_equal(layout.positions_in(one), [0, -1, 1])


def test_no_thread_waits_for_the_index_of_another_layout(monkeypatch):
    begun, ended, make = threading.Event(), threading.Event(), scipy.sparse.csr_array

    def slow(*args, **how):
        if not begun.is_set():
            begun.set()
            ended.wait(10)
        return make(*args, **how)

    monkeypatch.setattr(scipy.sparse, "csr_array", slow)
    first, second = (threading.Thread(target=lambda: Layout([[1, 0]]).index) for _ in range(2))
    first.start()
    assert begun.wait(10)
    second.start()
    second.join(5)
    was_over = not second.is_alive()
    ended.set()
    first.join()
    second.join()
    assert was_over


@pytest.mark.parametrize("kept", [[1, 0, 1], [0.0, 1.0, 1.0], [True, False], [[True] * 3]])
def test_selected_blocks_are_said_by_booleans(kept):
    """Not by their numbers, which would select others."""
    layout = ns.Layout([[1, 0, 1], [0, 1, 0]])
    with pytest.raises(ValueError, match="kept takes 3 booleans, got "):
        layout.select(kept)
    assert layout.select([True] * 3) is layout
