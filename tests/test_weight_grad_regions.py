"""k5_tensor_core's weight-gradient: regions that are cut, small ones, what is beyond the edges."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from ptx_helpers import needs_ampere

from numbsparse import Layout, device, ops
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import LADDER
from numbsparse.kernels.matmul.k5_tensor_core.regions import Region, regions
from numbsparse.testing import Case, check_rung

pytestmark = needs_ampere
K5 = LADDER["k5_tensor_core"]
of_float32 = sys.modules["numbsparse.kernels.matmul.k5_tensor_core.regions"]


@pytest.mark.parametrize("B", [16, 32, 64])
@pytest.mark.parametrize("region", [Region(2, 2, 2, 4, 32, 3, 3), Region(3, 1, 6, 2, 16, 2, 1)])
def test_each_cell_is_in_one_region_with_its_tiles(region, B, rng):
    layout = Layout(rng.random((11, 9)) < 0.4)
    tiles, cells, targets = regions(layout.index, B, region)
    side = min(B, 32)
    parts = B // side
    found = {}
    for item, slot in np.argwhere(cells >= 0):
        x_at, y_at = cells[item, slot] & 0xFFFF, cells[item, slot] >> 16
        i = tiles[item, x_at // 32] + x_at % 32
        j = tiles[item, region.XT + y_at // 32] + y_at % 32
        found[targets[item, slot]] = (i, j)
    rows, columns = layout.index.block_rows, layout.index.block_columns
    expected = {
        ((b * B + r * side) * parts + c): (rows[b] * B + r * side, columns[b] * B + c * side)
        for b in range(len(rows))
        for r in range(parts)
        for c in range(parts)
    }
    assert found == expected
    assert ((targets >= 0) == (cells >= 0)).all()
    filled = (cells >= 0).sum(1)
    assert (np.diff(filled) <= 0).all()


@pytest.mark.parametrize("B", [16, 32])
def test_regions_are_cut_along_the_batch(B, monkeypatch):
    pieces = []
    cut = of_float32.cut

    def seen(*args):
        pieces.append(cut(*args)[1])
        return cut(*args)

    monkeypatch.setattr(of_float32, "cut", seen)
    monkeypatch.setattr(of_float32, "multiprocessors", lambda: 2)
    case = Case(batch=8 * B + 12, in_features=2 * B, out_features=3 * B, block_size=B, density=0.8)
    check_rung(K5, "weight_grad", case, "float32", "cuda")
    assert pieces[0] > 1


@pytest.mark.slow
def test_regions_fit_into_little_shared_memory(monkeypatch):
    monkeypatch.setattr(of_float32, "shared_memory", lambda: 99 * 1024)
    region = of_float32.region_of(16)
    assert region.stage * region.STAGES * 4 <= 98 * 1024
    assert region.capacity >= region.XT * 4  # the cells that may meet in a tile of dy
    case = Case(batch=50, in_features=13 * 16, out_features=11 * 16, block_size=16, density=0.2)
    check_rung(K5, "weight_grad", case, "float32", "cuda")


@pytest.mark.parametrize(
    ("B", "dtype"), [(16, "float16"), (32, "bfloat16"), (64, "bfloat16"), (128, "float16")]
)
def test_16_bit_blocks_over_steps_and_edges(B, dtype):
    """A step more than the four stages, cut off, and features that end inside a block."""
    batch, inputs = 4 * (2048 // min(B, 64)) + 3, B + 19 if B < 128 else B - 13
    case = Case(batch=batch, in_features=inputs, out_features=B - 6, block_size=B, density=1)
    check_rung(K5, "weight_grad", case, dtype, "cuda")


@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:.*invalid value encountered")  # in the simulator
@pytest.mark.parametrize("arithmetic", ["float16", "bfloat16", "highest", "high"])
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
