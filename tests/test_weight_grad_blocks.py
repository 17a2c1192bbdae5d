"""k5_tensor_core's weight-gradient: steps that wrap its ring, and what is beyond the edges."""

from importlib import import_module

import numpy as np
import pytest
from ptx_helpers import needs_ampere

from numbsparse import Layout, device, ops
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import LADDER
from numbsparse.testing import Case, check_rung

pytestmark = needs_ampere
K5 = LADDER["k5_tensor_core"]
kernels = import_module("numbsparse.kernels.matmul.k5_tensor_core.weight_grad")


@pytest.fixture
def stages(monkeypatch):
    """How many the ring has: in the simulator few, so that it is soon full."""
    if device.SIMULATED:
        monkeypatch.setattr(kernels, "STAGES", 2)
        kernels.block_kernel.cache_clear()
    yield kernels.STAGES
    kernels.block_kernel.cache_clear()


@pytest.mark.parametrize(
    ("B", "dtype"),
    [
        (16, "float32"),
        (32, "bfloat16"),
        (64, "float32"),
        (128, "float16"),
    ],
)
def test_blocks_over_steps_and_edges(B, dtype, stages):
    """A step more than the stages, cut off, and features that end inside a block."""
    batch, inputs = stages * (2048 // min(B, 64)) + 3, B + 19 if B < 64 else B - 13
    case = Case(batch=batch, in_features=inputs, out_features=B - 6, block_size=B, density=1)
    check_rung(K5, "weight_grad", case, dtype, "cuda")


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:.*invalid value encountered")  # in the simulator
@pytest.mark.parametrize("arithmetic", ["float16", "highest", "high"])
@pytest.mark.parametrize("B", [16, 32, 64])
@pytest.mark.parametrize("out_features", [0, 1, 5, 8], ids="{} inside".format)
def test_zero_beyond_the_edges_whatever_is_beside_them(out_features, B, arithmetic, rng):
    """Infinity times what is read beyond the edge, which is 0, would be NaN."""
    dtype = as_dtype("float32" if arithmetic in ("highest", "high") else arithmetic)
    i, j = B + 3, B + out_features
    x, dy = (np.ones((9, n), np.float32) for n in (i, j))
    x[4, 5], dy[2, :2] = np.inf, -np.inf
    layout = Layout(np.ones((2, -(-j // B)), bool))
    out = device.to_device(np.full((layout.n_blocks, B, B), np.nan, np.float32).astype(dtype))
    operands = (device.to_device(a.astype(dtype)) for a in (x, dy))
    how = arithmetic if dtype == "float32" else "highest"
    K5.weight_grad(*operands, ops.index_beside(layout, out), out, how)
    expected = np.zeros((2 * B, layout.shape[1] * B), np.float32)
    with np.errstate(invalid="ignore"):
        expected[:i, :j] = np.where(np.isinf(x).any(0)[:, None] | np.isinf(dy).any(0), 0, x.T @ dy)
    got = out.numpy().astype(np.float32)
    for b, (row, column) in enumerate(np.argwhere(np.ones(layout.shape))):
        rows, columns = slice(row * B, row * B + B), slice(column * B, column * B + B)
        outside = np.ones((B, B), bool)
        outside[: max(i - row * B, 0), : max(j - column * B, 0)] = False
        assert (got[b][outside] == 0).all()
        finite = ~outside & np.isfinite(expected[rows, columns]) & (expected[rows, columns] != 0)
        np.testing.assert_array_equal(got[b][finite], expected[rows, columns][finite])
