"""Products of many small blocks as those of a dense w: `k9_dense_tiles`."""

from functools import partial
from itertools import product as every

import numpy as np
import pytest

from numbsparse import BlockSparse, device
from numbsparse.device import to_device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import times
from numbsparse.kernels.matmul import PRODUCTS, rung
from numbsparse.kernels.matmul.k9_dense_tiles import plan, tiles
from numbsparse.layout import Layout
from numbsparse.ops import choice, tuned
from numbsparse.ops.index import index_beside
from numbsparse.testing import Case, check_rung, races

pytestmark = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")


RUNG = rung("k9_dense_tiles")


@pytest.mark.pairs
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize(
    "shape", [(1, 1, 128), (2, 1, 128), (1, 2, 128), (1, 4, 128), (1, 1, 64), (1, 2, 64)], ids=str
)
@pytest.mark.parametrize("product", ["forward", "input_grad"])
@pytest.mark.parametrize("feature_major", list(every((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize(("dtype", "B"), [("float16", 8), ("bfloat16", 16), ("float16", 16)])
@pytest.mark.parametrize("sizes", [(67, 77, 75), (72, 136, 136)], ids=["any", "aligned"])
def test_products(sizes, dtype, B, feature_major, product, shape, depth, monkeypatch):
    """Features end within a block, and tiles of w and of rows are not full: 72 rows are two of 36;
    y is stored item by item, or in pieces, in the order of x or in the other one."""
    monkeypatch.setattr(tiles, "shape_of", lambda *sizes: shape)
    monkeypatch.setattr(tiles, "depth_of", lambda warpgroups: depth)
    batch, features, columns = sizes
    case = Case(batch, features, columns, block_size=B, density=0.5)
    check_rung(RUNG, product, case, dtype, "cuda", feature_major=feature_major)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("dtype", "transposed"), [("float16", False), ("bfloat16", True)])
def test_infinities_meet_no_zeros_of_blocks_that_are_not_kept(dtype, transposed, rng, monkeypatch):
    monkeypatch.setattr(tiles, "shape_of", lambda *sizes: (1, 2, 128))
    layout, dtype = Layout(rng.random((12, 12)) < 0.4), as_dtype(dtype)
    w = BlockSparse(rng.choice([-2, -1, 1, 2], (layout.n_blocks, 8, 8)).astype(dtype), layout)
    x = rng.integers(1, 4, (5, 96)).astype(dtype)
    x[1, 3], x[2, 40], x[3, 95], x[4, :9] = np.inf, -np.inf, np.nan, np.inf
    dense = (w.T if transposed else w).toarray().astype(float)
    met = np.where(dense == 0, 0, x[:, :, None].astype(float)) * dense
    y, index = to_device(np.full((5, 96), np.nan, dtype)), index_beside(layout, w.to("cuda").data)
    tiles.in_dense_tiles(to_device(x), to_device(w.data), index, y, transposed)
    np.testing.assert_array_equal(y.numpy().astype(float), met.sum(1))


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize("columns", [64, 128])
def test_tiles_of_w_are_zero_where_no_block_is(columns, monkeypatch):
    """Shared memory is full of NaN before, and no sum is computed again here."""
    monkeypatch.setattr(tiles, "shape_of", lambda *sizes: (1, 1, columns))
    monkeypatch.setattr(tiles, "repairing_lines", lambda *how: lambda *args: None)
    features = tiles.depth_of(1) * (2 * plan.MOST_STAGES + 1)
    case = Case(batch=16, in_features=features, out_features=columns, block_size=16, density=0.5)
    for made in (tiles.tile_kernel, tiles.consumer):
        made.cache_clear()
    try:
        check_rung(RUNG, "forward", case, "float16", "cuda")
    finally:
        for made in (tiles.tile_kernel, tiles.consumer):
            made.cache_clear()


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize("batch", [66, 67], ids=["", "lines that begin anywhere"])
@pytest.mark.parametrize("depth", [64, 128])
def test_no_races(depth, batch, monkeypatch):
    """Of two tiles of 33 rows, and of steps whose records come to a stage in turn; of deep ones,
    of which the simulator takes as long for half the stages, there is one tile."""
    monkeypatch.setattr(tiles, "shape_of", lambda *sizes: (1, 2, 128))
    monkeypatch.setattr(tiles, "depth_of", lambda warpgroups: depth)
    steps = plan.MOST_STAGES + (plan.MOST_STAGES + 1 if depth == 64 else 1)
    rows = batch * 64 // depth
    case = Case(rows, in_features=steps * depth, out_features=40, block_size=16, density=0.5)
    of = {"feature_major": batch == 67}
    assert races(partial(check_rung, RUNG, "forward", case, "float16", "cuda", **of)) == []


def test_tiles_of_no_block_are_left_out():
    pattern = np.zeros((24, 40), bool)
    pattern[3, 1], pattern[20, 0], pattern[9, 33] = True, True, True
    starts, records, most = plan.plan_tiles(Layout(pattern).index, False, 192, 8, 64, 128)
    assert most == 2
    records = records.reshape(3, -1)
    np.testing.assert_array_equal(starts, [0, 2, 2, 3])
    np.testing.assert_array_equal(records[:, -4], [0, 128, 64])
    assert np.count_nonzero(records[:, :-4]) == 3


@pytest.fixture
def expected(monkeypatch):
    """Microseconds by rung, of all products."""
    found = {"k9_dense_tiles": 1.0, "k7_small_blocks": 2.0, "k8_small_batch": 3.0}
    monkeypatch.setattr(times, "expected", lambda *case: found)
    monkeypatch.setattr(tuned, "fastest", lambda case: None)
    choice.forget()
    yield found
    choice.forget()


def test_with_gates_they_are_chosen_where_most_of_a_tile_is_kept(rng, expected):
    clustered = np.kron([[1, 0, 0, 0], [0, 0, 1, 0]], np.ones((16, 16))) > 0
    for pattern, rows, worth, with_gates in (
        (rng.random((32, 64)) < 0.4, 48, True, False),
        (rng.random((32, 64)) < 0.4, 47, False, False),
        (rng.random((32, 64)) < 0.1, 48, False, False),
        (clustered & (rng.random((32, 64)) < 0.6), 48, True, False),
        (clustered & (rng.random((32, 64)) < 0.6), 255, True, False),
        (clustered & (rng.random((32, 64)) < 0.6), 256, True, True),
        (rng.random((32, 64)) < 0.27, 256, True, False),
    ):
        layout = Layout(pattern)
        for product, n in (("forward", 256), ("input_grad", 512)):
            x = to_device(np.zeros((rows, n), np.float16))
            case = product, "auto", 8, x, rows, "highest", layout
            assert times.is_dense(product, 8, x.dtype, rows, layout) == worth
            name = "k9_dense_tiles" if with_gates else "k7_small_blocks"
            assert choice.choose(*case, gated=True) == name
            assert choice.choose(*case) == "k9_dense_tiles"
            assert choice.choose("weight_grad", *case[1:]) == "k7_small_blocks"


def test_a_layout_is_asked_for_itself(monkeypatch, expected):
    """Two of one shape, as many blocks, and lines as long: in few tiles, and in all."""
    together = Layout(np.kron(np.eye(4), np.ones((16, 16))) > 0)
    apart = Layout(np.roll(np.kron(np.ones((16, 16)), np.eye(4)) > 0, 1, axis=1))
    x = to_device(np.zeros((64, 512), np.float16))

    def by_tiles(product, size, dtype, batch, precision, layout, order):
        tiles = times.spread_of(product, size, layout).tiles
        return {"k9_dense_tiles": tiles, "k7_small_blocks": 0.5}

    monkeypatch.setattr(times, "expected", by_tiles)
    chosen = [
        choice.choose("forward", "auto", 8, x, 64, "highest", layout)
        for layout in (together, apart)
    ]
    assert together.longest == apart.longest
    assert chosen == ["k9_dense_tiles", "k7_small_blocks"]


def test_each_product_has_tiles_of_its_own(rng):
    """Of 8 x 16 blocks and of 16 x 8: of the first, every second one is empty."""
    checkered = np.kron(np.indices((4, 4)).sum(0) % 2, np.ones((8, 16))) > 0
    index = Layout(checkered & (rng.random((32, 64)) < 0.4)).index
    suits = [RUNG.suits(product, 8, "float16", 48, index) for product in PRODUCTS]
    assert suits == [True, False, False]


@pytest.mark.parametrize(("side", "rows", "size", "suits"), [
    (64, 768, 16, True), (64, 767, 16, False), (65, 768, 16, False), (64, 191, 8, False),
])  # fmt: skip
def test_small_weights_of_many_rows_suit_it_sooner(side, rows, size, suits):
    """A quarter of all blocks is kept."""
    kept = np.zeros((side, 64), bool)
    kept[np.add.outer(np.arange(side), np.arange(64)) % 4 == 0] = True
    for index in (Layout(kept).index, Layout(kept.T.copy()).index):
        assert RUNG.suits("forward", size, "float16", rows, index) == suits


def test_a_layout_of_no_blocks():
    case = Case(batch=3, in_features=40, out_features=24, block_size=8, density=0)
    for product in ("forward", "input_grad"):
        check_rung(RUNG, product, case, "float16", "cuda")


def test_it_says_what_it_does_not_compute():
    case = 16, as_dtype("float16"), "cuda"
    assert RUNG.unsupported("weight_grad", *case).endswith("computes only forward and input_grad")
    assert "takes float16, bfloat16" in RUNG.unsupported("forward", 8, as_dtype("float32"), "cuda")
    assert not hasattr(RUNG, "weight_grad")
