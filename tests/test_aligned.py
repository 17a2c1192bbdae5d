"""Activations whose lines are no multiples of 16 bytes: copied in the order that they have."""

from __future__ import annotations

import numpy as np
import pytest

from numbsparse import Layout, device, ops
from numbsparse.device import to_device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import PRODUCTS, aligned, rung

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes device memory")
BATCH, IN, OUT = 29, 75, 61
RUNGS = ["k5_tensor_core", "k6_hopper", "k7_small_blocks", "k8_small_batch"]


@pytest.fixture
def copied(monkeypatch):
    """The strides of what is copied."""
    strides, copy = [], aligned.copy

    def remember(to, of):
        strides.append(of.strides)
        copy(to, of)

    monkeypatch.setattr(aligned, "copy", remember)
    return strides


def lying(a, feature_major):
    return to_device(np.ascontiguousarray(a.T)).T if feature_major else to_device(a)


@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize("way", [aligned.aligned_either_way, aligned.aligned_lines])
def test_lines_keep_their_order(rng, way, feature_major, copied):
    a = rng.standard_normal((BATCH, IN)).astype(np.float32)
    lines, *_, turned = way(lying(a, feature_major))
    assert turned is feature_major
    assert lines.address % aligned.BYTES == 0
    if way is aligned.aligned_either_way:
        np.testing.assert_array_equal(lines.numpy(), a.T if turned else a)
        assert lines.strides[0] % aligned.BYTES == 0
    assert [stride[1] for stride in copied] == [4]


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
    shape = layout.shape[0] * B, layout.shape[1] * B
    whole = [np.zeros((BATCH, n)) for n in shape]
    x, dy = (rng.standard_normal((BATCH, n)).astype(dtype) for n in (IN, OUT))
    whole[0][:, :IN], whole[1][:, :OUT] = x, dy
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(dtype)
    i = layout.index
    w = np.zeros((*layout.shape, B, B))
    w[i.block_rows, i.block_columns] = values
    w = w.swapaxes(1, 2).reshape(shape)
    index, there = ops.index_beside(layout, to_device(values)), to_device(values)
    x_there, dy_there = lying(x, feature_major), lying(dy, feature_major)
    if product == "weight_grad":
        out, expected = to_device(np.full_like(values, np.nan)), whole[0].T @ whole[1]
        bound = abs(whole[0]).T @ abs(whole[1])
        rung(name).weight_grad(x_there, dy_there, index, out)
        expected, bound = (
            a.reshape(layout.shape[0], B, -1, B).swapaxes(1, 2)[i.block_rows, i.block_columns]
            for a in (expected, bound)
        )
    else:
        given, n = (x_there, OUT) if product == "forward" else (dy_there, IN)
        factor, w = (whole[0], w) if product == "forward" else (whole[1], w.T)
        expected, bound = ((f(factor) @ f(w))[:, :n] for f in (np.asarray, abs))
        out = lying(np.full((BATCH, n), np.nan, dtype), feature_major)
        getattr(rung(name), product)(given, there, index, out)
    terms = max(BATCH, IN, OUT)
    bound = terms * 2.0**-24 * bound + np.finfo(dtype).eps * abs(expected)
    assert (abs(out.numpy() - expected) <= bound).all()  # NaN is not
    assert all(stride[1] == there.itemsize for stride in copied)
