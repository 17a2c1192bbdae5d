"""forward and input_grad of the Hopper rung where the ladder's cases do not lead: whole pieces of
16 bytes in both directions, blocks over the edge, more tiles than stages."""

from functools import partial

import numpy as np
import pytest
from conftest import HALVES
from memories_helpers import MEMORIES, check
from ptx_helpers import on_hopper

from numbsparse import Layout, device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import PRODUCTS, rung
from numbsparse.kernels.matmul.k6_hopper.plan import TILES, line_tiles
from numbsparse.kernels.parts.aligned import is_aligned
from numbsparse.kernels.parts.store import order_of
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
    layout, batch = Layout(rng.random((2, 3)) < 0.7), int(rng.choice(rows))
    widths = [B * n - 8 * int(rng.integers(3)) for n in layout.shape]
    n_in, n_out = widths if product == "forward" else widths[::-1]
    x = rng.standard_normal((batch, n_in)).astype(as_dtype(dtype))
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(x.dtype)
    check(rung("k6_hopper"), product, x, values, layout, n_out, x_memory, y_memory)


@on_hopper
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_two_even_tiles_write_a_row(dtype):
    """66 rows are 48 and 18; a tile has room for more."""
    case = Case(66, in_features=32, out_features=32, block_size=32, density=1)
    assert races(partial(check_rung, rung("k6_hopper"), "forward", case, dtype, "cuda")) == []
