"""ns.matmul and ns.sddmm: places, strides, out, and what they refuse."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import HALVES, host, needs_bfloat16

import numbsparse as ns
from numbsparse import device, to_device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import LADDER, PRODUCTS

cheap = pytest.mark.usefixtures("cheap_products")


@pytest.fixture
def w(rng, put):
    layout = ns.Layout(rng.random((4, 3)) < 0.6)
    values = rng.standard_normal((layout.n_blocks, 8, 8), dtype=np.float32)
    return put(ns.BlockSparse(values, layout, shape=(30, 22)))


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape, dtype=dtype)


def assert_near(result, expected):
    np.testing.assert_allclose(host(result), expected, rtol=0, atol=2e-5)


@cheap
@pytest.mark.parametrize("batch", [(), (5,), (0,), (2, 3), (2, 1, 2)], ids=str)
def test_dense_times_sparse(rng, put, w, batch):
    x = normal(rng, *batch, 30)
    y = ns.matmul(put(x), w)
    assert y.shape == (*batch, 22)
    assert_near(y, x @ w.toarray())
    assert_near(put(x) @ w, x @ w.toarray())


@cheap
@pytest.mark.parametrize("batch", [(), (5,), (0,)], ids=str)
def test_sparse_times_dense(rng, put, w, batch):
    x = normal(rng, 22, *batch)
    y = w @ put(x)
    assert y.shape == (30, *batch)
    assert_near(y, w.toarray() @ x)


@cheap
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


def test_out_takes_memory_of_its_own(put):
    both = put(np.ones((8, 16), np.float32))
    w = put(ns.BlockSparse(np.ones((2, 8, 8), np.float32), np.eye(2)))
    x, rest = both[:4], both[4:]
    with pytest.raises(ValueError, match="own, got some of x"):
        ns.matmul(x, w, out=x)
    with pytest.raises(ValueError, match="own, got some of w"):
        ns.matmul(x, w, out=w.values.reshape((8, 16))[:4])
    assert ns.matmul(x, w, out=rest) is rest
    assert_near(rest, np.full((4, 16), 8))
    with pytest.raises(ValueError, match="own, got some of x"):
        ns.matmul(both[::2], w, out=both[2:6])
    between = put(np.ones((4, 2, 16), np.float32))
    assert ns.matmul(between[:2, 0], w, out=between[2:].reshape((4, 16))[:2]) is not None
    with pytest.raises(ValueError, match="own, got some of w"):
        ns.matmul(x, w, out=w.values.reshape((8, 16))[4:])


def test_out_takes_no_memory_of_a_reversed_operand():
    both = np.ones((8, 16), np.float32)
    with pytest.raises(ValueError, match="own, got some of x"):
        ns.matmul(both[::-1], ns.BlockSparse(np.ones((2, 8, 8), np.float32), np.eye(2)), out=both)


def test_a_lent_array_with_negative_strides_is_refused(rng):
    if not device.SIMULATED:
        pytest.skip("other libraries' arrays are CuPy's and Numba's")
    there = to_device(normal(rng, 4, 30))
    lent = SimpleNamespace(
        __cuda_array_interface__={
            **there.__cuda_array_interface__,
            "data": (there.address + 3 * 120, False),
            "strides": (-120, 4),
        }
    )
    w = ns.BlockSparse(np.ones((3, 10, 10), np.float32), np.eye(3)).to("cuda")
    with pytest.raises(ValueError, match=r"x takes strides from 0 up, got \(-120, 4\)"):
        ns.matmul(lent, w)


def test_feature_major_results_are_written_where_they_lie(rng, put, w, monkeypatch):
    # (out_features, batch) in C order, by the rung itself: no view that turns it, no copy.
    x = normal(rng, 22, 35)
    y = w @ put(x)
    assert y.flags.c_contiguous if isinstance(y, np.ndarray) else y.is_contiguous
    out = put(np.full((30, 35), np.nan, np.float32))
    spare = ns.matmul(w, put(x), out=out)
    matmul = sys.modules["numbsparse.ops.matmul"]
    for name in ("empty", "empty_quickly", "empty_in_library_of"):
        monkeypatch.setattr(matmul, name, lambda *args: pytest.fail("memory was asked for"))
    assert ns.matmul(w, put(x), out=out) is out is spare
    assert_near(out, w.toarray() @ x)
    # The same bits as batch-major.
    np.testing.assert_array_equal(host(y), host(out))


@cheap
def test_feature_major_gradients(rng, put, w):
    x, dy = normal(rng, 22, 35), normal(rng, 30, 35)
    tensor = ns.Tensor(put(x), requires_grad=True)
    weight = ns.Tensor(w, requires_grad=True)
    ns.matmul(weight, tensor).backward(put(dy))
    assert_near(tensor.grad.data, w.toarray().T @ dy)
    dense = np.zeros((32, 24), np.float32)
    dense[:30, :22] = dy @ x.T
    kept = ns.BlockSparse.from_dense(dense, w.layout, block_size=8).toarray()
    np.testing.assert_allclose(weight.grad.numpy(), kept[:30, :22], rtol=0, atol=1e-4)


@pytest.fixture
def asked(place, monkeypatch):
    """(product, precision) of every call of a rung in this place."""
    calls = []
    rung = LADDER["k0_cpu" if place == "cpu" else "k1_naive"]

    def noting(product, run):
        def noted(*operands):
            calls.append((product, operands[4]))
            run(*operands)

        return noted

    for product in PRODUCTS:
        monkeypatch.setattr(rung, product, noting(product, getattr(rung, product)))
    return calls


THREE = ["forward", "input_grad", "weight_grad"]


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("side", ["x @ w", "w @ x"])
@pytest.mark.parametrize("how", ["argument", "context", "setting"])
def test_gradients_are_as_precise_as_their_product(rng, put, w, place, asked, precision, side, how):
    kernel = "k0_cpu" if place == "cpu" else "k1_naive"
    x = ns.Tensor(put(normal(rng, *((5, 30) if side == "x @ w" else (22, 5)))), requires_grad=True)
    weight = ns.Tensor(w, requires_grad=True)
    operands = (x, weight) if side == "x @ w" else (weight, x)
    if how == "argument":
        y = ns.matmul(*operands, kernel=kernel, precision=precision)
    else:
        with ns.set_precision(precision):
            y = ns.matmul(*operands, kernel=kernel)
    y.backward(put(np.ones(y.shape, np.float32)))  # outside of the context
    assert sorted(product for product, _ in asked) == THREE
    assert {said for _, said in asked} == {precision}


def test_sddmm_and_its_gradients_are_as_precise_as_asked(rng, put, place, asked):
    kernel = "k0_cpu" if place == "cpu" else "k1_naive"
    a, b = (ns.Tensor(put(normal(rng, 8, 8)), requires_grad=True) for _ in range(2))
    s = ns.sddmm(a, b, [[1]], kernel=kernel, precision="high")
    s.backward(s.data)
    assert [said for _, said in asked] == 3 * ["high"]


def test_set_precision_holds_until_it_is_set_again(put, asked, place):
    x, w = put(np.ones((1, 8), np.float32)), put(ns.BlockSparse(np.ones((1, 8, 8), "f4"), [[1]]))
    kernel = "k0_cpu" if place == "cpu" else "k1_naive"

    def said(**precision):
        ns.matmul(x, w, kernel=kernel, **precision)
        return asked[-1][1]

    assert said() == "highest"
    try:
        ns.set_precision("high")
        assert (said(), said(precision="highest"), said()) == ("high", "highest", "high")
        with ns.set_precision("highest"):
            assert said() == "highest"
            with pytest.raises(
                ValueError, match="precision takes one of highest, high, got 'medium'"
            ):
                ns.set_precision("medium")
            assert said() == "highest"
        assert said() == "high"
        again = ns.set_precision("highest")
        with again, again:
            assert said() == "highest"
        assert said() == "high"
        with again:
            assert said() == "highest"
        assert said() == "high"
    finally:
        ns.set_precision("highest")
    for call in (lambda: said(precision="tf32"), lambda: ns.set_precision(None)):
        with pytest.raises(ValueError, match=r"precision takes one of .*got ('tf32'|None)"):
            call()


def test_what_is_known_of_a_product_serves_no_other_dtype_or_block_size(rng):
    """On the CPU a product that comes again is looked up."""
    layout, x = ns.Layout([[1]]), normal(rng, 5, 8)
    for size in (8, 16, 8):
        assert ns.sddmm(x.T, x, layout, block_size=size).block_size == size
        w = ns.BlockSparse(np.ones((1, size, size), np.float32), layout, shape=(8, 8))
        np.testing.assert_allclose(x @ w, np.broadcast_to(x.sum(1)[:, None], (5, 8)), rtol=1e-4)
    wide, other = x.astype(np.float64), w.astype("float64")
    for product in (
        lambda: ns.sddmm(x.T, wide, layout, block_size=8),
        lambda: ns.sddmm(wide.T, x, layout, block_size=8),
        lambda: wide @ w,
        lambda: x @ other,
    ):
        with pytest.raises(TypeError, match="take one dtype, got"):
            product()


@cheap
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


@pytest.mark.parametrize("kernel", ["k0_reference", "k0_cpu", "k1_naive", "k3_registers"])
def test_kernel_by_name(rng, put, w, place, kernel):
    x = normal(rng, 5, 30)
    if kernel.startswith("k0") == (place == "cpu"):
        assert_near(ns.matmul(put(x), w, kernel=kernel), x @ w.toarray())
        ns.sddmm(put(x).T, put(x), np.ones((4, 4)), block_size=8, kernel=kernel)
    else:
        with pytest.raises(ValueError, match=kernel):
            ns.matmul(put(x), w, kernel=kernel)


@pytest.mark.parametrize("dtype", [*HALVES, "float32", "float64"])
def test_dtypes(rng, put, place, dtype):
    dtype = as_dtype(dtype)
    x, values = (normal(rng, *shape).astype(dtype) for shape in ((3, 16), (2, 8, 8)))
    w = put(ns.BlockSparse(values, [[1], [1]]))
    if dtype == "float64" and place == "cuda":
        with pytest.raises(ValueError, match="k1_naive takes float16, bfloat16, float32, got"):
            ns.matmul(put(x), w)
        return
    results = [ns.matmul(put(x), w), (w.T @ put(np.ascontiguousarray(x.T))).T]
    x, dense = x.astype(np.float64), w.toarray().astype(np.float64)
    # Sums of 16 are far more accurate than a 16-bit float: one rounding is left.
    bound = finfo(dtype).eps / (2 if dtype.itemsize == 2 else 1 / 20)
    for y in results:
        assert y.dtype == dtype
        error = abs(host(y).astype(np.float64) - x @ dense)
        assert (error <= float(bound) * abs(x @ dense) + 1e-5).all()
    dw = ns.sddmm(put(x.astype(dtype)).T, put((x @ dense).astype(dtype)), w)
    assert (dw.dtype, dw.place) == (dtype, place)


@needs_bfloat16
def test_a_16_bit_float_is_no_other(rng, put):
    x, w = normal(rng, 3, 8), ns.BlockSparse(normal(rng, 1, 8, 8), [[1]])
    for mine, other in (("float16", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float32")):
        with pytest.raises(TypeError, match=f"x and w take one dtype, got {mine} and {other}"):
            ns.matmul(put(x.astype(as_dtype(mine))), put(w.astype(other)))
        with pytest.raises(TypeError, match=f"a and b take one dtype, got {mine} and {other}"):
            ns.sddmm(put(x.T.astype(as_dtype(mine))), put(x.astype(as_dtype(other))), w)


@needs_bfloat16
def test_bits_are_no_bfloat16(put):
    bits = np.ones((1, 8, 8), np.uint16)
    with pytest.raises(TypeError, match=r"data takes .*bfloat16.* got uint16"):
        ns.BlockSparse(put(bits), [[1]])
    with pytest.raises(TypeError, match=r"a and b take .*bfloat16.*, got uint16"):
        ns.sddmm(put(bits[0]), put(bits[0]), [[1]])


needs_cuda = pytest.mark.skipif(not device.is_available(), reason="no GPU and no simulator")


@pytest.mark.slow
@needs_cuda
def test_numpy_operand_meets_a_weight_on_the_gpu(rng):
    w = ns.BlockSparse(normal(rng, 2, 8, 8), [[1, 1]]).to("cuda")
    x = normal(rng, 3, 8)
    y = x @ w
    assert isinstance(y, np.ndarray)
    assert_near(y, x @ w.toarray())
    for out in (np.full((3, 16), np.nan, np.float32), ns.to_device(np.full((3, 16), np.nan, "f4"))):
        assert ns.matmul(x, w, out=out) is out
        assert_near(out, x @ w.toarray())
    for out in (np.full((16, 3), np.nan, np.float32), ns.to_device(np.full((16, 3), np.nan, "f4"))):
        assert ns.matmul(w.T, x.T, out=out) is out
        assert_near(out, (x @ w.toarray()).T)
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
        (
            lambda: ns.matmul(X, X),
            TypeError,
            "one BlockSparse, got x a numpy.ndarray and w a numpy.ndarray",
        ),
        (lambda: ns.matmul(W, W), TypeError, "got two"),
        (lambda: ns.matmul(X.astype(np.float64), W), TypeError, "float64 and float32"),
        (lambda: ns.matmul(X[:, :7], W), ValueError, r"\(\.\.\., 8\).*\(3, 7\)"),
        (lambda: ns.matmul(np.float32(1), W), ValueError, r"\(\.\.\., 8\)"),
        (lambda: ns.matmul(W, np.ones((2, 13, 2), np.float32)), ValueError, "axes"),
        (lambda: ns.matmul(W, X), ValueError, r"\(13, batch\)"),
        (lambda: ns.matmul(X, W, kernel="fast"), ValueError, "'fast'"),
        (lambda: ns.matmul(X, W, kernel="k3_registers"), ValueError, "k3_registers runs on a GPU"),
        (lambda: ns.matmul(X, W, out=np.ones((3, 12), np.float32)), ValueError, "out"),
        (lambda: ns.matmul(X, W, out=np.ones((3, 13))), ValueError, "out.*float64"),
        (
            lambda: ns.matmul(X, W, out=np.ones((13, 3), np.float32).T),
            ValueError,
            r"strides \(4, 12\)",
        ),
        (lambda: ns.matmul(X, W, out=[[0.0] * 13] * 3), ValueError, "out"),
        (lambda: ns.sddmm(X, X, W), ValueError, r"\(3, 8\) and \(3, 8\)"),
        (lambda: ns.sddmm(X.T, X.astype(np.float64), W), TypeError, "float32 and float64"),
        (lambda: ns.sddmm(X.T > 0, X > 0, [[1]]), TypeError, "a and b take float16, .*, got bool"),
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
    w, says = ns.BlockSparse(np.ones((1, 5, 5), np.float32), [[1]]), "block_size takes one.*got 5"
    with pytest.raises(ValueError, match=says):
        X[:, :5] @ w
    with pytest.raises(ValueError, match=says):
        ns.to_device(X[:, :5].copy()) @ w.to("cuda")
    assert (ns.matmul(X[:, :5], w, kernel="k0_reference") == 5).all()
