"""float32's weight-gradient on Hopper: which products an item has, and what comes of them."""

import sys
from itertools import product

import numpy as np
import pytest

import numbsparse as ns
from numbsparse import device, patterns
from numbsparse.kernels.matmul import rung
from numbsparse.kernels.matmul.k6_hopper import split_items
from numbsparse.kernels.matmul.k6_hopper.split_items import TILE, Work, items, way_of, work_of
from numbsparse.layout import Layout
from numbsparse.ops import index_beside

hopper = rung("k6_hopper")
kernel = sys.modules["numbsparse.kernels.matmul.k6_hopper.split_weight_grad"]

PATTERNS = {
    "random": patterns.random(9, 11, 0.3, seed=0),
    "columns of one block": np.eye(5, dtype=bool),
    "one column of an odd number": np.ones((5, 1), bool),
    "an empty column between": np.array([[1, 0, 1], [1, 0, 0], [1, 0, 1]], bool),
    "pairs": np.repeat([[1, 0], [1, 1], [1, 1]], 2, axis=1).astype(bool),
}


@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("B", "N"), [(32, 32), (32, 64), (64, 64), (128, 64)])
@pytest.mark.parametrize("name", PATTERNS)
def test_every_part_of_a_block_is_in_one_product(name, B, N, groups, swapped):
    index = Layout(PATTERNS[name]).index
    work = Work(N, groups, 4, 2, 2, 4, (128, 128))
    tiles, images, columns, extents, targets = items(index, B, work, swapped)
    found = []
    for item, group, slot, part in np.argwhere(targets >= 0):
        row = tiles[item, group, slot]
        column = columns[item, images[item, group, slot // 2]] + part * TILE
        found.append((targets[item, group, slot, part] * TILE, row, column))
    expected = []
    for block, (row, column) in enumerate(zip(index.block_rows, index.block_columns, strict=True)):
        for r, c in product(range(0, B, TILE), repeat=2):
            place = row * B + r, column * B + c
            expected += [(block * B * B + r * B + c, *(place[::-1] if swapped else place))]
    assert sorted(found) == sorted(expected)
    # Each image of an item is the next strip that has a product; the others are none.
    assert (columns[:, 0] >= 0).all()
    assert (images.max((1, 2)) + 1 == (columns >= 0).sum(1)).all()
    assert (extents[:, 0] == (columns >= 0).sum(1)).all()
    assert (extents[:, 2] >= 2).all()
    assert (extents[:, 1] == (tiles >= 0).sum((1, 2)) + extents[:, 0] * (N // TILE)).all()


def test_columns_that_keep_the_same_rows_are_taken_in_pairs():
    assert work_of(Layout(PATTERNS["pairs"]).index, 32).N == 64
    assert work_of(Layout(PATTERNS["random"]).index, 32).N == 32


@pytest.mark.parametrize("shape", [(2, 96), (96, 2), (40, 40)])
def test_a_weight_of_few_rows_changes_places(shape, monkeypatch):
    monkeypatch.setattr(split_items, "SIMULATED", False)
    swapped, *_ = way_of(Layout(np.ones(shape, bool)).index, 32)
    assert swapped == (shape[0] == 2)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.every(3)
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("feature_major", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", ["pairs", "one column of an odd number"])
def test_products(rng, monkeypatch, name, feature_major, pieces, swapped):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    reason = hopper.unsupported("weight_grad", 32, np.dtype("float32"), "cuda")
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr(kernel, "cut", lambda count, *_: (0 if pieces > 1 else count, pieces))
    monkeypatch.setattr(split_items, "FEWER", np.inf if swapped else 0)
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
@pytest.mark.parametrize("lies", ["batch-major", "feature-major", "x feature-major"])
@pytest.mark.parametrize("B", [32, 64, 128])
def test_tiles_are_read_before_others_take_their_place(B, lies, rng):
    if reason := hopper.unsupported("weight_grad", B, np.dtype("float32"), "cuda"):
        pytest.skip(reason)
    layout, batch, features = Layout(patterns.random(1024 // B, 1024 // B, 0.3, seed=0)), 2048, 1024
    x, dy = (rng.standard_normal((batch, features), np.float32) for _ in range(2))
    here, index = [ns.to_device(a) for a in (x, dy)], layout.index
    there = [ns.to_device(np.ascontiguousarray(a.T)).T for a in (x, dy)]
    turned = {"batch-major": (), "x feature-major": (0,), "feature-major": (0, 1)}[lies]
    operands = [there[k] if k in turned else here[k] for k in range(2)]
    exact = (x.T.astype(float) @ dy.astype(float)).reshape(1024 // B, B, 1024 // B, B)
    exact = exact.swapaxes(1, 2)[index.block_rows, index.block_columns]
    bound = 4 * np.finfo(np.float32).eps * batch  # of factors about 1
    for _ in range(10):
        dvalues = ns.to_device(np.full(exact.shape, np.nan, np.float32))
        hopper.weight_grad(*operands, index_beside(layout, dvalues), dvalues)
        assert abs(dvalues.numpy() - exact).max() < bound
