"""Arithmetic of block-sparse tensors: what it computes, its gradients, and theirs."""

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse.nn import functional as F

PATTERN = [[1, 0, 1], [0, 1, 1]]
OTHER = ns.Layout([[0, 1, 1], [0, 1, 0]])
MASK = np.kron(OTHER.pattern, np.ones((4, 4)))[:7, :10]
SUMS = {"": None, "over rows": 0, "over columns": -1, "over both": (0, 1)}
FUNCTIONS = {
    "w + v": (lambda w, v: w + v, lambda w, v: w + v),
    "w - v": (lambda w, v: w - v, lambda w, v: w - v),
    "w * v": (lambda w, v: w * v, lambda w, v: w * v),
    "w * w": (lambda w, v: w * w, lambda w, v: w * w),
    "-w": (lambda w, v: -w, lambda w, v: -w),
    "w / 3": (lambda w, v: w / 3, lambda w, v: w / 3),
    "abs": (lambda w, v: abs(w), lambda w, v: abs(w)),
    "remap": (lambda w, v: F.remap(w, OTHER), lambda w, v: w * MASK),
    "other +": (lambda w, v: w + F.remap(v, OTHER), lambda w, v: w + v * MASK),
    "other -": (lambda w, v: F.remap(v, OTHER) - w, lambda w, v: v * MASK - w),
    "other *": (lambda w, v: F.remap(v, OTHER) * w, lambda w, v: v * MASK * w),
    "sum()": (lambda w, v: sum([w, v, 0]), lambda w, v: w + v),
    "rows": (lambda w, v: w[4:] * v[4:], lambda w, v: (w * v)[4:]),
    "part": (lambda w, v: w[:4, 4:] - v[:4, -6:], lambda w, v: (w - v)[:4, 4:]),
    "columns": (lambda w, v: (w[:, :4] * v[:, :4]).T, lambda w, v: (w * v)[:, :4].T),
} | {
    f"sum {name}": (lambda w, v, axis=axis: F.sum(w, axis), lambda w, v, axis=axis: w.sum(axis))
    for name, axis in SUMS.items()
}

NORMS = {
    "l1": lambda a: abs(a).sum((1, 3)),
    "l2": lambda a: np.sqrt((a * a).sum((1, 3))),
    "max": lambda a: abs(a).max((1, 3)),
}
KEPT = np.array(PATTERN, bool)
FUNCTIONS |= {
    f"norms {by}": (
        lambda w, v, by=by: F.block_norms(w, by),
        lambda w, v, norms=norms: norms(np.pad(w, ((0, 1), (0, 2))).reshape(2, 4, 3, 4))[KEPT],
    )
    for by, norms in NORMS.items()
}


def matrix(rng, turned):
    """7 x 10 in blocks of 4, stored by columns where it is turned."""
    layout = ns.Layout(PATTERN)
    w = ns.BlockSparse(rng.standard_normal((4, 4, 4)), layout, shape=(7, 10))
    if turned:
        w = ns.BlockSparse(w.T.data, layout.T, shape=(10, 7)).T
    return w


@pytest.mark.parametrize("turned", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, turned, rng):
    function, of_dense = FUNCTIONS[name]
    w, v = (matrix(rng, t) for t in turned)
    got = function(ns.Tensor(w), ns.Tensor(v))
    right = of_dense(w.toarray(), v.toarray())
    np.testing.assert_allclose(host(got.data), right, rtol=1e-13, atol=1e-14)
    ns.testing.check_grads(function, w, v, order=1 if "norms" in name else 2)


def test_in_float32_in_either_place(place, put, rng):
    w, v = (matrix(rng, t).astype("float32") for t in (0, 1))
    for function, of_dense in FUNCTIONS.values():
        got = function(ns.Tensor(put(w)), ns.Tensor(put(v)))
        assert got.place == place
        assert got.dtype == "float32"
        right = of_dense(w.toarray().astype(float), v.toarray().astype(float))
        np.testing.assert_allclose(host(got.data), right, rtol=1e-5, atol=1e-5)


def test_a_gradient_of_another_layout_is_not_added_to(rng):
    w = ns.Tensor(matrix(rng, False), requires_grad=True)
    F.sum(w).backward()
    before, w.data = w.grad, w.data.remap(OTHER)
    with pytest.raises(ValueError, match=r"grad takes the layout .*, another"):
        F.sum(w * w).backward()
    assert w.grad is before
    w.grad = None
    F.sum(w * w).backward()
    assert w.grad.data.layout == OTHER


def test_sums_read_nothing_beyond_the_edge(rng):
    w = matrix(rng, False)
    w.values[2:, 3:] = np.nan
    w.values[[1, 3], :, 2:] = np.nan
    for axis in SUMS.values():
        assert np.isfinite(host(F.sum(ns.Tensor(w), axis).data)).all()
    assert F.sum(ns.Tensor(w), 0, keepdims=True).shape == (1, 10)
    assert F.sum(ns.Tensor(w), keepdims=True).shape == (1, 1)


def test_blocks_without_a_slope_and_blocks_with_two():
    """Of zeros, and with the largest value twice: as torch's `amax` has it."""
    values = np.array([[[0.0, 0], [0, 0]], [[3, -3], [1, 0]]])
    for by, right in {
        "l1": [1, -1, 1, 0],
        "l2": [3, -3, 1, 0] / np.sqrt(19),
        "max": [0.5, -0.5, 0, 0],
    }.items():
        w = ns.Tensor(ns.BlockSparse(values, [[1, 1]]), requires_grad=True)
        F.sum(F.block_norms(w, by)).backward()
        np.testing.assert_allclose(w.grad.data.data.reshape(2, 4), [[0] * 4, right], atol=1e-15)


def test_norms_of_16_bit_blocks_are_float32(put, rng):
    w = matrix(rng, True).astype("float16")
    for by, norms in NORMS.items():
        got = F.block_norms(ns.Tensor(put(w)), by)
        right = norms(np.pad(w.toarray().astype(float), ((0, 1), (0, 2))).reshape(2, 4, 3, 4))
        assert got.dtype == "float32"
        np.testing.assert_allclose(host(got.data), right[KEPT], rtol=1e-6)


def test_what_would_be_dense_is_refused(rng):
    w = ns.Tensor(matrix(rng, False))
    other = ns.Tensor(ns.BlockSparse(np.ones((4, 4, 4)), PATTERN))
    for call in (lambda: w + other, lambda: w - other, lambda: w * other):
        with pytest.raises(ValueError, match=r"b takes the shape \(7, 10\), got \(8, 12\)"):
            call()
    for call, words in (
        (lambda: w - 1.0, "b takes a BlockSparse as the other one, or 0, got float"),
        (lambda: np.ones(10) + w, "a takes a BlockSparse as the other one, or 0, got numpy.ndarr"),
        (lambda: w[1:], "rows takes a slice from one multiple of the block size 4"),
        (lambda: F.sum(w, 2), r"axis takes 0, 1, both or None, got 2"),
        (lambda: F.sum(w, (0, 0)), r"axis takes 0, 1, both or None, got \(0, 0\)"),
        (lambda: F.remap(w, np.ones((3, 3))), r"layout takes \(2, 3\) blocks"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match="by takes one of l1, l2, max, got 'l3'"):
        F.block_norms(w, "l3")
    with pytest.raises(
        TypeError, match=r"w takes a Tensor of a BlockSparse, got one of numpy\.ndarray"
    ):
        F.block_norms(np.ones((4, 4)))
    with pytest.raises(TypeError, match="b takes a number with / and a block-sparse tensor, got"):
        w / w
    with pytest.raises(TypeError, match=r"b takes a number with \* and a block-sparse tensor, got"):
        w * np.ones(10)
