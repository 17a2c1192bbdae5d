"""ns.matmul and ns.sddmm: places, strides, out, and what they refuse."""

import numpy as np
import pytest
from conftest import host

import numbsparse as ns
from numbsparse import device


@pytest.fixture
def w(rng, put):
    layout = ns.Layout(rng.random((4, 3)) < 0.6)
    values = rng.standard_normal((layout.n_blocks, 8, 8), dtype=np.float32)
    return put(ns.BlockSparse(values, layout, shape=(30, 22)))


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape, dtype=dtype)


def assert_near(result, expected):
    np.testing.assert_allclose(host(result), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("batch", [(), (5,), (0,), (2, 3), (2, 1, 2)], ids=str)
def test_dense_times_sparse(rng, put, w, batch):
    x = normal(rng, *batch, 30)
    y = ns.matmul(put(x), w)
    assert y.shape == (*batch, 22)
    assert_near(y, x @ w.toarray())
    assert_near(put(x) @ w, x @ w.toarray())


@pytest.mark.parametrize("batch", [(), (5,), (0,)], ids=str)
def test_sparse_times_dense(rng, put, w, batch):
    x = normal(rng, 22, *batch)
    y = w @ put(x)
    assert y.shape == (30, *batch)
    assert_near(y, w.toarray() @ x)


def test_transposed(rng, put, w):
    dy = normal(rng, 5, 22)
    assert_near(put(dy) @ w.T, dy @ w.toarray().T)
    x = normal(rng, 30, 2)
    assert_near(w.T @ put(x), w.toarray().T @ x)


@pytest.mark.parametrize("view", ["rows apart", "transposed", "three axes"])
def test_strided_operands(rng, put, w, view):
    base = normal(rng, 6, 2, 30)
    x = base[:, 0]
    on_place = put(base)[:, 0]
    if view == "transposed":
        base = np.ascontiguousarray(base[:, 0].T)
        x, on_place = base.T, put(base).T
    if view == "three axes":
        base = normal(rng, 3, 4, 60)
        x, on_place = base[:, 1:3, :30], put(base)[:, 1:3, :30]
    assert_near(ns.matmul(on_place, w), x @ w.toarray())


@pytest.mark.parametrize("side", ["x @ w", "w @ x"])
def test_out(rng, put, w, side):
    out = put(np.full((5, 22) if side == "x @ w" else (30, 5), np.nan, np.float32))
    if side == "x @ w":
        x = normal(rng, 5, 30)
        result, expected = ns.matmul(put(x), w, out=out), x @ w.toarray()
    else:
        x = normal(rng, 22, 5)
        result, expected = ns.matmul(w, put(x), out=out), w.toarray() @ x
    assert result is out
    assert_near(out, expected)


def test_sddmm(rng, put, w):
    x, dy = normal(rng, 9, 30), normal(rng, 9, 22)
    full = np.zeros((32, 24), np.float32)
    full[:30, :22] = x.T @ dy
    expected = ns.BlockSparse.from_dense(full, w.layout, block_size=8).toarray()[:30, :22]
    for layout in (w.layout, w.layout.pattern):
        dw = ns.sddmm(put(x).T, put(dy), layout, block_size=8)
        assert (dw.shape, dw.layout, dw.place) == (w.shape, w.layout, w.place)
        assert_near(dw, expected)
    dw = ns.sddmm(put(x).T, put(dy), w)
    assert_near(dw, expected)
    dw = ns.sddmm(put(dy).T, put(x), w.T)
    assert dw.is_transposed
    assert_near(dw, expected.T)


@pytest.mark.parametrize(
    "kernel", ["k0_reference", "k0_cpu", "k1_naive", "k2_shared", "k3_registers", "k4_pipelined"]
)
def test_kernel_by_name(rng, put, w, place, kernel):
    x = normal(rng, 5, 30)
    if kernel.startswith("k0") == (place == "cpu"):
        assert_near(ns.matmul(put(x), w, kernel=kernel), x @ w.toarray())
        ns.sddmm(put(x).T, put(x), np.ones((4, 4)), block_size=8, kernel=kernel)
    else:
        with pytest.raises(ValueError, match=kernel):
            ns.matmul(put(x), w, kernel=kernel)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dtypes(rng, put, place, dtype):
    x = normal(rng, 3, 16).astype(dtype)
    w = put(ns.BlockSparse(normal(rng, 2, 8, 8).astype(dtype), [[1], [1]]))
    if dtype == ("float16" if place == "cpu" else "float64"):
        with pytest.raises(ValueError, match=dtype):
            ns.matmul(put(x), w)
    else:
        y = ns.matmul(put(x), w)
        assert y.dtype == dtype
        exact = x.astype(np.float64) @ w.toarray().astype(np.float64)
        assert abs(host(y) - exact).max() <= 20 * np.finfo(dtype).eps * abs(exact).max()


needs_cuda = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")


@needs_cuda
def test_numpy_operand_meets_a_weight_on_the_gpu(rng):
    w = ns.BlockSparse(normal(rng, 2, 8, 8), [[1, 1]]).to("cuda")
    x = normal(rng, 3, 8)
    y = x @ w
    assert isinstance(y, np.ndarray)
    assert_near(y, x @ w.toarray())
    out = np.full((3, 16), np.nan, np.float32)
    assert ns.matmul(x, w, out=out) is out
    assert_near(out, x @ w.toarray())
    vector = w.T @ normal(rng, 8)
    assert isinstance(vector, np.ndarray)


@needs_cuda
def test_an_operand_on_the_gpu_needs_its_weight_there(rng):
    w = ns.BlockSparse(normal(rng, 2, 8, 8), [[1, 1]])
    with pytest.raises(ValueError, match=r'w\.to\("cuda"\)'):
        ns.to_device(normal(rng, 3, 8)) @ w
    with pytest.raises(ValueError, match="a and b"):
        ns.sddmm(ns.to_device(normal(rng, 8, 3)), normal(rng, 3, 16), w)


@needs_cuda
def test_any_array_with_the_cuda_array_interface(rng):
    class Foreign:
        def __init__(self, array):
            self.array = ns.to_device(array)
            self.shape = array.shape
            self.__cuda_array_interface__ = self.array.__cuda_array_interface__

    w = ns.BlockSparse(Foreign(normal(rng, 2, 8, 8)), [[1, 1]])
    assert w.place == "cuda"
    x = normal(rng, 3, 8)
    y = ns.matmul(Foreign(x), w)
    assert isinstance(y, ns.DeviceArray)
    assert_near(y, x @ w.toarray())
    out = Foreign(np.full((3, 16), np.nan, np.float32))
    assert ns.matmul(Foreign(x), w, out=out) is out
    assert_near(out.array, x @ w.toarray())


W = ns.BlockSparse(np.ones((2, 8, 8), np.float32), [[1, 1]], shape=(8, 13))
X = np.ones((3, 8), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ns.matmul(X, X), TypeError, "one BlockSparse, got x a ndarray and w a ndarray"),
        (lambda: ns.matmul(W, W), TypeError, "got two"),
        (lambda: ns.matmul(X.astype(np.float64), W), TypeError, "float64 and float32"),
        (lambda: ns.matmul(X[:, :7], W), ValueError, r"\(\.\.\., 8\).*\(3, 7\)"),
        (lambda: ns.matmul(np.float32(1), W), ValueError, r"\(\.\.\., 8\)"),
        (lambda: ns.matmul(W, np.ones((2, 13, 2), np.float32)), ValueError, "axes"),
        (lambda: ns.matmul(W, X), ValueError, r"\(\.\.\., 13\)"),
        (lambda: ns.matmul(X, W, kernel="fast"), ValueError, "'fast'"),
        (lambda: ns.matmul(X, W, kernel="k2_shared"), ValueError, "k2_shared runs on a GPU"),
        (lambda: ns.matmul(X, W, out=np.ones((3, 12), np.float32)), ValueError, "out"),
        (lambda: ns.matmul(X, W, out=np.ones((3, 13))), ValueError, "out.*float64"),
        (lambda: ns.matmul(X, W, out=np.ones((13, 3), np.float32).T), ValueError, "contiguous"),
        (lambda: ns.matmul(X, W, out=[[0.0] * 13] * 3), ValueError, "out"),
        (lambda: ns.sddmm(X, X, W), ValueError, r"\(3, 8\) and \(3, 8\)"),
        (lambda: ns.sddmm(X.T, X.astype(np.float64), W), TypeError, "float32 and float64"),
        (lambda: ns.sddmm(X.T, X, W), ValueError, r"\(8, 13\).*\(8, 8\)"),
        (lambda: ns.sddmm(X.T, X[:, :7], [[1, 1]]), ValueError, "block_size"),
        (lambda: ns.sddmm(X.T, X, [[1, 2]]), ValueError, "layout"),
        (lambda: ns.sddmm(X.T, X, np.ones((3, 3)), block_size=3), ValueError, "3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_unusual_block_sizes_are_refused_but_for_the_reference():
    w = ns.BlockSparse(np.ones((1, 5, 5), np.float32), [[1]])
    with pytest.raises(ValueError, match="5"):
        X[:, :5] @ w
    assert (ns.matmul(X[:, :5], w, kernel="k0_reference") == 5).all()
