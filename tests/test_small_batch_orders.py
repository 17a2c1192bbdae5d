"""k8_small_batch reads and writes activations in either order, wherever they begin."""

import numpy as np
import pytest
from conftest import HALVES
from ptx_helpers import needs_ampere

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.device import to_device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import k0_reference
from numbsparse.kernels.matmul import k8_small_batch as rung
from numbsparse.kernels.matmul.k8_small_batch import launch as launches
from numbsparse.kernels.matmul.k8_small_batch import lines
from numbsparse.kernels.parts import aligned, store_lines
from numbsparse.kernels.parts import shares as cutting
from numbsparse.kernels.parts.aligned import is_aligned, transposed_copy
from numbsparse.kernels.parts.store import ANY, FEATURES
from numbsparse.testing import Case, check_rung

ORDERS = ["batch-major", "feature-major"]


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch", [1, 4, 20, 33, 64])
@pytest.mark.parametrize("y_order", ORDERS)
@pytest.mark.parametrize("x_order", ORDERS)
@pytest.mark.parametrize("transposed", [False, True], ids=["w", "w.T"])
def test_either_order_of_x_meets_either_order_of_y(
    transposed, x_order, y_order, batch, dtype, rng, monkeypatch
):
    monkeypatch.setattr(launches, "LONG_LINES", -1)
    if rung.unsupported("forward", 32, as_dtype(dtype), "cuda", batch):
        pytest.skip("takes compute capability 9.0, or the simulator")
    layout = ns.Layout([[1, 0], [1, 1]])
    values = rng.standard_normal((3, 32, 32)).astype(dtype)
    w = ns.BlockSparse(values, layout).to("cuda")
    w = w.T if transposed else w
    x = rng.standard_normal((batch, 64)).astype(dtype)
    rows = to_device(x) if x_order == "batch-major" else to_device(np.ascontiguousarray(x.T)).T
    out = to_device(np.full(x.shape if y_order == "batch-major" else x.T.shape, np.nan, dtype))
    if y_order == "batch-major":
        got = ns.matmul(rows, w, out=out, kernel="k8_small_batch").numpy()
    else:
        got = ns.matmul(w.T, rows.T, out=out, kernel="k8_small_batch").numpy().T
    dense = ns.BlockSparse(values.astype(np.float64), layout).toarray()
    dense = dense.T if transposed else dense
    bound = 66 * np.finfo(np.float32).eps * (abs(x.astype(np.float64)) @ abs(dense))
    right = x.astype(np.float64) @ dense
    assert (abs(got - right) <= bound + float(finfo(dtype).eps) * abs(right)).all()  # NaN is not


# Rows of the batch, halves from feature to feature in memory, those before the first row, and how
# outputs are stored: by twos only where no word is shared with a neighbour.
HALVES_OF_Y = [
    (10, 14, 2, FEATURES),
    (40, 40, 0, FEATURES),
    (10, 13, 0, ANY),
    (10, 14, 1, ANY),
    (9, 14, 0, ANY),
]


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("x_turned", [False, True], ids=["x", "x.T"])
@pytest.mark.parametrize(("batch", "stride", "start", "way"), HALVES_OF_Y)
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_halves_that_lie_feature_by_feature(
    product, batch, stride, start, way, x_turned, dtype, rng, monkeypatch
):
    if not launches.has_engine():
        pytest.skip("takes compute capability 9.0, or the simulator")
    monkeypatch.setattr(cutting, "PIECES", (3,))
    monkeypatch.setattr(lines, "lanes_ask", None)  # by the copy engine, or not at all
    pattern = np.array([[1, 0, 1], [1, 0, 1]], bool)  # a line of outputs is empty
    layout = ns.Layout(pattern if product == "forward" else pattern.T)
    dtype, features = as_dtype(dtype), 90
    x = rng.standard_normal((batch, 64)).astype(dtype)
    values = rng.standard_normal((4, 32, 32)).astype(dtype)
    there = device.to_device(x)
    if x_turned:
        wide = np.full((64, 48), np.nan, dtype)  # rows of 16 bytes, as the copy engine takes them
        wide[:, :batch] = x.T
        there = device.to_device(wide)[:, :batch].T
    memory = device.to_device(np.full((features, stride), np.nan, dtype))
    y = memory[:, start : start + batch].T
    assert store_lines.order_of_lines(y, rung._form(y, "highest"), 32) == way
    getattr(rung, product)(
        there, device.to_device(values), ops.index_beside(layout, memory), y, "highest"
    )
    got = memory.numpy().astype(np.float64).T
    expected, magnitude = np.full((batch, features), np.nan), np.full((batch, features), np.nan)
    exact = [a.astype(np.float64) for a in (x, values)]
    getattr(k0_reference, product)(*exact, layout.index, expected)
    getattr(k0_reference, product)(*map(abs, exact), layout.index, magnitude)
    bound = 66 * np.finfo(np.float32).eps * magnitude + float(finfo(dtype).eps) * abs(expected)
    rows = slice(start, start + batch)
    assert (abs(got[rows] - expected) <= bound).all()
    assert np.isnan(np.delete(got, np.arange(stride)[rows], 0)).all()


@needs_ampere
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 64), (65, 130), (7, 200), (130, 63)])
def test_a_transposed_copy_is_aligned(rows, columns, step, dtype, rng):
    x = rng.standard_normal((rows, columns)).astype(dtype)
    wide = device.to_device(np.repeat(np.pad(x, [(0, 0), (7, 16)]), step, axis=1))
    copied = transposed_copy(wide[:, 7 * step : (7 + columns) * step : step])
    assert is_aligned(copied.T)
    np.testing.assert_array_equal(copied.numpy(), x)


@needs_ampere
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_float32_of_many_small_blocks_is_copied_by_feature(product, monkeypatch):
    copied = []

    def copy(x):
        copied.append(x.shape)
        return transposed_copy(x)

    monkeypatch.setattr(launches, "READ", -(2**40))
    monkeypatch.setattr(launches, "transposed_copy", copy)
    for batch in (16, 20, 40):
        case = Case(batch, in_features=36, out_features=44, block_size=8, density=0.6)
        check_rung(rung, product, case, "float32", "cuda")
    features = 36 if product == "forward" else 44
    assert copied == [(20, features), (40, features)]


@needs_ampere
@pytest.mark.parametrize("product", ["forward", "input_grad", "weight_grad"])
def test_rows_that_begin_anywhere_are_copied_once(product, rng, monkeypatch):
    """By feature at once, and not in their own order before."""
    copied, apart = [], []
    monkeypatch.setattr(launches, "READ", -(2**40))
    monkeypatch.setattr(aligned, "copy_matrices", lambda *copies: apart.extend(copies))
    monkeypatch.setattr(launches, "transposed_copy", lambda x: copied.append(x) or own(x))
    own, layout = transposed_copy, ns.Layout([[1, 0, 1], [1, 1, 0]])
    x, dy = (rng.standard_normal((40, n)).astype("float16") for n in (16, 24))
    values = rng.standard_normal((4, 8, 8)).astype("float16")
    wide = (to_device(np.pad(a, [(0, 0), (1, 2)]))[:, 1:-2] for a in (x, dy))
    there = dict(zip(("x", "dy"), wide, strict=True)) | {"values": to_device(values)}
    names = {"forward": ("x", "values"), "input_grad": ("dy", "values"), "weight_grad": ("x", "dy")}
    like = {"forward": dy, "input_grad": x, "weight_grad": values}[product]
    out, expected = to_device(np.full_like(like, np.nan)), np.full(like.shape, np.nan)
    index = ops.index_beside(layout, out)
    getattr(rung, product)(*(there[name] for name in names[product]), index, out)
    exact = {"x": x, "dy": dy, "values": values}
    operands = (exact[name].astype(np.float64) for name in names[product])
    getattr(k0_reference, product)(*operands, layout.index, expected)
    np.testing.assert_allclose(out.numpy(), expected, rtol=2e-3, atol=2e-2)
    assert len(copied) == (2 if product == "weight_grad" else 1)
    assert not apart
