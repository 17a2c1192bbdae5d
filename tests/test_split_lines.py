"""float32 forward and input_grad of the Hopper rung where neighbouring columns share tiles of x."""

import numpy as np
import pytest
from ptx_helpers import on_hopper

from numbsparse import Layout, ops, patterns, to_device
from numbsparse.kernels.matmul import rung
from numbsparse.testing import Case, check_rung

CASES = [
    Case(24, 40, 72, 32, 1),  # three columns: a pair and one alone
    Case(66, 40, 60, 32, 1),  # over all edges
]


@on_hopper
@pytest.mark.pairs
@pytest.mark.parametrize("feature_major", [False, True])
@pytest.mark.parametrize("product", ["forward", "input_grad"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(product, case, feature_major):
    hopper = rung("k6_hopper")
    check_rung(hopper, product, case, "float32", "cuda", feature_major=feature_major)


@on_hopper
@pytest.mark.parametrize("gates", [None, "all one", "some zero"])
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_pairs_of_which_one_keeps_an_input(product, gates, rng):
    """With gates too: of a step of two blocks ptxas 13.0 once made one that nobody wanted."""
    kept = patterns.banded(4, 6, 1)
    kept[2] = kept[:, 2] = False
    kept = kept if product == "forward" else kept.T
    layout = Layout(kept)
    x = rng.standard_normal((40, 128), np.float32)
    values = rng.standard_normal((layout.n_blocks, 32, 32), np.float32)
    numbers = np.ones(layout.n_blocks, np.float32)
    if gates == "some zero":
        numbers = rng.choice(np.float32([0, 1, 0.5]), layout.n_blocks)
    more = {} if gates is None else {"gates": to_device(numbers)}
    dense = np.zeros((*kept.shape, 32, 32))
    scaled = values * numbers[:, None, None]
    dense[layout.index.block_rows, layout.index.block_columns] = scaled
    w = dense.swapaxes(1, 2).reshape(kept.shape[0] * 32, -1)
    y = to_device(np.full((40, 192), np.nan, np.float32))
    index = ops.index_beside(layout, y)
    getattr(rung("k6_hopper"), product)(to_device(x), to_device(values), index, y, **more)
    np.testing.assert_allclose(y.numpy(), x @ (w if product == "forward" else w.T), 1e-4, 1e-4)
