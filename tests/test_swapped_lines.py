"""Few rows with the operands swapped: parts of the batch, edges of y, lines without blocks."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import HALVES
from memories_helpers import check
from ptx_helpers import on_hopper, simulated_only

from numbsparse import Layout
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import k6_hopper
from numbsparse.kernels.matmul.k6_hopper import swapped
from numbsparse.testing import Case, check_rung, races


def in_parts(many, beside=0):
    """The products of a rung that has the batch in so many parts."""

    def along_lines(transposed, x, values, index, y, precision="highest"):
        swapped.along_lines(x, values, index, y, transposed, many, beside)

    products = ((name, partial(along_lines, name != "forward")) for name in swapped.PRODUCTS)
    return SimpleNamespace(unsupported=lambda *case: None, **dict(products))


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("beside", [1, 2])
@pytest.mark.parametrize(("batch", "many"), [(1, 1), (17, 1), (40, 2), (70, 1), (70, 3), (129, 1)])
@pytest.mark.parametrize("B", swapped.BLOCK_SIZES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("product", swapped.PRODUCTS)
def test_products(product, dtype, B, batch, many, beside, rng):
    """More blocks than stages, and than a warp reads at once; y ends inside a strip, or before."""
    kept = rng.random((5 if batch < 100 else 2, 2)) < 0.7
    if batch == 1:
        kept = np.ones((35, 2), bool)
    kept[:, 0], kept[0, 1] = False, True
    layout = Layout(kept if product == "forward" else kept.T)
    x = rng.standard_normal((batch, kept.shape[0] * B)).astype(as_dtype(dtype))
    values = rng.standard_normal((layout.n_blocks, B, B)).astype(x.dtype)
    n_out = 2 * B - int(rng.choice([0, 8, B // 2 + 8]))
    check(in_parts(many, beside), product, x, values, layout, n_out, "batch-major", "batch-major")


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("y_across", [False, True])
@pytest.mark.parametrize("x_across", [False, True])
@pytest.mark.parametrize("B", swapped.BLOCK_SIZES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("product", swapped.PRODUCTS)
def test_whole_blocks_of_rows_are_right_in_each_order(
    product, dtype, B, x_across, y_across, monkeypatch
):
    """So many rows that x.T, too, has whole blocks along a line."""
    monkeypatch.setattr(swapped, "multiprocessors", lambda: 132)
    case = Case(128, in_features=2 * B, out_features=3 * B, block_size=B, density=0.7)
    check_rung(k6_hopper, product, case, dtype, "cuda", feature_major=(x_across, y_across))


@simulated_only
@pytest.mark.parametrize("product", swapped.PRODUCTS)
def test_nothing_races(product):
    case = Case(70, in_features=192, out_features=64, block_size=64, density=1)
    assert races(partial(check_rung, in_parts(2), product, case, "float16", "cuda")) == []


@pytest.mark.parametrize(("batch", "strips", "parts"), [(17, 132, 1), (96, 40, 2), (256, 8, 8)])
def test_a_batch_is_cut_where_strips_are_few(batch, strips, parts):
    """And not where they are many."""
    assert swapped.in_parts(batch, strips, 6, 3 * strips, 132)[1] == parts
    assert swapped.suits(64, 2, batch, 64 * strips, 132)
    assert not swapped.suits(64, 2, batch, 64 * 133, 132)
    assert not swapped.suits(32, 2, batch, 64, 132)
    assert not swapped.suits(64, 4, batch, 64, 132)
    assert not swapped.suits(64, 2, 16, 64, 132)
    assert not swapped.suits(64, 2, 257, 64, 132)
