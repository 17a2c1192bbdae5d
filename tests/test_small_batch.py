"""What the ladder's cases do not reach in k8_small_batch: cut lines, infinities, several tiles."""

import itertools
from functools import partial

import numpy as np
import pytest
from ptx_helpers import needs_ampere

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.device import streams, to_device
from numbsparse.device.capture import Capture
from numbsparse.device.launch import launch
from numbsparse.device.tensor_map import tensor_map
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.card import copy_engine
from numbsparse.kernels.matmul import PRODUCTS, k0_reference
from numbsparse.kernels.matmul import k8_small_batch as rung
from numbsparse.kernels.matmul.k8_small_batch import blocks
from numbsparse.kernels.matmul.k8_small_batch import launch as launches
from numbsparse.kernels.parts import announce, plans
from numbsparse.kernels.parts import shares as cutting
from numbsparse.testing import Case, check_rung, races

CASES = [
    Case(batch=8, in_features=96, out_features=40, block_size=8, density=0.6),
    Case(batch=12, in_features=80, out_features=48, block_size=16, density=0.8),
    Case(batch=16, in_features=128, out_features=64, block_size=32, density=1),
    Case(batch=32, in_features=64, out_features=40, block_size=32, density=1),
    Case(batch=20, in_features=68, out_features=60, block_size=64, density=1),
]
ON_GPU = device.is_available() and not device.SIMULATED


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_cut_lines_and_both_orders_of_activations(product, case, dtype, feature_major, monkeypatch):
    monkeypatch.setattr(cutting, "PIECES", (3,))  # the longest line, whatever it takes
    check_rung(rung, product, case, dtype, "cuda", feature_major=feature_major)


RING_CASES = [
    Case(batch=32, in_features=96, out_features=128, block_size=32, density=0.7),
    Case(batch=49, in_features=96, out_features=90, block_size=32, density=0.6),
    Case(batch=64, in_features=128, out_features=64, block_size=64, density=1),
    Case(batch=8, in_features=96, out_features=128, block_size=32, density=1),
]


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize("case", RING_CASES, ids=str)
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_rings_of_tiles(product, case, feature_major, dtype, monkeypatch):
    if rung.unsupported(product, case.block_size, as_dtype(dtype), "cuda", case.batch):
        pytest.skip("takes compute capability 9.0, or the simulator")
    monkeypatch.setattr(cutting, "PIECES", (3,))
    monkeypatch.setattr(launches, "SHORT", 2**30 if case.density == 1 else 0)
    check_rung(rung, product, case, dtype, "cuda", feature_major=feature_major)


WEIGHT_CASES = [
    Case(batch=24, in_features=96, out_features=160, block_size=32, density=0.7),
    Case(batch=32, in_features=64, out_features=128, block_size=64, density=1),
    Case(batch=49, in_features=96, out_features=128, block_size=32, density=0.7),  # two tiles of x
]


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dy_turned", [False, True], ids=["dy", "dy.T"])
@pytest.mark.parametrize("x_turned", [False, True], ids=["x", "x.T"])
@pytest.mark.parametrize("case", WEIGHT_CASES, ids=str)
def test_rings_of_tiles_for_weight_grad(case, x_turned, dy_turned, dtype, rng, monkeypatch):
    if not launches.has_engine():
        pytest.skip("takes compute capability 9.0, or the simulator")
    layout = case.layout(rng)
    shapes = (case.batch, case.in_features), (case.batch, case.out_features)
    x, dy = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    shape = (layout.n_blocks, case.block_size, case.block_size)
    expected, magnitude = np.full(shape, np.nan), np.full(shape, np.nan)
    exact = [a.astype(np.float64) for a in (x, dy)]
    k0_reference.weight_grad(*exact, layout.index, expected)
    k0_reference.weight_grad(*map(abs, exact), layout.index, magnitude)
    on_device = [
        device.to_device(a.T.copy()).T if transposed else device.to_device(a)
        for a, transposed in ((x, x_turned), (dy, dy_turned))
    ]
    got = device.to_device(np.full(shape, np.nan, dtype))
    monkeypatch.setattr(launches, "FEW", 2**30 if x_turned else 0)  # few warps or many
    monkeypatch.setattr(blocks, "copying_side", None)  # by the copy engine, or not at all
    rung.weight_grad(*on_device, ops.index_beside(layout, got), got)
    bound = (case.batch + 2) * np.finfo(np.float32).eps * magnitude
    bound += np.finfo(dtype).eps * abs(expected)
    assert (abs(got.numpy().astype(np.float64) - expected) <= bound).all()


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("size", "batch", "warps", "split", "cuts"),
    [
        (8, 66, 8, 2, 1),
        (16, 97, 8, 2, 1),
        (32, 225, 8, 4, 1),
        (64, 65, 8, 2, 1),
        (16, 545, 2, 2, 3),
    ],
)
@pytest.mark.parametrize("x_turned", [False, True], ids=["x", "x.T"])
def test_warps_share_the_steps_of_a_unit(
    size, batch, warps, split, cuts, x_turned, dtype, rng, monkeypatch
):
    """Warps of one block of threads, or where it has two, of three blocks."""
    layout = ns.Layout(np.eye(1, 2, dtype=bool))
    x, dy = (rng.standard_normal((batch, n * size)).astype(dtype) for n in layout.shape)
    exact = [a.astype(np.float64) for a in (x, dy)]
    expected, magnitude = np.full((2, 1, size, size), np.nan)
    k0_reference.weight_grad(*exact, layout.index, expected)
    k0_reference.weight_grad(*map(abs, exact), layout.index, magnitude)
    x_given = device.to_device(x.T.copy()).T if x_turned else device.to_device(x)
    found, split_of = [], blocks.split_of
    monkeypatch.setattr(launches, "WARPS", warps)
    monkeypatch.setattr(launches, "n_shares", lambda: 8)
    monkeypatch.setattr(blocks, "split_of", lambda *a: found.append(split_of(*a)) or found[-1])
    got = device.to_device(np.full(expected.shape, np.nan, dtype))
    index = ops.index_beside(layout, got)
    rung.weight_grad(x_given, device.to_device(dy), index, got)
    assert found == [(split, cuts)]
    bound = (batch + 2) * np.finfo(np.float32).eps * magnitude + np.finfo(dtype).eps * abs(expected)
    assert (abs(got.numpy().astype(np.float64) - expected) <= bound).all()


@needs_ampere
def test_a_launch_is_not_taken_for_another_one_at_the_same_place(rng):
    layout = ns.Layout(np.ones((1, 3), bool))
    x = device.to_device(rng.standard_normal((4, 32)).astype(np.float32))
    values = device.to_device(rng.standard_normal((3, 32, 32)).astype(np.float32))
    y = device.to_device(np.full((4, 96), np.nan, np.float32))
    for _ in range(2):
        device.refill(y, np.full((4, 96), np.nan, np.float32))
        for columns in (90, 96):
            rung.forward(x, values, ops.index_beside(layout, x), y[:, :columns])
            assert (np.isfinite(y.numpy()).sum(0) == 4 * (np.arange(96) < columns)).all()


@needs_ampere
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products_that_overlap_wait_for_each_other(dtype, rng):
    n, steps, rounds = (12, 20, 3) if ON_GPU else (1, 2, 2)
    layout = ns.Layout(np.eye(n, dtype=bool)[::-1] | np.eye(n, dtype=bool))
    values = (rng.standard_normal((layout.n_blocks, 32, 32)) / 8).astype(dtype)
    w = ns.BlockSparse(values, layout).to("cuda")
    shape = (16, 32 * n)
    x = [device.to_device(rng.standard_normal(shape).astype(dtype))]
    x += [device.to_device(np.empty(shape, dtype)) for _ in range(steps)]
    for _ in range(rounds):  # from the second one on a product starts while the last one ends
        for y in x[1:]:
            device.refill(y, np.full(shape, np.nan, dtype))
        for given, y in itertools.pairwise(x):
            ns.matmul(given, w, out=y, kernel="k8_small_batch")
        for given, y in itertools.pairwise(x):
            alone = ns.matmul(given.numpy(), w, kernel="k8_small_batch")
            np.testing.assert_array_equal(y.numpy(), alone)


@needs_ampere
def test_what_is_captured_announces_no_maps_and_overlaps(rng, monkeypatch):
    """As it does at once for all replays; its operands may be nobody's before."""
    if not copy_engine():
        pytest.skip("takes a copy engine")
    told, started = [], []

    def note(*args, overlap, **how):
        started.append((overlap, args[3 + 5]))  # after the kernel, its grid and threads
        launch(*args, overlap=overlap, **how)

    monkeypatch.setattr(launches, "launch", note)
    monkeypatch.setattr(announce, "announce", lambda maps: told.append(maps.address))
    w = ns.BlockSparse(rng.standard_normal((4, 32, 32)).astype(np.float16), np.ones((2, 2)))
    w, x = w.to("cuda"), to_device(rng.standard_normal((4, 64)).astype(np.float16))
    capture = Capture()
    with capture.under_way():
        y = ns.matmul(x, w, kernel="k8_small_batch")
        ns.matmul(y, w, kernel="k8_small_batch")
        ns.matmul(x, w, kernel="k8_small_batch", out=y)
    assert started == [(True, 0)] * 3
    assert len(told) == len(set(told)) == 2
    # What another library captures announces them in each replay: its graph may outlive them.
    maps = tensor_map(x, (4, 64))
    assert [plans.unannounced(maps) for _ in range(2)] == [1, 0]
    monkeypatch.setattr(streams.Stream, "is_captured", property(lambda stream: True))
    assert [plans.unannounced(maps) for _ in range(2)] == [1, 1]


@needs_ampere
def test_few_units_are_requested_one_by_one(monkeypatch):
    if not copy_engine():
        pytest.skip("takes a copy engine")
    started = []
    monkeypatch.setattr(launches, "start", lambda kernel, made, *others: started.append(made))
    for n in (1, 500):
        w = ns.BlockSparse(np.zeros((2 * n, 32, 32), np.float32), np.ones((n, 2))).to("cuda")
        ns.matmul(to_device(np.zeros((4, 32 * n), np.float32)), w, kernel="k8_small_batch")
    assert [(lines.source.stages, lines.patient) for lines in started] == [(2, True), (2, False)]


@needs_ampere
def test_a_plan_that_a_captured_step_makes_is_waited_for(rng, monkeypatch):
    """One that the host made is there before."""
    waited, start = [], launches.start
    monkeypatch.setattr(launches, "start", lambda *args: waited.append(args[6]) or start(*args))
    rows, columns = (to_device(np.array(a)) for a in ([0, 1, 1], [0, 0, 1]))
    values = to_device(rng.standard_normal((3, 32, 32), dtype=np.float32))
    x = to_device(rng.standard_normal((4, 64), dtype=np.float32))
    w = ns.BlockSparse(rng.standard_normal((3, 32, 32), dtype=np.float32), [[1, 0], [1, 1]])
    w, capture = w.to("cuda"), Capture()
    with capture.under_way():
        made = ns.Layout.on_device(rows, columns, (2, 2), capacity=3)
        for matrix in (ns.BlockSparse(values, made), w):
            ns.matmul(x, matrix, kernel="k8_small_batch")
    assert waited == [True, False]


@needs_ampere
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of simulated registers
@pytest.mark.parametrize(
    ("product", "size", "engine", "rows"),
    [
        *((product, 32, engine, 5) for product in PRODUCTS for engine in (True, False)),
        *(("forward", 64, True, 5), ("input_grad", 8, False, 5)),
        *(("forward", 32, True, 40), ("input_grad", 16, False, 40)),  # in tiles of 24
    ],
)
def test_infinities_and_nans_come_out_as_in_float32(product, size, engine, rows, rng, monkeypatch):
    monkeypatch.setattr(launches, "LONG_LINES", -1)
    if not engine:
        monkeypatch.setattr(launches, "has_engine", lambda: False)
    layout = ns.Layout(np.ones((-(-96 // size), -(-64 // size)), bool))
    shapes = *((rows, n * size) for n in layout.shape), (layout.n_blocks, size, size)
    # Times one of them the largest number stays one: it may be added to an infinity.
    x, dy, values = (np.clip(rng.standard_normal(s), -1, 1).astype(np.float32) for s in shapes)
    x[0, 3], x[1, 7], x[2, 9], dy[0, 3], dy[3, 40] = np.inf, -np.inf, np.nan, -np.inf, np.nan
    x[4, 11] = dy[4, 5] = np.finfo(np.float32).max  # rounds to an infinity as a tf32
    x[:3, 20], values[1, 20 % size, 4] = 1, np.inf
    values[2 % layout.n_blocks, 4, 20 % size] = -np.inf
    values[0, 5, 5], values[0, 3] = 0, np.round(values[0, 3])
    operands = {"forward": (x, values), "input_grad": (dy, values), "weight_grad": (x, dy)}[product]
    shape = {"forward": dy.shape, "input_grad": x.shape, "weight_grad": values.shape}[product]
    expected = np.full(shape, np.nan)
    with np.errstate(all="ignore"):
        wide = [a.astype(np.float64) for a in operands]
        getattr(k0_reference, product)(*wide, layout.index, expected)
        expected = expected.astype(np.float32)
    got = device.to_device(np.full(shape, np.nan, np.float32))
    on_device = [device.to_device(a) for a in operands]
    getattr(rung, product)(*on_device, ops.index_beside(layout, got), got)
    assert np.isinf(expected).any()
    assert np.isnan(expected).any()
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-4)


@needs_ampere
def test_the_same_bits_every_time(rng, monkeypatch):
    monkeypatch.setattr(cutting, "PIECES", (3,))
    layout = ns.Layout(np.ones((5, 1), bool))  # one line over all shares
    x = device.to_device(rng.standard_normal((8, 160)).astype(np.float32))
    values = device.to_device(rng.standard_normal((5, 32, 32)).astype(np.float32))
    index = ops.index_beside(layout, values)
    results = []
    for _ in range(3 if ON_GPU else 2):
        y = device.to_device(np.full((8, 32), np.nan, np.float32))
        rung.forward(x, values, index, y)
        results.append(y.numpy())
    assert np.isfinite(results[0]).all()
    assert all((y == results[0]).all() for y in results)


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("feature_major", [False, True], ids=["batch-major", "feature-major"])
@pytest.mark.parametrize("many", [0, 2**30], ids=["64 rows or 24", "32 rows"])
@pytest.mark.parametrize("way", ["as it is", "x transposed", "far"])
@pytest.mark.parametrize("in_features", [64, 68])
@pytest.mark.parametrize("batch", [33, 72])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("product", PRODUCTS)
def test_batches_of_several_tiles(
    product, size, batch, in_features, way, many, feature_major, dtype, monkeypatch
):
    """Cut lines have parts in each tile; what lanes copy is in pieces of 16 bytes, or in part."""
    monkeypatch.setattr(cutting, "PIECES", (3,))
    monkeypatch.setattr(launches, "READ", -(2**30) if way == "x transposed" else 2**30)
    monkeypatch.setattr(launches, "NEAR", 0 if way == "far" else 2**31)
    monkeypatch.setattr(launches, "MANY", many)
    monkeypatch.setattr(launches, "LONG_LINES", many - 1)
    case = Case(batch, in_features, out_features=40, block_size=size, density=0.7)
    check_rung(rung, product, case, dtype, "cuda", feature_major=feature_major)


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
def test_tiles_of_as_many_rows_each_write_their_own():
    """33 rows are 17 and 16; a warp has room for 32."""
    case = Case(33, in_features=32, out_features=32, block_size=32, density=1)
    assert races(partial(check_rung, rung, "forward", case, "float16", "cuda")) == []


@needs_ampere
@pytest.mark.parametrize("product", PRODUCTS)
def test_tensor_maps_that_are_not_kept(product, monkeypatch):
    if not launches.has_engine():
        pytest.skip("takes compute capability 9.0, or the simulator")
    monkeypatch.setattr(plans, "MOST_MAPS", 0)
    monkeypatch.setattr(plans, "_maps", {})
    told, launch, start = [], launches.launch, launches.start
    place = {"weight_grad": 9}.get(product, 8)  # of `fresh` among a launch's arguments

    def noted(*args, **options):
        told.append(args[place])
        launch(*args, **options)

    def twice(*args):
        for first in (True, False):
            start(*args[:-1], first)

    monkeypatch.setattr(launches, "launch", noted)
    monkeypatch.setattr(launches, "start", twice)
    check_rung(rung, product, Case(32, 64, 64, 32, 1), "float32", "cuda")
    assert told == [1, 1]
    assert not plans._maps


@needs_ampere
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("batch", "features"), [(10, 64), (16, 32), (20, 32), (32, 64)])
def test_blocks_of_32_without_a_copy_engine(batch, features, dtype, monkeypatch):
    """As on compute capability 8.0: tiles are read whole only where the batch fills them."""
    monkeypatch.setattr(launches, "has_engine", lambda: False)
    case = Case(batch=batch, in_features=features, out_features=32, block_size=32, density=1)
    check_rung(rung, "forward", case, dtype, "cuda")


@needs_ampere
def test_more_empty_lines_than_warps(rng):
    layout = ns.Layout(np.arange(40)[None] == 3)
    values, x = (rng.standard_normal(s).astype(np.float32) for s in ((1, 8, 8), (2, 8)))
    out = to_device(np.full((2, 320), np.nan, np.float32))
    w = ns.BlockSparse(values, layout).to("cuda")
    got = ns.matmul(to_device(x), w, out=out, kernel="k8_small_batch").numpy()
    right = x.astype(np.float64) @ values[0]
    bound = 10 * np.finfo(np.float32).eps * (abs(x) @ abs(values[0]))
    assert (abs(got[:, 24:32] - right) <= bound).all()
    assert not np.delete(got, slice(24, 32), axis=1).any()
