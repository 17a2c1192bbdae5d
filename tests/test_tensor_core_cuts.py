"""k5's long sums in pieces: that these are the whole sum, once, and what becomes of it."""

from importlib import import_module

import numpy as np
import pytest
from ptx_helpers import needs_ampere

from numbsparse import Layout, device, ops, patterns
from numbsparse.kernels.matmul import LADDER
from numbsparse.kernels.matmul.k5_tensor_core import cuts
from numbsparse.testing import Case, check_rung

lines, blocks = (
    import_module(f"numbsparse.kernels.matmul.k5_tensor_core.{name}")
    for name in ("lines", "weight_grad")
)
K5 = LADDER["k5_tensor_core"]


@pytest.fixture
def cut(monkeypatch):
    """What was cut into how many pieces: as where sums are long, for few steps already."""
    found = []

    def noting(function):
        def noted(*steps):
            found.append(function(*steps))
            return found[-1]

        return noted

    monkeypatch.setattr(cuts, "pieces_of", noting(cuts.pieces_of))
    monkeypatch.setattr(blocks, "pieces_of_equal", noting(blocks.pieces_of_equal))
    monkeypatch.setattr(lines, "ADDED", {2: 1, 4: 1})
    monkeypatch.setattr(cuts, "SHORT", 2)
    return found


@pytest.mark.parametrize("B", [16, 32, 64, 128])
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_pieces_are_all_blocks_of_a_strip_once(product, B, rng):
    for _ in range(20):
        shape, density = rng.integers(1, 60, 2), rng.uniform(0.02, 1)
        index = Layout(patterns.random(*shape, density, seed=int(rng.integers(99)))).index
        walk = index.columns if product == "forward" else index.rows
        strips = cuts.Strips(
            min(B, 64), 128, int(2 ** rng.integers(6)), 32, int(rng.choice([4, 8]))
        )
        features = int(shape[int(product == "forward")]) * B - int(rng.integers(B // 2))
        items, partials, tickets = cuts.plan_strips(index, product, B, features, strips)
        items = cuts.Item(*items.T)
        assert ((items.strip < 0) == (items.many > 1)).all()
        items = items._replace(strip=np.where(items.strip < 0, -1 - items.strip, items.strip))
        together, n_cut = max(32 // B, 1), int((items.many > 1).sum())
        assert (np.diff(items.last - items.first) <= 0).all()
        for strip in range(-(-features // strips.width)):
            own = np.flatnonzero(items.strip == strip)
            own = own[np.argsort(items.first[own])]
            first, last = walk.indptr[strip * strips.width // B :][:2]
            assert items.first[own[0]] == first
            assert items.last[own[-1]] == last
            assert (items.first[own[1:]] == items.last[own[:-1]]).all()
            assert ((items.first[own] - first) % together == 0).all()
            assert (items.many[own] == own.size).all()
            if own.size > 1:
                assert (items.last[own] > items.first[own]).all()
                assert (items.own[own] == items.origin[own] + np.arange(own.size)).all()
        assert np.unique(items.own[items.many > 1]).tolist() == list(range(n_cut))
        assert partials.size == max(n_cut, 1) * strips.tiles * strips.rows * strips.width
        assert tickets.size == max(n_cut, 1) * strips.tiles


@pytest.mark.parametrize("added", [4, 8])
@pytest.mark.parametrize("times", [1, 7, 10000])
def test_a_sum_is_cut_where_places_are_left_for_it(times, added, rng):
    steps = rng.integers(0, 200, 50)
    many = cuts.pieces_of(steps, times, added)
    places = cuts.PER_SM * cuts.multiprocessors()
    fair = steps.sum() * times / places
    assert (many >= 1).all()
    assert (many[steps <= 2 * added] == 1).all()
    assert (many[steps <= fair] == 1).all()
    assert (steps[many > 1] / many[many > 1] >= 1).all()
    assert cuts.pieces_of(np.array([200]), 1, added)[0] > 1
    alone = steps[many == 1]
    assert (alone <= max(fair + 1, added) + added).all()


def test_equal_sums_are_cut_into_no_more_than_the_places():
    places = cuts.PER_SM * cuts.multiprocessors()
    for sums, steps in ((1, 9), (1, 1000), (places // 2, 1000), (places // 2 + 1, 1000)):
        many = cuts.pieces_of_equal(steps, sums)
        assert many * sums <= places or many == 1
        assert (many > 1) == (steps > cuts.SHORT and 2 * sums <= places)


@needs_ampere
@pytest.mark.parametrize(
    ("product", "B", "dtype", "feature_major"),
    [
        ("forward", 16, "float16", False),
        ("forward", 64, "bfloat16", True),
        ("input_grad", 32, "float32", False),
        ("weight_grad", 16, "float16", True),
        ("weight_grad", 64, "float32", False),
    ],
)
def test_sums_in_pieces_are_the_sums(product, B, dtype, feature_major, cut, rng):
    """Of tiles below each other too, and features and rows that end inside one."""
    if product == "weight_grad":
        case = Case(9 * 2048 // min(B, 64) - 3, B - 3, B, B, density=1)
    else:
        sides = (9 * B - 3, B - 5) if product == "forward" else (B - 5, 9 * B - 3)
        case = Case(5 if B > 16 else 66, *sides, B, density=1)
    how = {"feature_major": feature_major, "tile": 1 if B == 16 else None}  # of 64 rows
    check_rung(K5, product, case, dtype, "cuda", rng, **how)
    assert np.max(cut) > 1


@needs_ampere
@pytest.mark.filterwarnings("ignore:.*invalid value encountered")  # in the simulator
def test_pieces_are_added_in_their_order_and_what_is_not_finite_once_more(cut, rng):
    """Calls one after another give the same bits: each leaves its tickets at zero."""
    layout = Layout(np.ones((6, 1), bool))
    x, values = (rng.standard_normal(n).astype("float32") for n in ((4, 192), (6, 32, 32)))
    x[1, 3], x[2, 188], x[3, 5] = np.inf, np.nan, 3e38
    there = device.to_device(x), device.to_device(values)
    found = []
    for _ in range(2):
        y = device.to_device(np.full((4, 32), np.nan, np.float32))
        index = ops.index_beside(layout, y)
        K5.forward(*there, index, y)
        found.append(y.numpy())
    with np.errstate(invalid="ignore", over="ignore"):
        right = x @ values.reshape(192, 32)
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], right, rtol=1e-5, atol=1e-5)
