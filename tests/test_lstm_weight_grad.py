"""The Hopper weight-gradient of block columns that come in fours, as an LSTM's gates do."""

import sys
from itertools import product

import numpy as np
import pytest
from conftest import HALVES

from numbsparse import device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import rung
from numbsparse.kernels.parts.regions import in_fours
from numbsparse.layout import Layout
from numbsparse.ops import index_beside

hopper = rung("k6_hopper")
plan = sys.modules["numbsparse.kernels.matmul.k6_hopper.weight_grad_plan"]

KEPT = {
    "one four": [[1], [1], [0]],
    "an empty four, and the rest": [[0, 1, 0], [0, 1, 1], [0, 0, 1]],
    "more rows than a product takes": [[1]] * 9,
}


CASES = [*product(KEPT, [1], ["float16"]), *product(["an empty four, and the rest"], [2], HALVES)]


@pytest.mark.parametrize(
    ("kept", "pieces", "dtype"), CASES, ids=[f"{k} - {n} - {dtype}" for k, n, dtype in CASES]
)
def test_fours(rng, monkeypatch, kept, pieces, dtype):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    if (reason := hopper.unsupported("weight_grad", 32, as_dtype(dtype), "cuda")) is not None:
        pytest.skip(reason)
    if pieces > 1:
        monkeypatch.setattr(plan, "cut", lambda *_: (0.0, 0, pieces))
    layout = Layout(np.repeat(KEPT[kept], 4, axis=1))
    batch, features = 70, 32 * layout.shape[0] - 16
    x = rng.standard_normal((batch, features)).astype(as_dtype(dtype))
    dy = rng.standard_normal((batch, 32 * layout.shape[1])).astype(as_dtype(dtype))
    dvalues = np.full((layout.n_blocks, 32, 32), np.nan).astype(as_dtype(dtype))
    x_, dy_, out = map(device.to_device, (x, dy, dvalues))
    hopper.weight_grad(x_, dy_, index_beside(layout, x_), out)
    exact = np.zeros((32 * layout.shape[0], dy.shape[1]))
    exact[:features] = x.astype(float).T @ dy.astype(float)
    index = layout.index
    for block, row, column in zip(out.numpy(), index.block_rows, index.block_columns, strict=True):
        expected = exact[32 * row :, 32 * column :][:32, :32]
        bound = finfo(as_dtype(dtype)).eps * (abs(expected) + 1)
        assert (abs(block.astype(float) - expected) <= bound).all()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (np.repeat([[1, 0], [1, 1]], 4, axis=1), True),
        (np.zeros((2, 4), bool), True),
        (np.ones((2, 6), bool), False),
        ([[1, 1, 1, 0], [0, 0, 0, 1]], False),
        ([[1, 1, 1, 1], [0, 0, 0, 1]], False),
        (np.tile([[1, 0], [0, 1]], (1, 4)), False),
    ],
    ids=["fours", "nothing kept", "six columns", "other rows", "more rows", "gate by gate"],
)
def test_what_comes_in_fours(pattern, expected):
    assert in_fours(Layout(pattern).index) == (expected,)
