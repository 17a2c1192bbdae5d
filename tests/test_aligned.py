"""Activations whose lines are no multiples of 16 bytes: copied in the order that they have."""

import numpy as np
import pytest

from numbsparse import Layout, device, ops
from numbsparse.device import DeviceArray, empty, to_device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.elementwise import fill
from numbsparse.kernels.matmul import PRODUCTS, k0_reference, rung
from numbsparse.kernels.parts import aligned

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
