"""forward and input_grad of the Hopper rung where the ladder's cases do not lead: whole pieces of
16 bytes in both directions, blocks over the edge, more tiles than stages, each smaller tile."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import HALVES
from memories_helpers import MEMORIES, check
from ptx_helpers import on_hopper, simulated_only

from numbsparse import Layout, device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels import card
from numbsparse.kernels.matmul import PRODUCTS, n_tiles, rung
from numbsparse.kernels.matmul.k6_hopper import plan, swapped
from numbsparse.kernels.matmul.k6_hopper.plan import SMALLER, TILES, fitted, line_tiles
from numbsparse.kernels.parts.aligned import is_aligned
from numbsparse.kernels.parts.store import order_of
from numbsparse.ops.index import index_beside
from numbsparse.testing import Case, check_rung, races

CASES = [
    (Case(24, 70, 104, 32, 0.7), True),  # x and y feature by feature
    (Case(20, 104, 72, 64, 0.8), False),  # y in whole pieces along the rows
    (Case(72, 40, 120, 128, 1), False),  # two tiles of rows in the simulator, a cluster
    (Case(16, 136, 24, 128, 1), True),
    (Case(130, 64, 32, 32, 1), True),
    (Case(130, 104, 264, 32, 0.5), True),  # in a cluster, two groups of columns
    (Case(130, 200, 200, 64, 0.8), False),  # a cluster over more steps than stages
]


@pytest.fixture(autouse=True)
def not_swapped(monkeypatch):
    """Its other tiles; `test_swapped_lines` has few rows of whole blocks."""
    monkeypatch.setattr(swapped, "MOST_ROWS", 0)


@on_hopper
@pytest.mark.parametrize(
    ("case", "feature_major", "product"),
    [
        (*case, product)
        for n, case in enumerate(CASES)
        for m, product in enumerate(PRODUCTS[:2])
        if not device.SIMULATED or (n + m) % 2  # each case once
    ],
    ids=str,
)
def test_products(case, feature_major, product):
    hopper = rung("k6_hopper")
    check_rung(hopper, product, case, "float16", "cuda", feature_major=feature_major)


@pytest.mark.skipif(not device.is_available(), reason="takes device memory")
def test_which_arrays_take_whole_pieces():
    even = device.to_device(np.zeros((8, 24), np.float16))
    odd = device.to_device(np.zeros((7, 9), np.float16))
    assert [order_of(a) for a in (even, even.T, odd)] == ["rows", "features", "any"]
    assert is_aligned(even)
    assert is_aligned(even[:, :9])
    assert not is_aligned(even.T)
    assert not is_aligned(even[:, 1:])
    assert not is_aligned(odd)
    repeated = device.DeviceArray(even.address, (8, 24), even.dtype, (0, 2), even.owner)
    assert not is_aligned(repeated)


@pytest.mark.parametrize("size", TILES)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("batch", [1, 64, 65, 256, 257, 5000])
def test_tiles_fit(size, itemsize, batch):
    for tile in line_tiles(size, batch, 4096, itemsize):
        assert tile.WARPGROUPS % tile.SHARES == 0
        assert tile.THREADS <= 1024
        assert tile.SHARED_BYTES <= 227 * 1024 - 256
        fits = itemsize == 4 or device.SIMULATED or min(batch, tile.ROWS) > tile.ROWS - 64
        assert fits, "16-bit tiles have fewer rows for a small batch"


def rows_of(batch, B):
    """As many tiles as of blocks of 32: in the simulator larger ones have half the rows."""
    return batch // 2 + 1 if device.SIMULATED and B > 32 else batch


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("feature_major", [False, True])
@pytest.mark.parametrize("product", PRODUCTS[:2])
@pytest.mark.parametrize(  # in the simulator those that differ in rows alone are one
    ("size", "number"), [(32, 1), (32, 2), (64, 1), (64, 2), (128, 1)]
)
def test_products_of_smaller_tiles(size, number, product, feature_major):
    hopper, n = rung("k6_hopper"), size // 8
    of_tile = {name: partial(getattr(hopper, name), tile=number) for name in PRODUCTS[:2]}
    few = device.SIMULATED and size == 128  # blocks, so all of them are kept
    features = 8 * (2 * n + 1 - few * n), 8 * (3 * n - 1 - few * n)
    density = 1 if few else 0.7
    case = Case(rows_of(136, size), *features, size, density)  # tiles of rows, edges of blocks
    alone = SimpleNamespace(**vars(hopper) | of_tile)
    check_rung(alone, product, case, "float16", "cuda", feature_major=feature_major)


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("y_memory", MEMORIES[1:])
@pytest.mark.parametrize("batch", [17, 65, 131])
@pytest.mark.parametrize("B", TILES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("product", PRODUCTS[:2])
def test_features_of_y_that_begin_anywhere(product, dtype, B, batch, y_memory, rng):
    """They end inside a block, and a column has no block."""
    n, batch = 3 if B < 128 else 2, rows_of(batch, B)
    pattern = rng.random((n, n)) < 0.6
    pattern[1, -1], pattern[:, 0] = True, False
    layout, n_in, n_out = Layout(pattern), n * B - 8, n * B - int(rng.integers(1, 20))
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(as_dtype(dtype))
    x = rng.standard_normal((batch, n_in)).astype(values.dtype)
    check(rung("k6_hopper"), product, x, values, layout, n_out, "batch-major", y_memory)


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("y_memory", MEMORIES)
@pytest.mark.parametrize("x_memory", MEMORIES[:2])
@pytest.mark.parametrize("B", TILES)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("product", PRODUCTS[:2])
def test_steps_cut_among_the_blocks_of_a_cluster(
    product, dtype, parts, number, B, x_memory, y_memory, rng, monkeypatch
):
    """Slices of columns, of rows and of a strip; a line without blocks, parts without steps.

    Of large blocks, of which a tile takes the simulator a second, there are fewer tiles; at most
    two of rows.
    """
    batch = int(rng.choice({32: [65, 130], 64: [33, 65], 128: [33, 60]}[B]))
    tile = fitted((TILES[B], *SMALLER[B])[number], batch)._replace(CLUSTER=1, SPLIT=parts)
    monkeypatch.setattr(rung("k6_hopper"), "line_tiles", lambda *_: [tile])
    kept = rng.random((5, 3) if B < 128 else (3, 2)) < 0.6
    kept[:, 0] = True  # four steps of blocks of 64 and of 128
    kept[:, 1] = kept[1] = False
    layout = Layout(kept if product == "forward" else kept.T)
    widths = [B * n - 8 * int(rng.integers(3)) for n in layout.shape]
    n_in, n_out = widths if product == "forward" else widths[::-1]
    x = rng.standard_normal((batch, n_in)).astype(as_dtype(dtype))
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(x.dtype)
    check(rung("k6_hopper"), product, x, values, layout, n_out, x_memory, y_memory)


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("B", TILES)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("zeros", ["some", "most of many", "of one part", "all"])
@pytest.mark.parametrize("product", PRODUCTS[:2])
def test_of_steps_that_are_cut_gates_leave_some(product, zeros, parts, number, B, rng, monkeypatch):
    """Each part ends with its own last step, whatever that has; what is not left is NaN."""
    batch, dtype = 33, np.dtype(np.float16)
    tile = fitted((TILES[B], *SMALLER[B])[number], batch)._replace(CLUSTER=1, SPLIT=parts)
    monkeypatch.setattr(rung("k6_hopper"), "line_tiles", lambda *_: [tile])
    many = 5  # of large blocks each is two steps
    if zeros == "most of many":  # a lane holds a step, of 32 at once
        many = 70 if B < 128 else 35
    columns = 3 if B < 128 else 2
    kept = rng.random((many, columns)) < 0.6
    kept[:, -2] = kept[1] = False
    kept[2] = kept[:, -1] = True
    gone = {"some": 0, "most of many": 0.9, "of one part": np.arange(many) >= 3, "all": 1}[zeros]
    gates = rng.choice(np.float32([0, 0.5, 1, 2]), (many, columns))
    gates[rng.random(many) < gone] = 0
    if product == "input_grad":
        kept, gates = kept.T, gates.T
    layout, gates = Layout(kept), gates[kept]
    rows, columns = np.nonzero(kept)
    values = rng.integers(-4, 5, (layout.n_blocks, B, B)).astype(dtype)
    dense = np.zeros((kept.shape[0], B, kept.shape[1], B))
    dense[rows, :, columns] = values * gates[:, None, None]
    dense = dense.reshape(-1, kept.shape[1] * B)
    dense = dense if product == "forward" else dense.T
    values[gates == 0] = np.nan
    x = rng.integers(-4, 5, (batch, len(dense))).astype(dtype)
    y = device.to_device(np.full((batch, dense.shape[1]), np.nan, dtype))
    x_there, values_there, gates_there = map(device.to_device, (x, values, gates))
    compute = getattr(rung("k6_hopper"), product)
    compute(x_there, values_there, index_beside(layout, y), y, gates=gates_there)
    np.testing.assert_allclose(y.numpy(), x.astype(float) @ dense, rtol=2**-10)


@on_hopper
@pytest.mark.parametrize("gated", [False, True])
def test_a_tile_has_all_steps_where_the_gpu_alone_knows_them(gated, rng, monkeypatch):
    """With gates of many rows, and for a layout made there, whichever tile is named."""
    monkeypatch.setitem(rung("k6_hopper").FEW, 64, 0)
    tiles = line_tiles(64, 70)
    number = next(n for n, tile in enumerate(tiles) if tile.SPLIT > 1)
    kept, dtype = rng.random((5, 2)) < 0.7, np.dtype(np.float16)
    kept[0] = True
    layout = Layout(kept)
    if not gated:
        places = (device.to_device(of.astype(np.int32)) for of in np.nonzero(kept))
        layout = Layout.on_device(*places, kept.shape)
    x = rng.integers(-4, 5, (70, 320)).astype(dtype)
    values = rng.integers(-4, 5, (int(kept.sum()), 64, 64)).astype(dtype)
    gates = rng.integers(0, 3, len(values)).astype(np.float32)
    dense = np.zeros((5, 64, 2, 64))
    rows, columns = np.nonzero(kept)
    dense[rows, :, columns] = values * (gates[:, None, None] if gated else 1)
    y = device.to_device(np.full((70, 128), np.nan, dtype))
    given, there = (device.to_device(a) for a in (x, values))
    more = {"gates": device.to_device(gates)} if gated else {}
    index = index_beside(layout, y)
    rung("k6_hopper").forward(given, there, index, y, tile=number, **more)
    exact = x.astype(float) @ dense.reshape(320, 128)
    np.testing.assert_allclose(y.numpy(), exact, rtol=2**-10)


@pytest.fixture
def on_a_card(monkeypatch):
    """Tiles as an H200 gets them."""
    monkeypatch.setattr(plan, "SIMULATED", False)
    monkeypatch.setattr(plan, "multiprocessors", lambda: 132)


@pytest.mark.parametrize("size", TILES)
def test_tiles_for_no_rows_are_those_for_one(size, on_a_card):
    no_rows, one = (n_tiles("k6_hopper", "forward", size, "float16", n, "highest") for n in (0, 1))
    assert no_rows == one


@pytest.mark.parametrize(
    ("size", "batch", "features", "rows", "columns"),
    [
        (32, 128, 1024, 64, 32),  # 64 tiles; there would be eight with 128 columns and rows
        (32, 512, 2048, 64, 32),
        (32, 1024, 2048, 128, 128),
        (32, 1024, 4096, 128, 128),
        (32, 1024, 8192, 128, 256),
        (64, 256, 4096, 64, 64),
        (64, 384, 4096, 64, 64),
        (64, 256, 8192, 128, 64),
        (64, 2048, 2048, 256, 64),
        (64, 8192, 8192, 256, 128),
        (128, 512, 1024, 64, 128),
        (128, 1024, 2048, 128, 128),
        (128, 257, 5504, 128, 128),  # as with a row less
        (128, 384, 2432, 64, 128),
        (128, 8192, 8192, 256, 128),
    ],
)
def test_tiles_are_smaller_where_there_would_be_few(
    size, batch, features, rows, columns, on_a_card
):
    tile, *others = line_tiles(size, batch, features)
    assert (tile.ROWS, tile.COLUMNS * size) == (rows, columns)
    assert tile not in others
    assert {tile, *others} >= {TILES[size], *SMALLER[size]} or batch < 257


@pytest.mark.parametrize(
    ("size", "batch", "features", "per_strip", "rows", "columns", "parts"),
    [
        (32, 128, 8192, 77, 128, 128, 2),
        (32, 128, 8192, 26, 64, 32, 1),  # few blocks share a tile of x
        (32, 256, 4096, 38, 128, 128, 2),
        (32, 128, 4096, 38, 64, 32, 1),  # 64 parts
        (64, 128, 4096, 19, 128, 64, 2),
        (64, 128, 4096, 6, 64, 64, 1),
        (64, 65, 8192, 77, 128, 64, 1),  # as many whole tiles
        (64, 64, 8192, 77, 64, 64, 1),
        (64, 256, 8192, 77, 128, 64, 1),
        (128, 96, 8192, 6, 128, 128, 2),
        (128, 96, 8192, 2, 64, 128, 1),
        (128, 96, 8192, -1, 64, 128, 1),
        (128, 96, 4096, 3, 64, 128, 2),
        (128, 256, 4096, 3, 128, 128, 2),
        (128, 256, 8192, 19, 128, 128, 1),
        (128, 257, 4096, 19, 128, 128, 1),
    ],
)
def test_steps_are_cut_where_tiles_are_half_as_many_as_multiprocessors(
    size, batch, features, per_strip, rows, columns, parts, on_a_card
):
    tile = line_tiles(size, batch, features, 2, per_strip)[0]
    shape = -(-min(batch, tile.ROWS) // 64) * 64, tile.COLUMNS * size, tile.SPLIT
    assert shape == (min(rows, -(-batch // 64) * 64), columns, parts)


@pytest.mark.parametrize("size", TILES)
def test_there_are_as_many_tiles_for_any_number_of_features(size, on_a_card):
    """By their numbers: a choice is made before the features are known."""
    for batch in (1, 65, 200, 300, 8192):
        sizes = (0, 300, 4096, 10**6)
        all_tiles = [line_tiles(size, batch, n, 2, 40) for n in sizes]
        assert {frozenset(tiles) for tiles in all_tiles} == {frozenset(all_tiles[0])}
        assert all(len(set(tiles)) == len(tiles) for tiles in all_tiles)


def test_small_tiles_share_a_multiprocessor(on_a_card, monkeypatch):
    monkeypatch.setattr(card, "SIMULATED", False)
    monkeypatch.setattr(card, "compute_capability", lambda: (9, 0))
    for size in TILES:
        tiles = TILES[size], SMALLER[size][0], SMALLER[size][-1]
        assert [card.resident(tile.SHARED_BYTES) for tile in tiles] == [1, 1, 2]
    assert card.resident(line_tiles(64, 8192, 8192, itemsize=4)[0].SHARED_BYTES) == 1
    assert card.resident(113 * 1024) == 1  # a block has a KiB more than it says


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("rows", [range(65, 112), range(129, 240), range(257, 352)], ids=str)
@pytest.mark.parametrize("y_memory", MEMORIES)
@pytest.mark.parametrize("x_memory", MEMORIES[:2])
@pytest.mark.parametrize("B", TILES)
@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("product", PRODUCTS[:2])
def test_even_tiles_write_their_own_rows(product, dtype, B, x_memory, y_memory, rows, rng):
    """Batches that fill no tiles of ROWS: the last panel of a tile is not the next one's first."""
    # Which rows a tile has depends on no features: of large blocks there are few.
    pattern = rng.random((2, 3)) < 0.7 if B == 32 else np.ones((1, 128 // B), bool)
    layout, batch = Layout(pattern), rows_of(int(rng.choice(rows)), B)
    widths = [B * n - 8 * int(rng.integers(3)) for n in layout.shape]
    n_in, n_out = widths if product == "forward" else widths[::-1]
    x = rng.standard_normal((batch, n_in)).astype(as_dtype(dtype))
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(x.dtype)
    check(rung("k6_hopper"), product, x, values, layout, n_out, x_memory, y_memory)


@simulated_only
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_two_even_tiles_write_a_row(dtype):
    """66 rows are 48 and 18; a tile has room for more."""
    case = Case(66, in_features=32, out_features=32, block_size=32, density=1)
    assert races(partial(check_rung, rung("k6_hopper"), "forward", case, dtype, "cuda")) == []
