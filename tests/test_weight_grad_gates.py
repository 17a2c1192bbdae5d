"""Gates that only the GPU knows: the blocks of a weight's gradient that they leave."""

from importlib import import_module

import numpy as np
import pytest
from conftest import host
from gate_helpers import close, spread
from numba import cuda

import numbsparse as ns
from numbsparse import device, ops
from numbsparse.device.launch import launch as launch_kernel
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul.k6_hopper import weight_grad_float32, weight_grad_plan
from numbsparse.kernels.matmul.k7_small_blocks import regions
from numbsparse.kernels.parts.plans_on_gpu import highest
from numbsparse.testing import races

weight_grad = import_module("numbsparse.kernels.matmul.k6_hopper.weight_grad")
k5_weight_grad = import_module("numbsparse.kernels.matmul.k5_tensor_core.weight_grad")
pytestmark = [
    pytest.mark.simulator,
    pytest.mark.skipif(not device.is_available(), reason="takes a GPU or the simulator"),
]


def check_weight_gradient(kernel, x, dy, across, layout, size, gates):
    """What is not computed is not written. Columns of dy that no block needs are NaN.

    across : whether x, and whether dy, is feature-major
    """
    dtype, wide, other = str(x.dtype), *(a.astype(np.float64) for a in (x, dy))
    right, size_of = wide.T @ other, abs(wide).T @ abs(other)
    strange = dy.copy()
    needed = layout.index.block_columns[gates != 0]
    for column in np.setdiff1d(np.arange(layout.shape[1]), needed):
        strange[:, column * size :][:, :size] = np.nan
    one, two = (
        ns.to_device(np.ascontiguousarray(a.T)).T if turned else ns.to_device(a)
        for a, turned in zip((x, strange), across, strict=True)
    )
    values = ns.to_device(np.full((layout.n_blocks, size, size), 7, x.dtype))
    how = layout, kernel, "highest", ns.to_device(gates)
    got = host(ops.sddmm_into(values, one.T, two, *how)).astype(np.float64)
    left = spread(gates != 0, ns.BlockSparse(values, layout, shape=right.shape)) != 0
    close(np.where(left, got, 0), right * left, size_of * left, dtype, len(x))
    assert (values.numpy()[gates == 0] == 7).all()


@pytest.mark.parametrize(
    ("dtype", "size", "batch", "edge", "across", "pieces"),
    [
        ("float16", 32, 70, 3, False, 2),
        ("bfloat16", 32, 100, 0, True, 1),
        ("float16", 64, 70, 5, True, 1),
        ("bfloat16", 64, 70, 0, False, 2),
        ("float16", 128, 70, 5, False, 1),
        ("bfloat16", 128, 70, 0, True, 2),
        ("float32", 32, 40, 3, False, 1),
        ("float32", 64, 33, 0, True, 2),
        ("float32", 128, 33, 4, False, 1),
    ],
)
def test_a_weight_gradient_leaves_out_what_gates_do(
    dtype, size, batch, edge, across, pieces, rng, monkeypatch
):
    """What is not computed is not written; x and dy that no block needs are not read."""
    monkeypatch.setattr(weight_grad_plan, "cut", lambda *of: (0.0, 0, pieces))  # all items
    monkeypatch.setitem(weight_grad.GATED_FROM[as_dtype(dtype).itemsize], size, batch)
    if across:  # blocks are many, and so are the products of an item of float32
        monkeypatch.setattr(weight_grad_plan, "BLOCKS", dict.fromkeys((32, 64, 128), 0))
    else:
        one = weight_grad_float32.single
        monkeypatch.setattr(weight_grad_float32, "smaller", lambda index, tile, *_: (one(tile),))
    rows, columns = grid = {32: (4, 5), 64: (3, 4), 128: (2, 4)}[size]
    kept = rng.random(grid) < 0.6
    kept[0] = True
    layout = ns.Layout(kept)
    index, shape = layout.index, (rows * size - edge, columns * size - edge)
    gates = np.float32(rng.integers(0, 3, layout.n_blocks) * (index.block_columns != 2))
    gates[:5] = 0, 1, 0, 0, 1  # of two neighbours the second alone
    gates[index.block_rows == 1] = 0  # all blocks of some items
    x, dy = (rng.standard_normal((batch, n)).astype(as_dtype(dtype)) for n in shape)
    check_weight_gradient("k6_hopper", x, dy, (across, across), layout, size, gates)


@pytest.mark.parametrize("short", [0, 99], ids=["in pieces", "whole"])
@pytest.mark.parametrize(
    ("dtype", "size", "edge"), [("float32", 16, 3), ("bfloat16", 32, 0), ("float16", 128, 5)]
)
def test_a_block_of_threads_whose_gate_is_zero_ends(short, dtype, size, edge, rng, monkeypatch):
    monkeypatch.setattr(k5_weight_grad, "SHORT", short)
    layout = ns.Layout(np.array([[1, 0, 1], [1, 1, 0]], bool)[: 1 if size == 128 else 2])
    gates, shape = np.float32(rng.integers(0, 3, layout.n_blocks)), np.array(layout.shape) * size
    gates[:2] = 0, 2
    x, dy = (
        rng.standard_normal((3 * 2048 // size, n - edge)).astype(as_dtype(dtype)) for n in shape
    )
    across = rng.random(2) < 0.5
    check_weight_gradient("k5_tensor_core", x, dy, across, layout, size, gates)


@pytest.mark.skipif(not device.SIMULATED, reason="takes the simulator")
@pytest.mark.parametrize(("dtype", "size"), [("float16", 32), ("float32", 64)])
def test_warps_that_find_what_gates_leave_do_not_race(dtype, size, rng, monkeypatch):
    monkeypatch.setitem(weight_grad.GATED_FROM[as_dtype(dtype).itemsize], size, 0)
    layout = ns.Layout(rng.random((3, 4)) < 0.7)
    gates = ns.to_device(np.float32(rng.random(layout.n_blocks) < 0.5))
    x, dy = (ns.to_device(rng.standard_normal((9, size * n)).astype(dtype)) for n in layout.shape)
    values = ns.to_device(np.zeros((layout.n_blocks, size, size), dtype))
    how = layout, "k6_hopper", "highest", gates
    assert races(lambda: ops.sddmm_into(values, x.T, dy, *how)) == []


@pytest.mark.parametrize("feature_major", [False, True], ids=["rows", "columns"])
def test_gates_leave_any_of_the_four_blocks_of_two_columns(feature_major, rng, monkeypatch):
    """float32: of columns that keep the same rows, 64 rows and columns of x.T @ dy are one."""
    monkeypatch.setattr(weight_grad_float32, "FEWER", 0)  # x and dy are not exchanged
    monkeypatch.setitem(weight_grad.GATED_FROM[4], 32, 0)
    layout = ns.Layout(np.repeat(rng.random((4, 3)) < 0.8, 2, axis=1))
    assert weight_grad_float32.way_of(layout.index, 32)[0].N == 64
    gates = np.float32(rng.random(layout.n_blocks) < 0.3)
    x, dy = (rng.standard_normal((40, 32 * n), np.float32) for n in layout.shape)
    here = (np.ascontiguousarray(a.T) if feature_major else a for a in (x, dy))
    one, two = (ns.to_device(a).T if feature_major else ns.to_device(a) for a in here)
    values = ns.to_device(np.full((layout.n_blocks, 32, 32), np.nan, np.float32))
    # What is computed of panels that are not there is NaN; "highest" would compute it again.
    ops.sddmm_into(values, one.T, two, layout, "k6_hopper", "high", ns.to_device(gates))
    got, left = values.numpy(), spread(gates, ns.BlockSparse(values, layout)) != 0
    assert np.isnan(got[gates == 0]).all()
    got = ns.BlockSparse(got, layout).toarray()
    exact, size = x.T.astype(float) @ dy, abs(x.T.astype(float)) @ abs(dy)
    assert (abs(got - exact) <= 2.0**-9 * size)[left].all()


WHOLE, CUT, CLUSTERS = (1, 1), (1, 2), (2, 1)  # blocks that have a region, pieces of the batch
REGIONS = [  # with the ways in which the simulator, which has two multiprocessors, takes them
    ("float16", 8, 40, 3, (False, False), 0.4, [CUT, CLUSTERS]),
    ("bfloat16", 8, 70, 0, (True, False), 0.15, [WHOLE]),
    ("float16", 16, 40, 5, (False, True), 0.5, [CLUSTERS]),
    ("bfloat16", 16, 20, 0, (False, False), 0.15, [WHOLE]),
    ("float32", 8, 20, 1, (False, True), 0.5, [CUT, CLUSTERS]),
    ("float32", 16, 33, 0, (True, True), 0.15, [WHOLE]),
]


@pytest.mark.parametrize(
    ("dtype", "size", "batch", "edge", "across", "density", "split", "pieces"),
    [
        (*case, *way)
        for *case, few in REGIONS
        for way in (few if device.SIMULATED else [WHOLE, CUT, CLUSTERS])
    ],
)
def test_regions_are_put_together_anew_of_what_gates_leave(
    dtype, size, batch, edge, across, density, split, pieces, rng, monkeypatch
):
    """Some of all gates, those of most columns, and none; NaN where no block that is left reads.

    Whole regions, some that are cut over the batch, and clusters: of these the simulator leaves
    none, of the others those of a column.
    """

    def chosen(index, B, widths, batch, ways, places):
        large = ways[0].region
        region = large._replace(SLOTS=24) if pieces > 1 else large  # as many as on some cards
        return region._replace(SPLIT=split), pieces

    monkeypatch.setattr(regions, "region_for", chosen)
    for item in regions.LEAVES_FROM:
        monkeypatch.setitem(regions.LEAVES_FROM, item, batch)
    rows, columns = (19, 21) if size == 8 and dtype != "float32" else (11, 12)  # several regions
    kept = rng.random((rows, columns)) < density
    kept[3] = kept[:, 5] = True
    layout, shape = ns.Layout(kept), (rows * size - edge, columns * size - edge)
    index = layout.index
    of_all = np.float32(rng.integers(-1, 2, layout.n_blocks))
    of_column = np.float32((index.block_columns == 5) & (index.block_rows % 2 == 1))
    x, dy = (rng.standard_normal((batch, n)).astype(as_dtype(dtype)) for n in shape)
    few = [of_column, 0 * of_all]
    for gates in (of_all, *([few[pieces > 1]] if device.SIMULATED else few)):
        check_weight_gradient("k7_small_blocks", x, dy, across, layout, size, gates)


@cuda.jit
def highest_kernel(words, out):
    out[cuda.threadIdx.x] = highest(words[cuda.threadIdx.x])


def test_the_highest_bit_of_a_word():
    words = np.uint32(
        [0, 1, 1 << 31, (1 << 20) + 1, *np.uint32(1) << np.arange(28, dtype=np.uint32)]
    )
    out = ns.to_device(np.full(32, -1, np.int32))
    launch_kernel(highest_kernel, 1, 32, ns.to_device(words), out)
    np.testing.assert_array_equal(out.numpy(), [0, 0, 31, 20, *range(28)])
