"""What the ladder's cases do not reach in k8_small_batch: cut lines, infinities, orders of x."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from conftest import HALVES

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.device import to_device
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.matmul import PRODUCTS, k0_reference
from numbsparse.kernels.matmul import k8_small_batch as rung
from numbsparse.kernels.matmul.k8_small_batch import blocks, lines
from numbsparse.kernels.matmul.k8_small_batch import launch as launches
from numbsparse.kernels.matmul.k8_small_batch.blocks import plan_blocks
from numbsparse.kernels.matmul.k8_small_batch.outputs import Sums
from numbsparse.kernels.matmul.k8_small_batch.plan import READ_AHEAD, Lines, plan_lines
from numbsparse.kernels.parts import calls
from numbsparse.kernels.parts import shares as cutting
from numbsparse.kernels.parts.aligned import is_aligned
from numbsparse.kernels.parts.ring import Source
from numbsparse.kernels.parts.store import ANY, FEATURES
from numbsparse.kernels.parts.tiles import Form, Operand
from numbsparse.kernels.parts.transpose import transposed_copy
from numbsparse.testing import Case, check_rung, races

needs_ampere = pytest.mark.skipif(
    not device.is_available() or not (device.SIMULATED or device.compute_capability() >= (8, 0)),
    reason="takes a GPU of compute capability 8.0, or the simulator",
)


def units_of(plan, sections, together):
    """(units as rows of numbers, cuts) of a plan for lines."""
    begin = Lines(*sections)
    units = plan[: begin.counts].reshape(-1, 2 * together + 2)
    return units[:-READ_AHEAD], plan[begin.cuts : begin.empty].reshape(-1, 3)


def squares_at(places, size):
    """The numbers of the squares that begin at values 32 * place, counted row by row of a block."""
    block, at = np.divmod(32 * places.astype(np.int64), size * size)
    row, column = np.divmod(at, size)
    np.testing.assert_array_equal([row % 32, column % 32], 0)
    cut = max(size // 32, 1)
    return (block * cut + row // 32) * cut + column // 32


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
def test_a_plan_holds_every_block_once_in_equal_shares(size, transposed, rng):
    pattern = rng.random((40, 30)) < 0.2
    pattern[:, 3] = True  # a line longer than a share
    pattern[5, :] = True
    pattern[:, 7] = pattern[9, :] = False
    index = ns.Layout(pattern).index
    plan, each, sections, empty, _, tickets = plan_lines(index, transposed, size, 13, 2, 100)
    together, cut = max(32 // size, 1), max(size // 32, 1)
    units, cuts = units_of(plan, sections, together)
    assert len(units) == 13 * 2 * each
    shares = (units[:, -1].reshape(13, 2 * each) > 0).sum(1)
    counts = plan[Lines(*sections).counts : Lines(*sections).cuts].reshape(13, 2)
    np.testing.assert_array_equal(abs(counts).sum(1), shares)
    assert np.isin(abs(counts[:, 0]) - abs(counts[:, 1]), (0, 1)).all()
    firsts, lasts = (
        units.reshape(13, 2, each, -1)[:, 1, 0, -1],
        units.reshape(13, 2, each, -1)[np.arange(13), 0, abs(counts[:, 0]) - 1, -1],
    )
    np.testing.assert_array_equal(counts[:, 1] < 0, (counts[:, 1] != 0) & (firsts == lasts))
    units = units[units[:, -1] > 0]
    places = units[:, 0 : 2 * together : 2]
    squares = np.sort(squares_at(places[places >= 0], size))
    np.testing.assert_array_equal(squares, np.arange(pattern.sum() * cut * cut))
    assert shares.max() <= shares.mean() + cutting.TOGETHER  # cutting is not free
    assert empty == cut
    assert tickets.size == max(len(cuts), 1)
    names = units[:, -2]
    lines = names.copy()
    lines[names < 0] = cuts[-1 - names[names < 0], 0]
    mine = index.block_rows if transposed else index.block_columns
    for unit, line in zip(units, lines, strict=True):
        for place in unit[0 : 2 * together : 2]:
            if place >= 0:
                assert mine[32 * place // size**2] == line // cut


def test_a_plan_for_weight_grad_holds_every_square_once(rng):
    index = ns.Layout(rng.random((9, 7)) < 0.4).index
    for size, together, cut in ((8, 4, 1), (32, 1, 1), (64, 1, 2)):
        units, count = plan_blocks(index, size)
        units = units.reshape(-1, 2 * together + 2)[:count]
        places = units[:, 0 : 2 * together : 2]
        expected = np.arange(index.block_rows.size * cut * cut)
        squares = np.sort(squares_at(places[places >= 0], size))
        np.testing.assert_array_equal(squares, expected)
        assert (np.diff(units[:, -2]) >= 0).all()  # x stays as long as it can


CASES = [
    Case(batch=8, in_features=96, out_features=40, block_size=8, density=0.6),
    Case(batch=12, in_features=80, out_features=48, block_size=16, density=0.8),
    Case(batch=16, in_features=128, out_features=64, block_size=32, density=1),
    Case(batch=32, in_features=64, out_features=40, block_size=32, density=1),
    Case(batch=20, in_features=68, out_features=60, block_size=64, density=1),
]


ON_GPU = device.is_available() and not device.SIMULATED
ORDERS = {"batch-major": False, "feature-major": True}


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("feature_major", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_cut_lines_and_both_orders_of_activations(product, case, dtype, feature_major, monkeypatch):
    monkeypatch.setattr(cutting, "TOGETHER", -1)  # cut every line that ends in another share
    check_rung(rung, product, case, dtype, "cuda", feature_major=feature_major)


RING_CASES = [
    Case(batch=32, in_features=96, out_features=160, block_size=32, density=0.7),
    Case(batch=49, in_features=128, out_features=90, block_size=32, density=0.6),
    Case(batch=64, in_features=128, out_features=64, block_size=64, density=1),
    Case(batch=8, in_features=128, out_features=160, block_size=32, density=1),
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
    monkeypatch.setattr(cutting, "TOGETHER", -1)
    monkeypatch.setattr(launches, "FEW", 2**30 if feature_major else 0)  # one stage or more
    monkeypatch.setattr(launches, "SHORT", 2**30 if case.density == 1 else 0)
    check_rung(rung, product, case, dtype, "cuda", feature_major=feature_major)


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("batch", [1, 4, 20, 33, 64])
@pytest.mark.parametrize("y_order", ORDERS)
@pytest.mark.parametrize("x_order", ORDERS)
@pytest.mark.parametrize("transposed", [False, True], ids=["w", "w.T"])
def test_either_order_of_x_meets_either_order_of_y(transposed, x_order, y_order, batch, dtype, rng):
    if rung.unsupported("forward", 32, as_dtype(dtype), "cuda", batch):
        pytest.skip("takes compute capability 9.0, or the simulator")
    layout = ns.Layout([[1, 0], [1, 1]])
    values = rng.standard_normal((3, 32, 32)).astype(dtype)
    w = ns.BlockSparse(values, layout).to("cuda")
    w = w.T if transposed else w
    x = rng.standard_normal((batch, 64)).astype(dtype)
    rows = to_device(x) if x_order == "batch-major" else to_device(np.ascontiguousarray(x.T)).T
    out = to_device(np.full(x.shape if y_order == "batch-major" else x.T.shape, np.nan, dtype))
    if y_order == "batch-major":
        got = ns.matmul(rows, w, out=out, kernel="k8_small_batch").numpy()
    else:
        got = ns.matmul(w.T, rows.T, out=out, kernel="k8_small_batch").numpy().T
    dense = ns.BlockSparse(values.astype(np.float64), layout).toarray()
    dense = dense.T if transposed else dense
    bound = 66 * np.finfo(np.float32).eps * (abs(x.astype(np.float64)) @ abs(dense))
    right = x.astype(np.float64) @ dense
    assert (abs(got - right) <= bound + float(finfo(dtype).eps) * abs(right)).all()  # NaN is not


# Rows of the batch, halves from feature to feature in memory, those before the first row, and how
# outputs are stored: by twos only where no word is shared with a neighbour.
HALVES_OF_Y = [
    (10, 14, 2, FEATURES),
    (40, 40, 0, FEATURES),
    (10, 13, 0, ANY),
    (10, 14, 1, ANY),
    (9, 14, 0, ANY),
]


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("x_turned", [False, True], ids=["x", "x.T"])
@pytest.mark.parametrize(("batch", "stride", "start", "way"), HALVES_OF_Y)
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_halves_that_lie_feature_by_feature(
    product, batch, stride, start, way, x_turned, dtype, rng, monkeypatch
):
    if not launches.has_engine():
        pytest.skip("takes compute capability 9.0, or the simulator")
    monkeypatch.setattr(cutting, "TOGETHER", -1)
    monkeypatch.setattr(lines, "lanes_ask", None)  # by the copy engine, or not at all
    pattern = np.array([[1, 0, 1], [1, 0, 1]], bool)  # a line of outputs is empty
    layout = ns.Layout(pattern if product == "forward" else pattern.T)
    dtype, features = as_dtype(dtype), 90
    x = rng.standard_normal((batch, 64)).astype(dtype)
    values = rng.standard_normal((4, 32, 32)).astype(dtype)
    there = device.to_device(x)
    if x_turned:
        wide = np.full((64, 48), np.nan, dtype)  # rows of 16 bytes, as the copy engine takes them
        wide[:, :batch] = x.T
        there = device.to_device(wide)[:, :batch].T
    memory = device.to_device(np.full((features, stride), np.nan, dtype))
    y = memory[:, start : start + batch].T
    assert launches.stored(y, rung._form(y, "highest"), 32) == way
    getattr(rung, product)(
        there, device.to_device(values), ops.index_beside(layout, memory), y, "highest"
    )
    got = memory.numpy().astype(np.float64).T
    expected, magnitude = np.full((batch, features), np.nan), np.full((batch, features), np.nan)
    exact = [a.astype(np.float64) for a in (x, values)]
    getattr(k0_reference, product)(*exact, layout.index, expected)
    getattr(k0_reference, product)(*map(abs, exact), layout.index, magnitude)
    bound = 66 * np.finfo(np.float32).eps * magnitude + float(finfo(dtype).eps) * abs(expected)
    rows = slice(start, start + batch)
    assert (abs(got[rows] - expected) <= bound).all()
    assert np.isnan(np.delete(got, np.arange(stride)[rows], 0)).all()


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
    monkeypatch.setattr(blocks, "copying", None)  # by the copy engine, or not at all
    rung.weight_grad(*on_device, ops.index_beside(layout, got), got)
    bound = (case.batch + 2) * np.finfo(np.float32).eps * magnitude
    bound += np.finfo(dtype).eps * abs(expected)
    assert (abs(got.numpy().astype(np.float64) - expected) <= bound).all()


@needs_ampere
@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("size", "batch"), [(8, 66), (16, 97), (32, 225), (64, 65)])
@pytest.mark.parametrize("x_turned", [False, True], ids=["x", "x.T"])
def test_warps_share_the_steps_of_a_unit(size, batch, x_turned, dtype, rng, monkeypatch):
    layout = ns.Layout(np.eye(1, 2, dtype=bool))
    x, dy = (rng.standard_normal((batch, n * size)).astype(dtype) for n in layout.shape)
    exact = [a.astype(np.float64) for a in (x, dy)]
    expected, magnitude = np.full((2, 1, size, size), np.nan)
    k0_reference.weight_grad(*exact, layout.index, expected)
    k0_reference.weight_grad(*map(abs, exact), layout.index, magnitude)
    x_given = device.to_device(x.T.copy()).T if x_turned else device.to_device(x)
    found, split = [], blocks.split_of
    monkeypatch.setattr(launches, "WARPS", 8)  # four for each unit, in the simulator too
    monkeypatch.setattr(blocks, "split_of", lambda *a: found.append(split(*a)) or found[-1])
    got = device.to_device(np.full(expected.shape, np.nan, dtype))
    index = ops.index_beside(layout, got)
    rung.weight_grad(x_given, device.to_device(dy), index, got)
    assert found == [4 if batch == 225 else 2]
    bound = (batch + 2) * np.finfo(np.float32).eps * magnitude + np.finfo(dtype).eps * abs(expected)
    assert (abs(got.numpy().astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("warps", [8, 24, 1056])
def test_no_more_warps_than_steps_and_places(warps):
    for units, steps in itertools.product((1, 3, 5, 66, 1000, 2000), (1, 2, 3, 7, 12, 256)):
        split = blocks.split_of(steps, units, warps)
        assert split in (1, 2, 4, 8)
        assert split == 1 or (split * units <= warps and split <= (steps + 1) // 2)
        more = 2 * split
        assert more > launches.WARPS or more * units > warps or more > (steps + 1) // 2


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
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of simulated registers
@pytest.mark.parametrize("engine", [True, False], ids=["copy engine", "lanes"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_infinities_and_nans_come_out_as_in_float32(product, engine, rng, monkeypatch):
    if not engine:
        monkeypatch.setattr(launches, "has_engine", lambda: False)
    layout = ns.Layout(np.ones((3, 2), bool))
    x, dy = (rng.standard_normal((5, n)).astype(np.float32) for n in (96, 64))
    values = rng.standard_normal((6, 32, 32)).astype(np.float32)
    x[0, 3], x[1, 7], x[2, 9], dy[0, 3], dy[3, 40] = np.inf, -np.inf, np.nan, -np.inf, np.nan
    x[4, 11] = dy[4, 5] = np.finfo(np.float32).max  # rounds to an infinity as a tf32
    x[:3, 20], values[1, 20, 4], values[2, 4, 20] = 1, np.inf, -np.inf
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
    monkeypatch.setattr(cutting, "TOGETHER", -1)
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
@pytest.mark.parametrize("many", [0, 2**30], ids=["64 rows", "32 rows"])
@pytest.mark.parametrize("way", ["as it is", "x transposed", "far"])
@pytest.mark.parametrize("in_features", [64, 68])
@pytest.mark.parametrize("batch", [33, 72])
@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("product", PRODUCTS)
def test_batches_of_several_tiles(
    product, size, batch, in_features, way, many, feature_major, dtype, monkeypatch
):
    """Cut lines have parts in each tile; what lanes copy is in pieces of 16 bytes, or in part."""
    monkeypatch.setattr(cutting, "TOGETHER", -1)
    monkeypatch.setattr(launches, "LINES", -(2**30) if way == "x transposed" else 2**30)
    monkeypatch.setattr(launches, "NEAR", 0 if way == "far" else 2**31)
    monkeypatch.setattr(launches, "MANY", many)
    case = Case(batch, in_features, out_features=40, block_size=size, density=0.7)
    check_rung(rung, product, case, dtype, "cuda", feature_major=feature_major)


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
def test_tiles_of_as_many_rows_each_write_their_own():
    """33 rows are 17 and 16; a warp has room for 32."""
    case = Case(33, in_features=32, out_features=32, block_size=32, density=1)
    assert races(partial(check_rung, rung, "forward", case, "float16", "cuda")) == []


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [8, 16, 32, 128])
def test_tiles_are_longer_where_there_are_many(size, dtype, monkeypatch):
    monkeypatch.setattr(launches, "MANY", 4)
    monkeypatch.setattr(launches, "n_shares", lambda: 10)
    form = Form(dtype, dtype == "float32")
    most = {8: 80 if form.is_16_bit else 20}.get(size, 40 if form.is_16_bit else 2**30)
    for batch, n in itertools.product((1, 17, 32, 33, 64, 65, 1000), (1, 10, 11, 20, 40, 100)):
        for across in (False, True):
            rows = launches._tile_rows(batch, n, 0, size, form, across)
            if batch > 32:
                assert rows == (32 if n * math.ceil(batch / 32) <= most else 64)
                much = launches._tile_rows(batch, 1, 2**20, size, form, across)
                assert much == (64 if form.is_16_bit and size > 8 else 32) or batch == 1000
            else:
                assert rows == (16 if batch <= 16 and not across else 32)


@needs_ampere
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (64, 64), (65, 130), (7, 200), (130, 63)])
def test_a_transposed_copy_is_aligned(rows, columns, rng):
    x = rng.standard_normal((rows, columns)).astype(np.float16)
    wide = device.to_device(np.pad(x, [(0, 0), (8, 16)]))[:, 8 : 8 + columns]
    copied = transposed_copy(wide)
    assert is_aligned(copied.T)
    np.testing.assert_array_equal(copied.numpy(), x)


@needs_ampere
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("size", [8, 32])
def test_large_batches_are_refused(product, size):
    case = product, size, as_dtype("float32"), "cuda"
    assert rung.unsupported(*case, 8192) is None
    assert rung.unsupported(*case, 8193) == "k8_small_batch takes batches up to 8192, got 8193"


@needs_ampere
@pytest.mark.parametrize("product", PRODUCTS)
def test_tensor_maps_that_are_not_kept(product, monkeypatch):
    if not launches.has_engine():
        pytest.skip("takes compute capability 9.0, or the simulator")
    monkeypatch.setattr(calls, "MOST_MAPS", 0)
    monkeypatch.setattr(calls, "_maps", {})
    told, bound = [], launches.Bound
    place = {"weight_grad": 9}.get(product, 8)  # of `fresh` among a launch's arguments

    def noted(*args, **options):
        told.append(args[place])
        return bound(*args, **options)

    monkeypatch.setattr(launches, "Bound", noted)
    check_rung(rung, product, Case(32, 64, 64, 32, 1), "float32", "cuda")
    assert told == [1, 1]
    assert not calls._maps


@needs_ampere
def test_a_card_with_little_shared_memory_has_no_long_rings(monkeypatch):
    monkeypatch.setattr(launches, "copy_engine", lambda: True)
    monkeypatch.setattr(launches, "shared_memory", lambda: 99 * 1024)
    x, values = (device.to_device(np.zeros(shape, np.float32)) for shape in [(8, 32), (1, 32, 32)])
    assert not launches.serves(x, values)
    assert rung.unsupported("forward", 32, "float32", "cuda", 64) is None


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [8, 32])
def test_a_ring_has_a_stage_at_least_on_every_card(size, dtype, kilobytes, monkeypatch):
    monkeypatch.setattr(launches, "shared_memory", lambda: 1024 * kilobytes)
    form, source = Form(dtype, dtype == "float32"), Source(False, 0, False)
    x_side, w_side = Operand(False, 4), Operand(True, size // 8)
    made = [
        lines.Lines(Sums(form, x_side, w_side, ANY), size, source, 8, far=False, tiled=False),
        blocks.Blocks(form, size, w_side, x_side, source, 8, 132, long=False),
    ]
    for kernel in made:
        kernel = launches.with_stages(kernel, launches.MOST)
        assert 1 <= kernel.source.stages <= launches.MOST
        assert kernel.shared_bytes + launches.BARRIERS <= 1024 * kilobytes


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
