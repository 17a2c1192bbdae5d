"""Arithmetic of layouts and matrices: patterns, and SciPy's sparse arrays in float64, say what."""

import operator

import numpy as np
import pytest
import scipy.sparse
from conftest import HALVES, host
from drawn import Space

import numbsparse as ns
from numbsparse import device, nn, ops
from numbsparse.dtypes import as_dtype

pytestmark = pytest.mark.usefixtures("cheap_products")

KINDS = ["random", "empty", "full", "within"]
CASES = Space(
    {
        "grid": [(3, 5), (1, 6), (5, 1)],
        "first": KINDS[:3],
        "second": [*KINDS, "same"],
        "edge": [(0, 0), (1, 3)],
        "dtype": ["float32", "float64", *HALVES],
        "place": ["cpu", "cuda"],
        "turned": [(False, False), (True, True), (True, False), (False, True)],
        "block_size": [4, 8],
    },
    lambda case: (case.get("place"), case.get("dtype")) != ("cuda", "float64"),
).covering()
UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def pattern_of(kind, grid, beside=None):
    if kind == "same":
        return beside.copy()
    if kind in ("empty", "full"):
        return np.full(grid, kind == "full")
    pattern = np.random.default_rng(grid[0] + (beside is not None)).random(grid) < 0.5
    return pattern & beside if kind == "within" and beside is not None else pattern


def matrix_of(case, pattern, turned, seed):
    """A matrix; what is beyond its edge is NaN."""
    size, rng = case["block_size"], np.random.default_rng(seed)
    full = [n * size for n in pattern.shape]
    shape = tuple(n - cut for n, cut in zip(full, case["edge"], strict=True))
    dense = np.full(full, np.nan)
    dense[: shape[0], : shape[1]] = rng.standard_normal(shape)
    w = ns.BlockSparse.from_dense(dense.astype(as_dtype(case["dtype"])), pattern, block_size=size)
    w = ns.BlockSparse(w.data, w.layout, shape=shape)
    if turned:
        w = ns.BlockSparse(w.T.data, w.layout.T, shape=shape[::-1]).T
    return w.to(case["place"])


def exact(w):
    """As SciPy holds it, in float64."""
    dense, size = host(w).astype(np.float64), w.block_size
    if any(n % size for n in w.shape):
        return scipy.sparse.csr_array(dense)
    return scipy.sparse.bsr_array(dense, blocksize=(size, size))


def check(case, got, right, absolute=0.0, terms=0):
    """Rounded once to the dtype, after a sum of `terms` whose sizes add up to `absolute`."""
    right = right.toarray() if scipy.sparse.issparse(right) else np.asarray(right)
    got, unit = host(got), UNIT[case["dtype"]]
    assert got.shape == right.shape
    assert str(got.dtype) == case["dtype"]
    wide = min(unit, UNIT["float32"])
    bound = unit * abs(right) * (1 + 2**-10) + wide * np.maximum(terms, 1) * absolute
    least = 2.0**-25 if case["dtype"] == "float16" else 0
    assert (abs(got.astype(np.float64) - right) <= bound + least).all()


@pytest.fixture(params=CASES, ids=lambda case: "-".join(map(str, case.values())))
def case(request):
    if request.param["place"] == "cuda" and not device.is_available():
        pytest.skip(device.why_unavailable())
    return request.param


@pytest.fixture
def pair(case):
    one = pattern_of(case["first"], case["grid"])
    two = pattern_of(case["second"], case["grid"], one)
    sides = zip((one, two), case["turned"], (7, 8), strict=True)
    return [matrix_of(case, pattern, turned, seed) for pattern, turned, seed in sides]


def test_pairs_are_as_scipy_has_them(case, pair):
    (a, b), (one, two) = pair, map(exact, pair)
    sizes = host(abs(one) + abs(two))  # float32 operands of a sum that is then rounded
    for function, right, layout in (
        (operator.add, one + two, a.layout | b.layout),
        (operator.sub, one - two, a.layout | b.layout),
        (operator.mul, one.multiply(two), a.layout & b.layout),
    ):
        got = function(a, b)
        assert (got.layout, got.place, got.shape) == (layout, case["place"], a.shape)
        check(case, got, right, sizes.toarray() if hasattr(sizes, "toarray") else sizes)


def test_one_is_as_scipy_has_it(case, pair):
    a, one = pair[0], exact(pair[0])
    for got, right in (
        (2.5 * a, 2.5 * one), (a * 3, one * 3), (a / 4, one / 4), (-a, -one), (abs(a), abs(one)),
    ):  # fmt: skip
        assert got.layout == a.layout
        check(case, got, right)
    for axis in (None, 0, 1, -1, -2):
        terms = a.shape[axis] if axis is not None else one.size
        check(case, a.sum(axis), one.sum(axis=axis), abs(one).sum(axis=axis), terms)
        assert np.array_equal(host(np.sum(a, axis)), host(a.sum(axis)))
    for k in (0, -3, a.block_size, -a.shape[0]):
        check(case, a.diagonal(k), np.diagonal(one.toarray(), k))


@pytest.mark.simulator
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
def test_sums_of_blocks_that_no_kernel_multiplies(size, dtype, put):
    case = {"block_size": size, "edge": (0, size // 2), "dtype": dtype, "place": "cpu"}
    w = matrix_of(case, np.array([[1, 0, 1], [1, 0, 0]], bool), False, 3)
    one, w = exact(w), put(w)
    for a, right in ((w, one), (w.T, one.T)):
        for axis in (0, 1):
            sizes = abs(right).sum(axis=axis)
            check(case, a.sum(axis), right.sum(axis=axis), sizes, a.shape[axis])


def test_norms_of_blocks(case, pair):
    a = pair[0]
    blocks = host(ops.inside(a.T if a.is_transposed else a)).astype(np.float64)
    if a.is_transposed:
        blocks = blocks[a.stored_layout.index.columns.blocks]
    flat = abs(blocks.reshape(len(blocks), a.block_size**2))
    right = {"l1": flat.sum(1), "l2": np.sqrt((flat**2).sum(1)), "max": flat.max(1, initial=0)}
    for by, norms in right.items():
        np.testing.assert_allclose(host(a.block_norms(by)), norms, rtol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1e25], ids=str)
def test_norms_of_blocks_whose_squares_float32_does_not_hold(put, rng, size):
    values = (rng.standard_normal((3, 8, 8)) * size).astype(np.float32)
    norms = np.sqrt((values.astype(np.float64) ** 2).sum((1, 2)))
    w = put(ns.BlockSparse(values, np.ones((1, 3))))
    weight = ns.Tensor(w, requires_grad=True)
    lengths = nn.functional.block_norms(weight)
    nn.functional.sum(lengths).backward()
    for got in (w.block_norms(), lengths.data):
        np.testing.assert_allclose(host(got), norms, rtol=1e-6)
    np.testing.assert_allclose(
        host(weight.grad.data.data), values / norms[:, None, None], rtol=2e-6
    )


def test_a_remapped_matrix_has_the_values_of_both(case, pair):
    a, b = pair
    moved = a.remap(b.layout)
    both = ns.BlockSparse.from_dense(np.ones(a.shape), b.layout, block_size=a.block_size)
    assert (moved.layout, moved.place, moved.dtype) == (b.layout, a.place, a.dtype)
    np.testing.assert_array_equal(host(moved), np.where(host(both) > 0, host(a), 0))
    for turned in (False, True):
        fresh = matrix_of(case, np.ones(case["grid"], bool), turned, 9)
        filled = ops.remap(a, fresh.layout, fresh)
        np.testing.assert_array_equal(host(filled), np.where(host(a) != 0, host(a), host(fresh)))
    if a.layout == b.layout:
        assert moved is a
    kept = (a.layout & b.layout).find(
        *(moved.layout.index.block_rows, moved.layout.index.block_columns)
    )
    assert (host(moved.data)[kept < 0] == 0).all()  # beyond the edge too


def test_slices_are_those_of_the_dense_matrix(case, pair):
    a, size = pair[0], case["block_size"]
    for rows in (slice(None), slice(size), slice((case["grid"][0] - 1) * size, None)):
        for columns in (slice(None), slice(size), slice((case["grid"][1] - 1) * size, None)):
            part = a[rows, columns]
            assert (part.place, part.dtype) == (a.place, a.dtype)
            np.testing.assert_array_equal(host(part), host(a)[rows, columns])
    whole = a[:, :size] if a.is_transposed else a[:size]
    if whole.n_blocks and a.place == "cpu":
        assert np.shares_memory(whole.values, a.values)


@pytest.mark.parametrize("grid", [(3, 5), (1, 1), (40, 70)])
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", [*KINDS, "same"])
def test_layouts_are_sets_of_blocks(grid, first, second):
    one = pattern_of(first, grid)
    two = pattern_of(second, grid, one)
    a, b = ns.Layout(one), ns.Layout(two)
    for got, right in ((a | b, one | two), (a & b, one & two), (a - b, one & ~two)):
        expected = ns.Layout(right)
        assert type(got) is ns.Layout
        assert got == expected
        for mine, theirs in zip(got.index.columns, expected.index.columns, strict=True):
            np.testing.assert_array_equal(mine, theirs)
            assert (mine.dtype, mine.flags.writeable) == (theirs.dtype, False)
    if first != "empty":
        assert a | (a & b) is a  # with its plans
        assert a & (a | b) is a
        assert (a & b) | a is a
        assert (a | b) & a is a
    where = a.positions_in(b)
    np.testing.assert_array_equal(where >= 0, two[one])
    np.testing.assert_array_equal(b.flat_indices[where[where >= 0]], (a & b).flat_indices)


def refused(kind, words):
    return pytest.raises(kind, match=words)


@pytest.mark.simulator
def test_what_does_not_fit_is_refused_by_name(place, put):
    w = put(ns.BlockSparse(np.ones((2, 4, 4), np.float32), [[1, 0], [0, 1]]))
    others = {
        "shape": (ValueError, ns.BlockSparse(w.values, w.layout, shape=(8, 7))),
        "block size": (ValueError, put(ns.BlockSparse(np.ones((1, 8, 8), np.float32), [[1]]))),
        "dtype": (TypeError, w.astype("float16")),
        "place": (ValueError, w.to("cpu" if place == "cuda" else "cuda")),
    }
    for name, (kind, other) in others.items():
        for function in (operator.add, operator.sub, operator.mul):
            with refused(kind, f"takes two matrices of one {name}, got"):
                function(w, other)
    with refused(TypeError, r"\+ takes two block-sparse matrices, or 0, got 2"):
        w + 2
    with refused(
        TypeError, "takes two block-sparse matrices or one and a number, got a numpy.ndarray"
    ):
        w * np.ones((8, 8), np.float32)
    with refused(TypeError, "two block-sparse matrices or one and a number"):
        np.ones((8, 8), np.float32) + w
    with refused(TypeError, "/ takes a number on the right"):
        w / w
    for function in (operator.eq, operator.ne):
        with refused(ValueError, r"takes two matrices of one shape, got \(8, 8\) and \(4, 4\)"):
            function(w, scipy.sparse.eye_array(4))
        with refused(TypeError, "takes two block-sparse matrices or one and a number, got"):
            function(w, put(np.ones((8, 8))))
    assert (w == "a word") is False
    assert (w != "a word") is True
    assert {w: 1}[w] == 1
    with refused(ValueError, r"layout takes \(2, 2\) blocks, as the matrix, got \(1, 2\)"):
        w.remap([[1, 1]])
    with refused(ValueError, "by takes one of l1, l2, max, got 'l3'"):
        w.block_norms("l3")
    with refused(ValueError, "axis takes 0, 1 or None, got 2"):
        w.sum(2)
    with refused(ValueError, "out takes None, got ndarray"):
        np.sum(w, axis=0, out=np.zeros(4))
    for key, kind in ((3, TypeError), (slice(0, 3), ValueError), (slice(4, 4), ValueError)):
        with refused(kind, "rows takes a slice"):
            w[key]
    for each in (w, w.T):
        with refused(ValueError, "columns takes a slice from one multiple of the block size 4"):
            each[:, 2:]
    with refused(ValueError, r"\| takes two layouts of one shape, got \(2, 2\) and \(1, 2\)"):
        w.layout | ns.Layout([[1, 1]])
    with refused(ValueError, "kept takes 2 booleans"):
        w.layout.select([True])


@pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
def test_matrices_are_compared_as_scipy_does(case, pair):
    """Value by value, of layouts that differ too, with numbers, and with matrices of SciPy."""
    a, b = pair
    numbers = [0, float(host(a).max(initial=0))]
    scipys = scipy.sparse.csr_array(host(b).astype(np.float64))
    for other in (b, a.copy(), a.remap(a.layout | b.layout), scipys, *numbers):
        for function in (operator.eq, operator.ne):
            got, dense = function(a, other), other
            if not isinstance(other, float | int):
                dense = other.toarray()
            assert scipy.sparse.issparse(got)
            assert got.dtype == bool
            np.testing.assert_array_equal(got.toarray(), function(host(a), dense))
            assert function is operator.eq or got.nnz == np.count_nonzero(host(a) != dense)


@pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
@pytest.mark.parametrize("dtype", [*HALVES, "float32", "float64"])
def test_a_number_of_python_is_compared_in_the_dtype_and_one_of_numpy_is_not(dtype):
    w = ns.BlockSparse(np.full((1, 4, 4), 0.1).astype(as_dtype(dtype)), [[1, 0]])
    assert ((w == 0.1).nnz, (w != 0.1).nnz) == (16, 16)
    assert (w == np.float64(0.1)).nnz == 16 * (dtype == "float64")


def test_the_sum_of_several_and_what_it_shares(put):
    w = put(ns.BlockSparse(np.ones((2, 4, 4), np.float32), [[1, 0], [0, 1]]))
    total = sum([w, w, w])
    np.testing.assert_array_equal(host(total), 3 * host(w))
    assert total.stored_layout is w.stored_layout  # and so its plans
    assert (0 + w).values is not w.values
    p = nn.Parameter(w)
    np.testing.assert_array_equal(host((2 * p).data), 2 * host(w))
