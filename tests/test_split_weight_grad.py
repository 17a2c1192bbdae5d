"""float32's weight-gradient on Hopper: which products an item has, and what comes of them."""

from itertools import product

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device, patterns
from numbsparse.kernels.matmul import rung
from numbsparse.kernels.matmul.k6_hopper import weight_grad_float32, weight_grad_plan
from numbsparse.kernels.matmul.k6_hopper.weight_grad_float32 import (
    Tile,
    plan,
    single,
    smaller,
    tile_of,
    way_of,
)
from numbsparse.layout import Layout
from numbsparse.ops import index_beside

hopper = rung("k6_hopper")
PANEL = 32

PATTERNS = {
    "random": patterns.random(9, 11, 0.3, seed=0),
    "columns of one block": np.eye(5, dtype=bool),
    "one column of an odd number": np.ones((5, 1), bool),
    "an empty column between": np.array([[1, 0, 1], [1, 0, 0], [1, 0, 1]], bool),
    "pairs": np.repeat([[1, 0], [1, 1], [1, 1]], 2, axis=1).astype(bool),
}


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize(("groups", "units"), [(1, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize(("B", "N"), [(32, 32), (32, 64), (64, 64), (128, 64)])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_part_of_a_block_is_in_one_product(name, B, N, groups, units, swapped):
    layout = Layout(PATTERNS[name])
    index, shape = layout.index, [n * B // PANEL for n in layout.shape[:: -1 if swapped else 1]]
    tile = Tile(B, groups, units, N, 32, 4, 0, 1, ITEM=4, STRIPS=units, SWAPPED=swapped)
    heads, loads, places, outs, *_ = plan(index, tile, 3, 8)  # too few steps to cut
    found = []
    for item, (_, steps, n_loads, arriving, left, strips, stages, _, _) in enumerate(heads):
        assert (steps, arriving, left) == (3, n_loads, 0)
        assert stages >= 2
        slots = {}
        for panel, code in loads[item, :n_loads]:
            operand = code >> 8 & 0xFF
            assert 0 <= panel < -(-shape[operand] // 2) * 2  # zeros beyond the last one
            slots[code & 0xFF] = operand, panel
        # Each image of an item is the next strip that has a product; the others are none.
        strip = (places[item, :, 2::2] - tile.X_PANELS) // (N // PANEL)
        assert strip.max() + 1 == strips
        assert places[item, :, 0].sum() == np.count_nonzero(
            (outs[item] >= 0).reshape(-1, 2 * N // PANEL).any(1)
        )
        assert len(slots) == n_loads
        assert sum(operand for operand, _ in slots.values()) == strips * N // PANEL
        for group, out in np.argwhere(outs[item] >= 0):
            slot, part = divmod(int(out), N // PANEL)
            x, dy = places[item, group, 1 + slot // 2 * 2 :][:2]
            own, of_dy = (x & 0xFFFF) + (x >> 16) * (slot % 2), dy + part
            (x, row), (dy, column) = slots[own], slots[of_dy]
            assert (x, dy) == (0, 1)
            found.append((outs[item, group, out], *((column, row) if swapped else (row, column))))
    n, expected = B // PANEL, []
    for block, (row, column) in enumerate(zip(index.block_rows, index.block_columns, strict=True)):
        for r, c in product(range(n), repeat=2):
            expected += [(block * n * n + r * n + c, row * n + r, column * n + c)]
    assert sorted(found) == sorted(expected)


def test_columns_that_keep_the_same_rows_are_taken_in_pairs():
    assert tile_of(Layout(PATTERNS["pairs"]).index, 32).N == 64
    assert tile_of(Layout(PATTERNS["random"]).index, 32).N == 32


@pytest.mark.parametrize("shape", [(2, 96), (96, 2), (40, 40)])
def test_a_weight_of_few_rows_changes_places(shape, monkeypatch):
    monkeypatch.setattr(weight_grad_float32, "SIMULATED", False)
    (tile,) = way_of(Layout(np.ones(shape, bool)).index, 32)
    assert (shape[0] == 2) == tile.SWAPPED


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.pairs
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("alone", [False, True], ids=["", "single products"])
@pytest.mark.parametrize("feature_major", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ["pairs", "one column of an odd number"])
def test_products(rng, monkeypatch, name, feature_major, alone, pieces, swapped):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    reason = hopper.unsupported("weight_grad", 32, np.dtype("float32"), "cuda")
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(weight_grad_plan, "cut", lambda *_: (0.0, 0, pieces))
    monkeypatch.setattr(weight_grad_float32, "FEWER", np.inf if swapped else 0)
    if alone:
        monkeypatch.setattr(weight_grad_float32, "smaller", lambda index, tile, *_: (single(tile),))
    layout = Layout(PATTERNS[name])
    batch, (rows, columns) = 70, (32 * n - 5 for n in layout.shape)
    x, dy = (rng.standard_normal((batch, n), np.float32) for n in (rows, columns))
    x[3, 7] = np.inf
    lines = [np.ascontiguousarray(a.T) if feature_major else a for a in (x, dy)]
    on_gpu = [device.to_device(a).T if feature_major else device.to_device(a) for a in lines]
    out = device.to_device(np.full((layout.n_blocks, 32, 32), np.nan, np.float32))
    hopper.weight_grad(*on_gpu, index_beside(layout, out), out, "highest")

    exact, size = (np.zeros((32 * layout.shape[0], 32 * layout.shape[1])) for _ in range(2))
    with np.errstate(invalid="ignore"):
        exact[:rows, :columns] = x.T.astype(float) @ dy
    finite = np.where(np.isfinite(x), x, 0)
    size[:rows, :columns] = abs(finite.T.astype(float)) @ abs(dy)
    index = layout.index
    for block, row, column in zip(out.numpy(), index.block_rows, index.block_columns, strict=True):
        expected, bound = (a[32 * row :, 32 * column :][:32, :32] for a in (exact, size))
        right = abs(block - expected) <= 2.0**-22 * np.sqrt(batch) * bound
        assert (right | (np.isinf(expected) & (block == expected))).all()


@pytest.mark.skipif(
    device.SIMULATED or not device.is_available(), reason="takes a GPU, whose copy engine is ahead"
)
@pytest.mark.parametrize("order", ["batch-major", "feature-major", "x feature-major"])
@pytest.mark.parametrize("B", [32, 64, 128])
def test_tiles_are_read_before_others_take_their_place(B, order, rng):
    if reason := hopper.unsupported("weight_grad", B, np.dtype("float32"), "cuda"):
        pytest.skip(reason)
    layout, batch, features = Layout(patterns.random(1024 // B, 1024 // B, 0.3, seed=0)), 2048, 1024
    x, dy = (rng.standard_normal((batch, features), np.float32) for _ in range(2))
    here, index = [ns.to_device(a) for a in (x, dy)], layout.index
    there = [ns.to_device(np.ascontiguousarray(a.T)).T for a in (x, dy)]
    transposed = {"batch-major": (), "x feature-major": (0,), "feature-major": (0, 1)}[order]
    operands = [there[k] if k in transposed else here[k] for k in range(2)]
    exact = (x.T.astype(float) @ dy.astype(float)).reshape(1024 // B, B, 1024 // B, B)
    exact = exact.swapaxes(1, 2)[index.block_rows, index.block_columns]
    bound = 4 * np.finfo(np.float32).eps * batch  # of factors about 1
    for _ in range(10):
        dvalues = ns.to_device(np.full(exact.shape, np.nan, np.float32))
        hopper.weight_grad(*operands, index_beside(layout, dvalues), dvalues)
        assert abs(dvalues.numpy() - exact).max() < bound


@pytest.mark.parametrize(
    ("shape", "steps", "units"),
    [((2, 3), 128, 1), ((2, 3), 8, 1), ((8, 8), 32, 1), ((32, 32), 128, 2)],
)
def test_few_items_are_of_single_products(shape, steps, units, monkeypatch):
    """They end first where they leave no more places free, on 132 multiprocessors."""
    monkeypatch.setattr(weight_grad_float32, "SIMULATED", False)
    index = Layout(np.ones(shape, bool)).index
    (tile,) = smaller(index, tile_of(index, 64), steps, 132)
    assert units == tile.UNITS
    heads, _, places, *_ = plan(index, tile, steps, 132)
    assert places[..., 0].max() == units
    assert units == 2 or len(heads) <= 132 * tile.RESIDENT


def test_items_that_leave_places_free_are_cut():
    """50 items of 16 steps on 132 multiprocessors: halves end first, though they are added."""
    index = Layout(np.ones((8, 25), bool)).index
    tile = Tile(64, 2, 2, 64, 32, 5, 0, 1, ITEM=4, STRIPS=3)
    heads, *_, cut, (pieces, _), sums = plan(index, tile, 16, 132)
    assert (len(heads), cut.size, pieces) == (2 * 50, 4 * index.block_rows.size, 2)
    assert sums == 2 * cut.size
