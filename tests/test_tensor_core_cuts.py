"""k5's weight-gradients of long batches in pieces, and what becomes of these."""

from importlib import import_module

import numpy as np
import pytest
from ptx_helpers import needs_ampere

from numbsparse import Layout, device, ops
from numbsparse.kernels.matmul import LADDER
from numbsparse.testing import Case, check_rung

blocks = import_module("numbsparse.kernels.matmul.k5_tensor_core.weight_grad")
K5 = LADDER["k5_tensor_core"]


@pytest.fixture
def cut(monkeypatch):
    """Into how many pieces sums were cut: as where they are long, for few steps already."""
    found, pieces_of = [], blocks.pieces_of_equal
    monkeypatch.setattr(
        blocks, "pieces_of_equal", lambda *steps: found.append(pieces_of(*steps)) or found[-1]
    )
    monkeypatch.setattr(blocks, "SHORT", 2)
    return found


def test_equal_sums_are_cut_into_no_more_than_the_places():
    places = blocks.PER_SM * 132
    for sums, steps in ((1, 9), (1, 1000), (places // 2, 1000), (places // 2 + 1, 1000)):
        many = blocks.pieces_of_equal(steps, sums, 132)
        assert many * sums <= places or many == 1
        assert (many > 1) == (steps > blocks.SHORT and 2 * sums <= places)


@needs_ampere
@pytest.mark.parametrize(
    ("B", "dtype", "feature_major"), [(16, "float16", True), (64, "float32", False)]
)
def test_sums_in_pieces_are_the_sums(B, dtype, feature_major, cut, rng):
    """Of features and rows that end inside a tile too."""
    case = Case(9 * 2048 // min(B, 64) - 3, B - 3, B, B, density=1)
    check_rung(K5, "weight_grad", case, dtype, "cuda", rng, feature_major=feature_major)
    assert np.max(cut) > 1


@needs_ampere
def test_pieces_are_added_in_their_order(cut, rng):
    """Calls one after another give the same bits: each leaves its tickets at zero."""
    layout = Layout(np.ones((1, 1), bool))
    x, dy = (rng.standard_normal((380, 32)).astype("float32") for _ in range(2))
    there, found = (device.to_device(x), device.to_device(dy)), []
    for _ in range(2):
        dw = device.to_device(np.full((1, 32, 32), np.nan, np.float32))
        K5.weight_grad(*there, ops.index_beside(layout, dw), dw)
        found.append(dw.numpy())
    assert min(cut) > 1
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0][0], x.T @ dy, rtol=1e-4, atol=1e-4)
