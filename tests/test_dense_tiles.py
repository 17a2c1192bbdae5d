"""Products of many small blocks as those of a dense w: `k7_small_blocks.dense_tiles`."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from numbsparse import BlockSparse, device
from numbsparse.device import to_device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import k7_small_blocks
from numbsparse.kernels.matmul.k7_small_blocks import dense_tiles
from numbsparse.layout import Layout
from numbsparse.ops.index import index_beside
from numbsparse.testing import Case, check_rung, races

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


def forward(x, values, index, y, precision):
    dense_tiles.in_dense_tiles(x, values, index, y, False)


def input_grad(dy, values, index, dx, precision):
    dense_tiles.in_dense_tiles(dy, values, index, dx, True)


RUNG = SimpleNamespace(forward=forward, input_grad=input_grad)


@pytest.mark.pairs
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (1, 4)], ids=str)
@pytest.mark.parametrize("product", ["forward", "input_grad"])
@pytest.mark.parametrize("feature_major", [False, True], ids=["rows", "features"])
@pytest.mark.parametrize(("dtype", "B"), [("float16", 8), ("bfloat16", 16), ("float16", 16)])
def test_products(dtype, B, feature_major, product, shape, depth, monkeypatch):
    """Features end within a block, and tiles of w and of rows are not full."""
    monkeypatch.setattr(dense_tiles, "shape_of", lambda *sizes: shape)
    monkeypatch.setattr(dense_tiles, "depth_of", lambda warpgroups: depth)
    case = Case(batch=67, in_features=139, out_features=75, block_size=B, density=0.5)
    check_rung(RUNG, product, case, dtype, "cuda", feature_major=feature_major)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("dtype", "transposed"), [("float16", False), ("bfloat16", True)])
def test_infinities_meet_no_zeros_of_blocks_that_are_not_kept(dtype, transposed, rng, monkeypatch):
    monkeypatch.setattr(dense_tiles, "shape_of", lambda *sizes: (1, 2))
    layout, dtype = Layout(rng.random((12, 12)) < 0.4), as_dtype(dtype)
    w = BlockSparse(rng.choice([-2, -1, 1, 2], (layout.n_blocks, 8, 8)).astype(dtype), layout)
    x = rng.integers(1, 4, (5, 96)).astype(dtype)
    x[1, 3], x[2, 40], x[3, 95], x[4, :9] = np.inf, -np.inf, np.nan, np.inf
    dense = (w.T if transposed else w).toarray().astype(float)
    met = np.where(dense == 0, 0, x[:, :, None].astype(float)) * dense
    y, index = to_device(np.full((5, 96), np.nan, dtype)), index_beside(layout, w.to("cuda").data)
    dense_tiles.in_dense_tiles(to_device(x), to_device(w.data), index, y, transposed)
    np.testing.assert_array_equal(y.numpy().astype(float), met.sum(1))


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize("depth", [64, 128])
def test_no_races(depth, monkeypatch):
    """Of two tiles of 33 rows, and of steps whose records come to a stage in turn."""
    monkeypatch.setattr(dense_tiles, "shape_of", lambda *sizes: (1, 2))
    monkeypatch.setattr(dense_tiles, "depth_of", lambda warpgroups: depth)
    steps = 2 * dense_tiles.MOST_STAGES + 1
    case = Case(batch=66, in_features=steps * depth, out_features=40, block_size=16, density=0.5)
    assert races(partial(check_rung, RUNG, "forward", case, "float16", "cuda")) == []


def test_tiles_of_no_block_are_left_out():
    pattern = np.zeros((24, 40), bool)
    pattern[3, 1], pattern[20, 0], pattern[9, 33] = True, True, True
    starts, records = dense_tiles.plan_tiles(Layout(pattern).index, False, 192, 8, 64)
    records = records.reshape(3, -1)
    np.testing.assert_array_equal(starts, [0, 2, 2, 3])
    np.testing.assert_array_equal(records[:, -4], [0, 128, 64])
    assert np.count_nonzero(records[:, :-4]) == 3


def test_they_are_taken_where_most_of_a_tile_is_kept(rng, monkeypatch):
    taken = []
    monkeypatch.setattr(k7_small_blocks, "in_dense_tiles", lambda *of: taken.append("tiles"))
    monkeypatch.setattr(k7_small_blocks, "along_strips", lambda *of: taken.append("strips"))
    clustered = np.kron([[1, 0, 0, 0], [0, 0, 1, 0]], np.ones((16, 16))) > 0
    for pattern, rows, expected in (
        (rng.random((32, 64)) < 0.4, 48, "tiles"),
        (rng.random((32, 64)) < 0.4, 47, "strips"),
        (rng.random((32, 64)) < 0.1, 48, "strips"),
        (clustered & (rng.random((32, 64)) < 0.6), 48, "tiles"),
    ):
        layout = Layout(pattern)
        values = to_device(np.zeros((layout.n_blocks, 8, 8), np.float16))
        x, y = (to_device(np.zeros((rows, n), np.float16)) for n in (256, 512))
        k7_small_blocks.forward(x, values, index_beside(layout, x), y)
        assert taken.pop() == expected
        k7_small_blocks.input_grad(y, values, index_beside(layout, x), x)
        assert taken.pop() == expected
        k7_small_blocks.forward(x, values, index_beside(layout, x), y, gates=values)
        assert taken.pop() == "strips"
