"""float32 in k7_small_blocks, where a layout takes several strips, stages, regions and boxes."""

import numpy as np
import pytest

from numbsparse import device, ops
from numbsparse.device import to_device
from numbsparse.kernels.matmul import PRODUCTS, rung
from numbsparse.kernels.matmul.k7_small_blocks import region_plan, regions, strip_plan
from numbsparse.kernels.parts import aligned, deal
from numbsparse.layout import Layout
from numbsparse.testing import Case, check_rung, count

needs_a_gpu = pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator")

CASES = [
    Case(batch=3, in_features=150, out_features=40, block_size=16, density=0.9),
    Case(batch=3, in_features=150, out_features=36, block_size=8, density=0.5),
    Case(batch=66, in_features=40, out_features=60, block_size=8, density=0.2),
]


@needs_a_gpu
@pytest.mark.every(2)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products(product, case):
    check_rung(rung("k7_small_blocks"), product, case, "float32", "cuda")


@needs_a_gpu
@pytest.mark.pairs
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_feature_major_activations(product, size, precision):
    case = Case(batch=70, in_features=43, out_features=30, block_size=size)
    kernels = rung("k7_small_blocks")
    check_rung(kernels, product, case, "float32", "cuda", 0, precision, feature_major=True)


@needs_a_gpu
@pytest.mark.parametrize("packed", [False, True], ids=["stored", "packed"])
@pytest.mark.parametrize(("B", "beyond"), [(8, 3), (16, 3), (16, 11)])
@pytest.mark.parametrize("product", ["forward", "input_grad"])
def test_what_w_has_beyond_the_last_feature_is_left_out(
    product, B, beyond, packed, rng, monkeypatch
):
    """At "high", where no sum that is NaN is computed again."""
    monkeypatch.setattr(strip_plan, "PACK_FLOAT32_FROM", 0 if packed else 128)
    layout, forward = Layout(np.ones((2, 2), bool)), product == "forward"
    values = rng.integers(-4, 5, (4, B, B)).astype(np.float32)
    last = (layout.index.block_rows if forward else layout.index.block_columns) == 1
    whole = values.swapaxes(1, 2) if not forward else values
    whole[last, -beyond:] = np.nan
    x = rng.integers(-4, 5, (5, 2 * B - beyond)).astype(np.float32)
    y = to_device(np.full((5, 2 * B), np.nan, np.float32))
    index = ops.index_beside(layout, y)
    getattr(rung("k7_small_blocks"), product)(to_device(x), to_device(values), index, y, "high")
    dense = np.nan_to_num(values).reshape(2, 2, B, B).swapaxes(1, 2).reshape(2 * B, 2 * B)
    dense = dense if forward else dense.T
    np.testing.assert_array_equal(y.numpy(), x @ dense[: 2 * B - beyond])


OF_ALL_SHAPES = [  # where the simulator's regions differ, and so do the card's
    Case(batch=37, in_features=43, out_features=101, block_size=8, density=0.5),
    Case(batch=37, in_features=43, out_features=101, block_size=16, density=0.5),
    Case(batch=21, in_features=301, out_features=37, block_size=8, density=0.1),
    Case(batch=21, in_features=301, out_features=161, block_size=16, density=0.15),
    Case(batch=67, in_features=40, out_features=72, block_size=8, density=0.3),
    Case(batch=67, in_features=48, out_features=80, block_size=16, density=0.3),
]
if not device.SIMULATED:
    OF_ALL_SHAPES += [
        Case(batch=301, in_features=1001, out_features=2003, block_size=size, density=density)
        for size in (8, 16)
        for density in (0.01, 0.05, 0.1, 0.3)
    ]


def placed(a, transposed):
    """On the device, contiguous along the rows or, transposed, the batch; NaN beyond the edge."""
    lines = a.T if transposed else a
    padded = np.full((lines.shape[0], -(-lines.shape[1] // 4) * 4 + 4), np.nan, np.float32)
    padded[:, : lines.shape[1]] = lines
    there = to_device(padded)[:, : lines.shape[1]]
    return there.T if transposed else there


def weight_grad(layout, x, dy, B):
    values = to_device(np.full((layout.n_blocks, B, B), np.nan, np.float32))
    index = ops.index_beside(layout, values)
    rung("k7_small_blocks").weight_grad(x, dy, index, values, "highest")
    return values.numpy()


def expected(layout, x, dy, B):
    whole = np.zeros((layout.shape[0] * B, layout.shape[1] * B))  # 0 beyond the edge
    whole[: x.shape[1], : dy.shape[1]] = x.astype(np.float64).T @ dy.astype(np.float64)
    blocks = whole.reshape(layout.shape[0], B, layout.shape[1], B).swapaxes(1, 2)
    return blocks[layout.index.block_rows, layout.index.block_columns]


@pytest.fixture
def nothing_is_copied(monkeypatch):
    def copy(*_):
        raise AssertionError("an operand is copied")

    monkeypatch.setattr(aligned, "copy_matrices", copy)


@needs_a_gpu
@pytest.mark.every(5)
@pytest.mark.parametrize("dy_transposed", [False, True], ids=["dy", "dy_transposed"])
@pytest.mark.parametrize("x_transposed", [False, True], ids=["x", "x_transposed"])
@pytest.mark.parametrize("case", OF_ALL_SHAPES, ids=str)
def test_weight_grad_reads_either_order(rng, case, x_transposed, dy_transposed, nothing_is_copied):
    layout, B = case.layout(rng), case.block_size
    x = rng.standard_normal((case.batch, case.in_features)).astype(np.float32)
    dy = rng.standard_normal((case.batch, case.out_features)).astype(np.float32)
    got = weight_grad(layout, placed(x, x_transposed), placed(dy, dy_transposed), B)
    bound = (case.batch + 2) * np.finfo(np.float32).eps * expected(layout, abs(x), abs(dy), B)
    assert (abs(got - expected(layout, x, dy, B)) <= bound).all()  # NaN is not


@pytest.mark.skipif(not device.SIMULATED, reason="takes a region that no card needs")
@pytest.mark.parametrize("B", [8, 16])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_sums_that_outgrow_the_ring_leave_in_turns(rng, B, monkeypatch):
    small = regions.Region(2, 10, 3, 8, 2, FETCHERS=1, ITEM=4, AT_ONCE=1)
    ring, sums = small.STAGES * small.STAGE_BYTES, small.WARPS * small.SLOTS * 16 * B * 4
    assert sums > 2 * ring / small.WARPS
    monkeypatch.setattr(region_plan, "region_of", lambda *_: small)
    layout = Layout(rng.random((-(-43 // B), -(-61 // B))) < 0.9)
    x, dy = (rng.standard_normal((19, n)).astype(np.float32) for n in (43, 61))
    x[3, 40] = np.inf
    got, right = (
        weight_grad(layout, placed(x, False), placed(dy, True), B),
        expected(layout, x, dy, B),
    )
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-4)


@needs_a_gpu
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weight_grad_goes_anywhere(rng, dtype):
    """Also to blocks that do not begin at 16 bytes."""
    layout, room = Layout(np.ones((3, 2), bool)), to_device(np.full(6 * 64 + 1, np.nan, dtype))
    x, dy = (rng.integers(-3, 4, (5, n)).astype(dtype) for n in (24, 16))
    out = room[1:].reshape(6, 8, 8)
    index = ops.index_beside(layout, out)
    rung("k7_small_blocks").weight_grad(to_device(x), to_device(dy), index, out)
    np.testing.assert_array_equal(out.numpy(), expected(layout, x, dy, 8))
    assert np.isnan(room.numpy()[0])


@needs_a_gpu
@pytest.mark.pairs
@pytest.mark.parametrize("dy_transposed", [False, True], ids=["dy", "dy_transposed"])
@pytest.mark.parametrize("x_transposed", [False, True], ids=["x", "x_transposed"])
@pytest.mark.parametrize("B", [8, 16])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_weight_grad_of_infinities_in_either_order(rng, B, x_transposed, dy_transposed):
    layout = Layout(np.ones((-(-43 // B), -(-21 // B)), bool))
    x = rng.standard_normal((19, 43)).astype(np.float32)
    dy = rng.standard_normal((19, 21)).astype(np.float32)
    x[7, 13], x[17, 42], dy[3, 20] = np.inf, -np.inf, np.inf
    got = weight_grad(layout, placed(x, x_transposed), placed(dy, dy_transposed), B)
    right = expected(layout, x, dy, B)
    assert 0.05 < np.isinf(right).mean() < 0.5
    np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize("density", [0.1, 0.9], ids=["32 bytes", "64 bytes"])
@pytest.mark.parametrize("B", [8, 16])
def test_transposed_lines_meet_in_no_bank(rng, B, density):
    layout = Layout(rng.random((5, 5)) < density)
    x, dy = (placed(rng.standard_normal((16, 5 * B)), True) for _ in range(2))
    products, *_ = count(lambda: weight_grad(layout, x, dy, B))
    assert products.shared_reads.requests > 0 == products.shared_reads.excess


@pytest.mark.parametrize("kept", [0.01, 0.05, 0.1, 0.5])
@pytest.mark.parametrize("B", [8, 16])
def test_transposed_lines_of_a_card_are_not_short(monkeypatch, B, kept):
    monkeypatch.setattr(region_plan, "shared_memory", lambda: 227 * 1024)
    region = region_plan.region_of(B, 4, kept, transposed=True)
    assert region.DEPTH * region.ITEM >= 64
    assert region.SLOTS % region.AT_ONCE == 0
    assert region.SHARED_BYTES < 227 * 1024


def test_an_even_order_keeps_warps_together(rng):
    for n in (100, 80, 1):
        counts = rng.poisson(0.1, (n, 20)).astype(np.uint8)  # of four columns a warp
        counts[0, 7] = 1
        order, needed = np.full(n, -1), np.flatnonzero(counts.any(1))
        kept = deal.in_step(counts, 5, order)
        np.testing.assert_array_equal(np.sort(order[:kept]), needed)
        loads = counts.reshape(n, 5, 4).sum(2)
        as_it_was, ahead = (
            np.cumsum(loads[groups] - loads.sum(0) / kept, axis=0)
            for groups in (needed, order[:kept])
        )
        assert n == 1 or np.abs(ahead).mean() < 0.5 * np.abs(as_it_was).mean()
