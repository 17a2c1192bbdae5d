"""The Hopper weight-gradient on what the ladder's small cases leave out."""

import sys
from importlib.util import find_spec

import numpy as np
import pytest

from numbsparse import device
from numbsparse.kernels.matmul import rung
from numbsparse.kernels.parts import pieces as adding
from numbsparse.kernels.parts.plans import Sent
from numbsparse.layout import Layout
from numbsparse.testing import Case, check_rung

hopper = rung("k6_hopper")
weight_grad, plans = (
    sys.modules[f"{hopper.__name__}.{name}"] for name in ("weight_grad", "weight_grad_plan")
)
HALVES = ["float16", "bfloat16"] if find_spec("ml_dtypes") else ["float16"]

pytestmark = pytest.mark.skipif(
    not device.is_available()
    or hopper.unsupported("weight_grad", 32, np.dtype("float16"), "cuda") is not None,
    reason="takes a GPU of compute capability 9.0, or the simulator",
)
CASES = [
    Case(batch=70, in_features=70, out_features=190, block_size=64, density=1),
    Case(batch=65, in_features=130, out_features=100, block_size=128, density=1),
]
not_simulated = pytest.mark.gpu(reason="more than 1000 threads at once")
CUT = [
    Case(batch=140, in_features=60, out_features=64, block_size=32, density=0.7),
    Case(batch=200, in_features=70, out_features=60, block_size=64, density=1),
]


NONE_ARE_FEW = dict.fromkeys((32, 64, 128), 0)  # blocks, for each multiprocessor
few_or_not = pytest.mark.parametrize("few", [True, False], ids=["few", "many"])


@few_or_not
@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_large_blocks(case, feature_major, few, monkeypatch):
    if not few:
        monkeypatch.setattr(plans, "BLOCKS", NONE_ARE_FEW)
    check_rung(hopper, "weight_grad", case, "float16", "cuda", feature_major=feature_major)


@pytest.mark.pairs
@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize("B", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rows", ["few", "many"])
def test_blocks_of_threads_that_stay_and_that_end(rows, dtype, B, feature_major, monkeypatch):
    """Of few rows they go from item to item, of many there is one for each."""
    for module in (weight_grad, plans):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)
    monkeypatch.setattr(plans, "LONG", 0 if rows == "many" else 2048)
    down, across = (4, 3) if B < 128 else (3, 2)  # of which each block of threads has several items
    sizes = {"in_features": down * B - 9, "out_features": across * B + 9}
    case = Case(batch=70, block_size=B, density=0.7, **sizes)
    check_rung(hopper, "weight_grad", case, dtype, "cuda", feature_major=feature_major)


@few_or_not
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", CUT, ids=str)
def test_pieces_of_the_batch_are_added(case, dtype, few, monkeypatch):
    if not few:
        monkeypatch.setattr(plans, "BLOCKS", NONE_ARE_FEW)
    # So little work is not cut by itself.
    monkeypatch.setattr(plans, "cut", lambda *_: (0.0, 0, 2))
    check_rung(hopper, "weight_grad", case, dtype, "cuda")


@pytest.mark.parametrize(("dtype", "B"), [("float16", 32), ("float32", 64)])
@pytest.mark.parametrize(("pieces", "ways"), [(3, 1), (7, 2), (9, 4), (17, 8)])
def test_threads_share_the_pieces_of_a_number(pieces, ways, dtype, B, monkeypatch):
    """Each reads several at once, and the last ones have fewer."""
    blocks, launch = [], adding.launch
    monkeypatch.setattr(plans, "cut", lambda *_: (0.0, 0, pieces))
    monkeypatch.setattr(
        adding, "launch", lambda *of, **how: blocks.append(of[2]) or launch(*of, **how)
    )
    rows = 64 if dtype == "float16" else 32  # of a step
    sizes = {"in_features": B + 8, "out_features": B - 15, "block_size": B}  # two blocks
    case = Case(batch=rows * pieces - 5, density=1, **sizes)
    check_rung(hopper, "weight_grad", case, dtype, "cuda")
    assert blocks == [(adding.THREADS // ways, ways)]


def test_mixed_strides(rng):
    layout = Layout([[1, 1], [0, 1]])
    x, dy = (rng.standard_normal((40, 64)).astype(np.float16) for _ in range(2))
    exact = x.astype(np.float64).T @ dy.astype(np.float64)
    for x_major in (x, x.T.copy().T):
        for dy_major in (dy, dy.T.copy().T):
            operands = [to_device_as_it_lies(a) for a in (x_major, dy_major)]
            out = device.to_device(np.full((3, 32, 32), np.nan, np.float16))
            hopper.weight_grad(*operands, Sent(layout.index), out)
            for block, row, column in zip(
                out.numpy(), layout.index.block_rows, layout.index.block_columns, strict=True
            ):
                expected = exact[32 * row :, 32 * column :][:32, :32]
                np.testing.assert_allclose(block, expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_blocks_that_begin_at_any_item(dtype, rng):
    layout, n = Layout([[1, 1], [0, 1]]), 3 * 32 * 32
    x, dy = (device.to_device(rng.standard_normal((40, 64)).astype(dtype)) for _ in range(2))
    memory, out = (device.to_device(np.full(n + size, np.nan, dtype)) for size in (2, 0))
    for values in (memory[1 : n + 1], out):
        hopper.weight_grad(x, dy, Sent(layout.index), values.reshape(3, 32, 32), "highest")
    assert np.isfinite(out.numpy()).all()
    np.testing.assert_array_equal(memory.numpy()[1:-1], out.numpy())
    assert np.isnan(memory.numpy()[[0, -1]]).all()


def test_few_rows_take_blocks_of_128_without_a_cluster(monkeypatch):
    """Where both operands are batch-major."""
    index = Layout(np.ones((2, 2))).index

    monkeypatch.setattr(plans, "BLOCKS", NONE_ARE_FEW)

    def cluster(batch, *transposed):
        return plans.tile_of(128, transposed, index, batch, False).CLUSTER

    assert [cluster(batch, False, False) for batch in (1, 256, 257)] == [1, 1, 2]
    assert [cluster(65, *transposed) for transposed in ((True, False), (False, True))] == [2, 2]


@pytest.mark.parametrize(("B", "few"), [(32, 16), (64, 8), (128, 2)])
def test_few_blocks_have_small_items_and_many_stages(B, few, monkeypatch):
    """Fewer are few where x and dy are larger than a cache."""
    for module in (weight_grad, plans):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)
    monkeypatch.setattr(plans, "LARGE", 10**6)

    def slots(n, batch):
        index = Layout(np.ones((1, n))).index
        return plans.tile_of(B, (False, True), index, batch, False).SLOTS

    batch = 10**6 // (2 * B * (few + 2))  # of one block more, and another block of x
    large = {32: 2, 64: 4, 128: 2}[B]
    own = plans.OF_FEW_BLOCKS[B].SLOTS
    assert [slots(n, batch) == own for n in (few, few + 1)] == [True, False]
    assert [slots(n, 10**6) == own for n in (large, large + 1)] == [True, False]


@pytest.fixture
def all_many(monkeypatch):
    """Of blocks and rows, though there are few."""
    for name in ("BLOCKS", "LARGE_BLOCKS"):
        monkeypatch.setattr(plans, name, NONE_ARE_FEW)
    monkeypatch.setattr(plans, "JOINED_FROM", 70)
    monkeypatch.setattr(plans, "WORTH_JOINING", 70 * 64)
    for module in (weight_grad, plans):
        monkeypatch.setattr(module, "multiprocessors", lambda: 2)


@pytest.mark.pairs
@pytest.mark.parametrize("kept", ["all", "most"])
@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize(("down", "across"), [(9, 3), (9, 5) if device.SIMULATED else (17, 5)])
@pytest.mark.parametrize("dtype", HALVES)
def test_rectangles(dtype, down, across, feature_major, kept, all_many, monkeypatch):
    """Also those that end outside of the matrix, and of which some blocks are not kept."""
    monkeypatch.setattr(plans, "FILLED", 0)
    monkeypatch.setattr(plans, "WORTH_JOINING", 0)
    sizes = {"in_features": 32 * down - 9, "out_features": 32 * across - 5, "block_size": 32}
    case = Case(batch=100, density=1 if kept == "all" else 0.9, **sizes)
    check_rung(hopper, "weight_grad", case, dtype, "cuda", feature_major=feature_major)
    index = Layout(np.ones((down, across))).index
    assert plans.tile_of(32, (False, feature_major), index, 100, False).JOINED


def test_rectangles_are_of_much_work_and_nearly_full(all_many):
    def joined(kept, batch=70, gated=False):
        return plans.tile_of(32, (False, False), Layout(kept).index, batch, gated).JOINED

    kept = np.kron(np.eye(2), np.ones((8, 4)))  # full ones on the diagonal
    assert joined(kept)
    assert not joined(kept, 69)
    assert not joined(kept, gated=True)
    assert not joined(kept[:15])  # too few blocks
    kept[::2, ::2] = 0
    assert joined(kept, 100)
    kept[1, ::2] = 0
    assert not joined(kept, 100)


@pytest.mark.parametrize("cluster", [1, 2, pytest.param(4, marks=not_simulated)])
def test_clusters_of_any_size(cluster, monkeypatch):
    tile = plans.TILES[128]._replace(CLUSTER=cluster)
    monkeypatch.setitem(plans.TILES, 128, tile)
    monkeypatch.setattr(plans, "FEW", 0)
    monkeypatch.setattr(plans, "BLOCKS", NONE_ARE_FEW)
    sizes = (70, 300, 500) if device.SIMULATED else (3000, 900, 1300)
    case = Case(*sizes, block_size=128, density=0.3)
    check_rung(hopper, "weight_grad", case, "float16", "cuda")


def to_device_as_it_lies(a):
    return device.to_device(a) if a.flags.c_contiguous else device.to_device(a.T).T
