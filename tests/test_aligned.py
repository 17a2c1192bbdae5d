"""Activations whose lines are no multiples of 16 bytes: copied in the order that they have."""

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import Layout, device, ops
from numbsparse.device import DeviceArray, empty, to_device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul import PRODUCTS, k0_reference, rung
from numbsparse.kernels.parts import aligned
from numbsparse.nn import functional as F
from numbsparse.ops import choice

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes device memory")
BATCH, IN, OUT = 29, 75, 61
RUNGS = ["k5_tensor_core", "k6_hopper", "k7_small_blocks", "k8_small_batch"]


@pytest.fixture
def copied(monkeypatch):
    """The strides of what is copied."""
    strides, copy = [], aligned.copy_matrices

    def remember(*copies):
        strides.extend(of.strides for _, of in copies)
        copy(*copies)

    monkeypatch.setattr(aligned, "copy_matrices", remember)
    return strides


def placed(a, feature_major):
    return to_device(np.ascontiguousarray(a.T)).T if feature_major else to_device(a)


@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
def test_lines_keep_their_order(rng, feature_major, copied):
    a = rng.standard_normal((BATCH, IN)).astype(np.float32)
    (lines,), (transposed,) = aligned.aligned_either_way(placed(a, feature_major))
    assert transposed is feature_major
    assert lines.address % aligned.BYTES == 0
    np.testing.assert_array_equal(lines.numpy(), a.T if transposed else a)
    assert lines.strides[0] % aligned.BYTES == 0
    assert [stride[1] for stride in copied] == [4]


@pytest.mark.parametrize("shape", [(1, 7), (3, 1030), (17, 5)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parts_of_rows_make_a_matrix(shape, dtype, rng):
    """From columns of a wider one, and from one that is transposed."""
    rows, width = shape
    a = rng.standard_normal((rows, width + 3)).astype(dtype)
    for x in (to_device(a)[:, 1 : width + 1], to_device(a[:, 1 : width + 1].T.copy()).T):
        np.testing.assert_array_equal(aligned.aligned(x).numpy(), a[:, 1 : width + 1])


@pytest.mark.parametrize("width", [1, 5, 9, 17, 24, 33, 50, 65, 129, 200])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_short_rows_of_copies_lie_within_a_line(dtype, width, rng):
    """Those of 48 bytes, one after another, would not; longer ones begin at a line."""
    a = rng.standard_normal((6, width + 1)).astype(dtype)
    lines = aligned.aligned(to_device(a)[:, 1:])
    np.testing.assert_array_equal(lines.numpy(), a[:, 1:])
    first = lines.address % aligned.LINE + lines.strides[0] * np.arange(6)
    last = first + min(width * lines.itemsize, aligned.LINE) - 1
    np.testing.assert_array_equal(first // aligned.LINE, last // aligned.LINE)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_begin_anywhere(dtype, rng):
    """Drawn: those of a wider matrix that begins anywhere, two at once; nothing else is written."""
    most = (60 if device.SIMULATED else 300, 70, 5, 9)  # rows: several blocks of threads have them
    for _ in range(12):
        made = []
        for _ in range(int(rng.integers(1, 3))):
            rows, width, gap, first = (int(n) for n in rng.integers((1, 1, 0, 0), most))
            whole = to_device(rng.standard_normal(first + rows * (width + gap)).astype(dtype))
            strides = (width + gap) * whole.itemsize, whole.itemsize
            at = whole.address + first * whole.itemsize
            x = DeviceArray(at, (rows, width), whole.dtype, strides, whole.owner)
            padded = empty((rows, width + 8), dtype)
            fill(padded, np.nan)
            made.append((padded, padded[:, :width], x))
        aligned.copy_matrices(*((out, x) for _, out, x in made))
        for padded, out, x in made:
            np.testing.assert_array_equal(out.numpy(), x.numpy())
            assert np.isnan(padded.numpy()[:, x.shape[1] :]).all()


@pytest.mark.every(5)
@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", RUNGS)
def test_products(rng, name, product, dtype, feature_major, copied):
    B = 16 if name == "k7_small_blocks" else 32
    reason = rung(name).unsupported(product, B, as_dtype(dtype), "cuda", BATCH)
    if reason:
        pytest.skip(reason)
    layout = Layout(rng.random((-(-IN // B), -(-OUT // B))) < 0.7)
    x, dy = (rng.standard_normal((BATCH, n)).astype(dtype) for n in (IN, OUT))
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(dtype)
    operands = {"forward": (x, values), "input_grad": (dy, values), "weight_grad": (x, dy)}[product]
    like = {"forward": dy, "input_grad": x, "weight_grad": values}[product]
    exact = [a.astype(np.float64) for a in operands]
    expected, magnitude = np.full(like.shape, np.nan), np.full(like.shape, np.nan)
    getattr(k0_reference, product)(*exact, layout.index, expected)
    getattr(k0_reference, product)(*(abs(a) for a in exact), layout.index, magnitude)
    *there, out = (
        placed(a, feature_major and a.ndim == 2) for a in (*operands, np.full_like(like, np.nan))
    )
    getattr(rung(name), product)(*there, ops.index_beside(layout, out), out)
    terms = max(BATCH, IN, OUT)
    bound = terms * 2.0**-24 * magnitude + np.finfo(dtype).eps * abs(expected)
    assert (abs(out.numpy() - expected) <= bound).all()  # NaN is not
    assert all(stride[1] == like.itemsize for stride in copied)


def products_on_the_tape(w, x, kind, gate):
    """y, and the gradients of w, x and the gates, of products of `kind`."""
    w, x = ns.Tensor(w, requires_grad=True), ns.Tensor(x, requires_grad=True)
    gates = None if gate is None else ns.Tensor(gate, requires_grad=True)
    y = F.matmul(w, x, gate=gates) if kind == "w @ x" else F.matmul(x, w, gate=gates)
    inputs = [w, x] if gate is None else [w, x, gates]
    grads = ns.grad(y, inputs, grad_output=ns.Tensor(y.data))
    return [a.data.toarray() if isinstance(a.data, ns.BlockSparse) else a.data for a in (y, *grads)]


@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize("kind", ["x @ w", "x @ w, feature-major", "w @ x"])
def test_products_on_the_tape_share_a_copy(kind, gated, rng, copied, monkeypatch):
    """One of x, and one of dy, where lines are longer than SHORT; the numbers are the same."""
    layout = Layout([[1, 0, 1], [1, 1, 0]])
    values = rng.standard_normal((4, 32, 32)).astype(np.float32)
    w = ns.BlockSparse(values, layout, shape=(61, 75))
    x = rng.standard_normal((29, 61)).astype(np.float32)
    gate = np.float32([1, 0.5, 2, 0]) if gated else None
    here = w.T if kind == "w @ x" else w
    expected = products_on_the_tape(here, x.T.copy() if kind == "w @ x" else x, kind, gate)
    there = placed(x, kind != "x @ w")
    on_gpu = here.to("cuda"), there.T if kind == "w @ x" else there, kind
    gate = None if gate is None else to_device(gate)
    for short in (8, 1000):
        monkeypatch.setattr(choice, "SHORT", {4: short})
        copied.clear()
        got = products_on_the_tape(*on_gpu, gate)
        for a, b in zip(got, expected, strict=True):
            a = a.numpy() if isinstance(a, DeviceArray) else a
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
        assert len(copied) == 2 if short == 8 else len(copied) >= 2


def test_what_is_read_once_is_not_copied_on_the_tape(rng, monkeypatch):
    monkeypatch.setattr(choice, "SHORT", {4: 8})
    made, own = [], ops.aligned
    monkeypatch.setattr(ops, "aligned", lambda x: made.append(x.shape) or own(x))
    w = ns.BlockSparse(rng.standard_normal((1, 32, 32)).astype(np.float32), [[1]]).to("cuda")
    x = to_device(rng.standard_normal((32, 29)).astype(np.float32))
    for trained, wanted, shapes in ((False, True, []), (True, False, [(32, 29)])):
        made.clear()
        y = F.matmul(ns.Tensor(w, requires_grad=trained), ns.Tensor(x, requires_grad=wanted))
        F.sum(y).backward()
        assert made == shapes
    with ns.no_grad():
        made.clear()
        F.matmul(ns.Tensor(w, requires_grad=True), ns.Tensor(x, requires_grad=True))
        assert not made


def test_another_dtype_is_refused_on_the_tape_too():
    w = ns.BlockSparse(np.ones((1, 32, 32), np.float32), [[1]]).to("cuda")
    x = to_device(np.ones((32, 70), np.int64))
    with pytest.raises(TypeError, match="x and w take one dtype"):
        F.matmul(ns.Tensor(w, requires_grad=True), ns.Tensor(x))


def test_rows_to_choose_by():
    """Those of a feature-major x that no kernel copies are counted as if they were even."""
    whole = to_device(np.zeros((5, 80), np.float16))
    assert [choice.rows_of(whole[:, :n].T) for n in (72, 73, 79, 80)] == [72, 80, 80, 80]
    assert choice.rows_of(whole[:, 1:74].T) == 73
    assert choice.rows_of(to_device(np.zeros((5, 73), np.float16)).T) == 73
    assert choice.rows_of(whole[:, :73]) == 5
    assert choice.rows_of(np.zeros((73, 5))) == 73
