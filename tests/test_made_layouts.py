"""Layouts made from coordinates on a device: their index, their products, what they refuse."""

from importlib import import_module

import numpy as np
import pytest
from conftest import HALVES, host
from examples_helpers import run_python

import numbsparse as ns
from numbsparse import Layout, device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.parts.plans import planned
from numbsparse.nn import functional as F
from numbsparse.ops import made as made_layouts

UNIT = {"float16": 2**-11, "bfloat16": 2**-8, "float32": 2**-24, "float64": 2**-53}


def coordinates(pattern, rng, none=0, dtype=np.int64):
    """Those of a pattern's blocks, shuffled, with `none` that stand for no block."""
    rows, columns = (np.append(lines, np.full(none, -1)) for lines in np.nonzero(pattern))
    columns[len(columns) - none :: 2] = 0  # one of the two says so
    order = rng.permutation(rows.size)
    return rows[order].astype(dtype), columns[order].astype(dtype)


def made(pattern, rng, put, *, more=2, **how):
    rows, columns = coordinates(pattern, rng, **how)
    capacity = int(pattern.sum()) + more
    return Layout.on_device(put(rows), put(columns), pattern.shape, capacity=capacity)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 1), "int32"), ((5, 70), "int64"), ((34, 3), "int32")]
)
def test_its_index_is_that_of_the_pattern(shape, dtype, rng, put, place):
    pattern = rng.random(shape) < 0.4
    layout, right = made(pattern, rng, put, none=3, dtype=dtype), Layout(pattern)
    n = right.n_blocks
    assert (layout.check(), layout.n_blocks, layout.shape) == (n, n + 2, shape)
    assert layout.to_host() == right
    if place == "cuda":
        own = layout.device_index
        for walk, other in ((own.rows, right.index.rows), (own.columns, right.index.columns)):
            np.testing.assert_array_equal(walk.indptr.numpy(), other.indptr)
            np.testing.assert_array_equal(walk.indices.numpy()[:n], other.indices)
            np.testing.assert_array_equal(walk.blocks.numpy()[:n], other.blocks)
        for own_lines, lines in (
            (own.block_rows, right.index.block_rows),
            (own.block_columns, right.index.block_columns),
        ):
            np.testing.assert_array_equal(own_lines.numpy(), np.append(lines, [0, 0]))
        np.testing.assert_array_equal(own.rows.blocks.numpy(), np.arange(n + 2))


@pytest.mark.parametrize("capacity", [None, 0, 2])
def test_no_block_at_all(capacity, put, place):
    none = put(np.zeros(0, np.int32))
    layout = Layout.on_device(none, none, (2, 3), capacity=capacity)
    assert (layout.check(), layout.n_blocks) == (0, capacity or 0)
    assert layout.to_host() == Layout.from_arrays([0, 0, 0], [], (2, 3))
    x = put(np.ones((2, 64), np.float32))
    w = ns.BlockSparse(put(np.full((layout.n_blocks, 32, 32), np.nan, np.float32)), layout)
    assert not host(ns.matmul(x, w)).any()
    assert not host(ns.sddmm(x.T, put(np.ones((2, 96), np.float32)), layout).values).any()


FEW = "at least the number of blocks, 3, got 2"
WRONG = [  # rows, columns, capacity, and what is said on the CPU and of a GPU
    ([0, 1, 0], [1, 1, 1], 3, "got 1 a second time", "got 1 a second time and 0 from outside"),
    ([0, 5, 1], [1, 1, 1], 3, "0 to 1, or -1 for no block, got 0 to 5", "and 1 from outside"),
    ([0, 1, 1], [-3, 1, 2], 3, "0 to 2, or -1 for no block, got -3 to 2", "and 1 from outside"),
    ([0, 1, 1], [0, 1, 0], 2, FEW, FEW),
]


@pytest.mark.parametrize(("rows", "columns", "capacity", "of_cpu", "of_gpu"), WRONG)
def test_wrong_coordinates_are_told_and_do_no_harm(
    rows, columns, capacity, of_cpu, of_gpu, put, place, rng
):
    of = put(np.array(rows)), put(np.array(columns))
    if place == "cpu":
        with pytest.raises(ValueError, match=of_cpu):
            Layout.on_device(*of, (2, 3), capacity=capacity)
        return
    layout = Layout.on_device(*of, (2, 3), capacity=capacity)
    with pytest.raises(ValueError, match=of_gpu):
        layout.check()
    with pytest.raises(ValueError, match="take"):
        layout.to_host()
    ns.synchronize()  # was told
    wrong = [Layout.on_device(*of, (2, 3), capacity=capacity) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(ValueError, match=of_gpu):
            wrong[0].check()
    with pytest.raises(ValueError, match=r"check\(\) of each layout"):
        ns.synchronize()  # of the other one
    with pytest.raises(ValueError, match=of_gpu):
        wrong[1].check()  # which tells nothing of those that follow
    Layout.on_device(*of, (2, 3), capacity=capacity)  # and is gone
    with pytest.raises(ValueError, match=r"check\(\) of each layout"):
        ns.synchronize()
    ns.synchronize()
    inside = {(i, j) for i, j in zip(rows, columns, strict=True) if 0 <= i < 2 and 0 <= j < 3}
    index, kept = layout.device_index, sorted(inside) if len(inside) <= capacity else []
    for walk, lines in ((index.rows, 2), (index.columns, 3)):
        ends = walk.indptr.numpy()
        assert (ends.size, ends[0], ends[-1]) == (lines + 1, 0, len(kept))
    own = (a.numpy()[: len(kept)].tolist() for a in (index.block_rows, index.block_columns))
    assert [*zip(*own, strict=True)] == kept
    if not kept:  # nor do products see any
        w = ns.BlockSparse(put(np.full((capacity, 32, 32), np.nan, np.float16)), layout)
        x, dy = (put(rng.standard_normal((2, n)).astype(np.float16)) for n in w.shape)
        assert not host(ns.matmul(x, w)).any()
        assert not host(ns.sddmm(x.T, dy, layout).values).any()


CASES = [
    # dtype, B, rung, edge, x feature-major, dy feature-major
    ("float16", 32, "k6_hopper", True, True, True),
    ("float32", 32, "auto", True, True, False),
    ("bfloat16", 64, "k6_hopper", False, False, True),
    ("float16", 32, "k5_tensor_core", True, False, False),
    ("float32", 32, "k5_tensor_core", True, True, False),
    ("float16", 32, "k8_small_batch", True, False, True),
    ("float32", 64, "k8_small_batch", False, True, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_its_products(case, rng, place, put):
    dtype, size, kernel, edge, x_across, dy_across = case
    if dtype not in ("float32", *HALVES):
        pytest.skip("ml_dtypes is not installed")
    kernel = kernel if place == "cuda" else "k0_reference" if dtype == "float32" else "auto"
    pattern = np.array([[1, 0, 1], [0, 0, 0]], bool)
    shape = tuple(n * size - 8 * edge for n in pattern.shape)
    layout, right = made(pattern, rng, put, none=1), Layout(pattern)
    n = right.n_blocks
    values = rng.standard_normal((n + 2, size, size)).astype(as_dtype(dtype))
    values[n:] = np.nan
    if edge:
        values[:n][right.index.block_columns == 2, :, -8:] = np.nan
    exact = values[:n].astype(np.float64)
    dense = ns.BlockSparse(exact, right, shape=shape).toarray()
    w = ns.BlockSparse(put(values), layout, shape=shape)

    def operand(features, across):
        a = rng.standard_normal((5, features)).astype(as_dtype(dtype))
        return (put(np.ascontiguousarray(a.T)).T if across else put(a)), a.astype(np.float64)

    (x, x64), (dy, dy64) = operand(shape[0], x_across), operand(shape[1], dy_across)
    close(ns.matmul(x, w, kernel=kernel), x64, dense, dtype)
    close(ns.matmul(dy, w.T, kernel=kernel), dy64, dense.T, dtype)
    dw = ns.sddmm(x.T, dy, w if edge else layout, block_size=size, kernel=kernel)
    got = host(dw.values)
    assert not got[n:].any()
    kept = ns.BlockSparse(got[:n], right, shape=shape).toarray()
    full = np.zeros_like(kept, np.float64)
    for i, j in np.argwhere(pattern):
        at = np.s_[i * size : (i + 1) * size, j * size : (j + 1) * size]
        full[at] = (x64.T @ dy64)[at]
    bound = 2 * UNIT[dtype] * abs(full) + 16 * 2**-23 * (abs(x64.T) @ abs(dy64))
    assert (abs(kept.astype(np.float64) - full) <= bound).all()


ALONE = """
import numpy as np
import numbsparse as ns
places = ns.to_device(np.array([0]))
layout = ns.Layout.on_device(places, places, (1, 1))
x = np.ones((3, 32), "float16")
w = ns.BlockSparse(ns.to_device(np.ones((1, 32, 32), x.dtype)), layout)
for kernel in ("k5_tensor_core", "k6_hopper", "k8_small_batch"):
    for dtype in ("float16", "float32"):
        x, w = ns.to_device(np.ones((3, 32), dtype)), w.astype(dtype)
        for y in (ns.matmul(x, w, kernel=kernel), ns.matmul(x, w.T, kernel=kernel)):
            assert (y.numpy() == 32).all()
        assert (ns.sddmm(x.T, x, layout, kernel=kernel).values.numpy() == 3).all()
"""


@pytest.mark.slow
def test_a_program_that_imports_the_library_alone_has_all_its_products():
    """The plans on a GPU are registered where rungs are loaded; tests load more than that."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    run = run_python(ALONE)
    assert run.returncode == 0, run.stderr


def test_of_what_is_cut_nothing_is_added_that_no_item_left(rng, monkeypatch):
    """There is room for more than is cut, with anything in it: here the numbers of blocks."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    on_gpu, weight_grad = (
        import_module(f"numbsparse.kernels.matmul.k6_hopper.{name}")
        for name in ("weight_grad_on_gpu", "weight_grad")
    )
    monkeypatch.setattr(weight_grad, "multiprocessors", lambda: 4)
    monkeypatch.setattr(on_gpu, "empty", lambda *of: device.to_device(np.zeros(*of)))
    pattern = np.ones((int(rng.integers(3, 5)), 5), bool)  # an item a column, of which one is cut
    layout, right = made(pattern, rng, ns.to_device), Layout(pattern)
    x, dy = (rng.standard_normal((260, 32 * n), np.float32) for n in pattern.shape)
    dw = ns.sddmm(ns.to_device(x).T, ns.to_device(dy), layout, kernel="k6_hopper")
    kept = ns.BlockSparse(host(dw.values)[: right.n_blocks], right).toarray()
    *_, cut, numbers, _ = max(layout.device_index.plans.values(), key=len)
    assert 0 < numbers.numpy()[1] < cut.size
    exact, size = x.T.astype(float) @ dy, abs(x.T.astype(float)) @ abs(dy)
    assert (abs(kept - exact) <= 2.0**-21 * size).all()


@pytest.mark.parametrize("size", [32, 64, 128])
def test_few_blocks_and_a_long_batch(size, rng, monkeypatch):
    """What their steps leave is added; a step is as long here as many."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    on_gpu, weight_grad = (
        import_module(f"numbsparse.kernels.matmul.k6_hopper.{name}")
        for name in ("weight_grad_on_gpu", "weight_grad")
    )
    monkeypatch.setattr(weight_grad, "multiprocessors", lambda: 30)
    monkeypatch.setattr(on_gpu, "A_STEP", 100.0)
    monkeypatch.setattr(on_gpu.shares, "DEEP", 0)
    pattern = rng.random((3, 4)) < 0.6
    pattern[0, 0] = True
    layout, right = made(pattern, rng, ns.to_device), Layout(pattern)
    x, dy = (rng.standard_normal((800, size * n)).astype(np.float16) for n in pattern.shape)
    dw = ns.sddmm(ns.to_device(x).T, ns.to_device(dy), layout, kernel="k6_hopper")
    *_, numbers, _ = max(layout.device_index.plans.values(), key=len)
    assert numbers.numpy()[0] > 1
    kept = ns.BlockSparse(host(dw.values)[: right.n_blocks], right).toarray()
    mask = np.kron(pattern, np.ones((size, size)))
    exact = mask * (x.T.astype(float) @ dy)
    assert (abs(kept - exact) <= 2.0**-11 * abs(exact) + 1e-3).all()


@pytest.fixture
def spare(monkeypatch):
    """Indexes of layouts that are gone: none at first."""
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    monkeypatch.setattr(made_layouts, "_spare", {})
    return made_layouts._spare


def test_the_index_of_one_that_is_gone_serves_the_next(rng, spare):
    """With its plans and what was recorded; what comes out is of the new blocks."""
    x, dy = (rng.standard_normal((2, n)).astype(np.float16) for n in (64, 96))
    x_there, dy_there, ones = map(ns.to_device, (x, dy, np.ones((4, 32, 32), np.float16)))
    rows, columns = (device.empty((4,), np.int32) for _ in range(2))
    indexes = []
    for blocks in ([0, 4, 2], [1, 2], [1, 2, 3, 5], [5]):  # the last is written by what is recorded
        for array, lines in zip((rows, columns), np.divmod(blocks, 3), strict=True):
            device.refill(array, np.append(lines, [-1] * (4 - len(blocks))).astype(np.int32))
        layout = Layout.on_device(rows, columns, (2, 3))
        indexes.append(layout.device_index)
        pattern = np.isin(np.arange(6), blocks).reshape(2, 3)
        assert layout.to_host() == Layout(pattern)
        if len(indexes) != 2:
            mask, w = np.kron(pattern, np.ones((32, 32))), ns.BlockSparse(ones, layout)
            y = ns.matmul(x_there, w, kernel="k6_hopper")
            close(y, x.astype(np.float64), mask, "float16")
            dw = ns.sddmm(x_there.T, dy_there, layout, kernel="k8_small_batch")
            right = np.where(mask, x.T.astype(np.float64) @ dy, 0)
            np.testing.assert_allclose(dw.toarray(), right, atol=1e-3, rtol=2e-3)
            del w, dw
        del layout
    assert len({id(index) for index in indexes}) == 1


def test_an_index_that_may_still_be_used_serves_no_other(monkeypatch, spare):
    places = ns.to_device(np.arange(2))

    def made():
        return Layout.on_device(places, places, (2, 2))

    first, second = made(), made()
    index = second.device_index
    assert index is not first.device_index
    del second
    assert made().device_index is index
    for stream in (None, 7):  # one that is captured, and another one
        layout = made()
        assert layout.device_index is index
        with monkeypatch.context() as within:
            within.setattr(made_layouts, "_stream_in_use", lambda stream=stream: stream)
            assert layout.device_index is index
        del layout
        other = made()
        assert other.device_index is not index
        index = other.device_index
        del other
    spare.clear()
    layout = made()
    layout.device_index.made.launches.extend([None] * (made_layouts.MOST_PLANS + 1))
    del layout
    assert not spare  # it has plans for too many batches


def close(y, a, b, dtype):
    """y is a @ b, but for rounding it and its sums."""
    exact, size = a @ b, abs(a) @ abs(b)
    bound = 2 * UNIT[dtype] * abs(exact) + (b.shape[0] + 16) * 2**-23 * size
    assert (abs(host(y).astype(np.float64) - exact) <= bound).all()


def test_gradients_go_through_it(rng):
    pattern = np.array([[1, 0, 1], [1, 1, 0]], bool)
    layout = made(pattern, rng, lambda a: a)
    a, b, c = (rng.standard_normal(s) for s in ((8, 5), (5, 12), (12, 3)))

    def f(a, b, c):
        hidden = F.gelu(F.relu(ns.sddmm(a, b, layout, block_size=4)))
        return F.sum(F.tanh(ns.matmul(hidden, c)))

    ns.testing.check_grads(f, a, b, c)


@pytest.mark.filterwarnings("ignore:.*invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_are_zeros_in_places_left_over(dtype, rng, put, place):
    """Whatever values and gates have there: a norm over a gradient sees all of it."""
    dtype = "float32" if place == "cpu" else dtype
    pattern = np.array([[1, 0, 1], [0, 1, 0]], bool)
    layout, right = made(pattern, rng, put), Layout(pattern)
    values = rng.standard_normal((5, 32, 32)).astype(dtype)
    gates = np.float32([0.5, 0, -2, np.nan, np.inf])
    values[3:] = np.nan
    w = ns.Tensor(ns.BlockSparse(put(values), layout), requires_grad=True)
    gate = ns.Tensor(put(gates), requires_grad=True)
    x, dy = (rng.standard_normal((4, n)).astype(dtype) for n in (64, 96))
    F.sum(F.matmul(put(x), w, gate=gate) * ns.Tensor(put(dy))).backward()
    dw, dg = host(w.grad.matrix.values), host(gate.grad.data)
    assert not dw[3:].any()
    assert not dg[3:].any()
    full = ns.BlockSparse.from_dense(x.T.astype(np.float64) @ dy, right, block_size=32).data
    size = ns.BlockSparse.from_dense(abs(x.T) @ abs(dy), right, block_size=32).data
    exact = full * gates[:3, None, None]
    assert (abs(dw[:3] - exact) <= 8 * UNIT[dtype] * size * abs(gates[:3, None, None])).all()
    slopes = np.where(gates[:3] == 0, 0, (full * values[:3]).sum((1, 2)))
    bound = 8 * UNIT[dtype] * (size * abs(values[:3])).sum((1, 2))
    assert (abs(dg[:3] - slopes) <= bound).all()


def test_what_else_a_matrix_of_it_does(rng, put, place):
    pattern = np.array([[1, 0, 1], [0, 1, 0]], bool)
    layout, right = made(pattern, rng, put), Layout(pattern)
    values = rng.standard_normal((5, 32, 32)).astype(np.float32)
    values[3:] = np.nan
    w, host_w = ns.BlockSparse(put(values), layout), ns.BlockSparse(values[:3].copy(), right)
    dense = host_w.toarray()
    assert w.to("cpu").layout == right
    for got, wanted in ((w, dense), (w.T, dense.T), (w + w, dense + dense), (w * w, dense * dense)):
        np.testing.assert_array_equal(got.toarray(), wanted)
    assert (w.T != host_w.T).nnz == 0
    cut = ns.BlockSparse(put(values), layout, shape=(60, 90))
    for of, matrix in ((w, dense), (w.T, dense.T), (cut, dense[:60, :90])):
        for axis in (None, 0, 1):
            np.testing.assert_allclose(host(of.sum(axis)), matrix.sum(axis), atol=1e-4)
        np.testing.assert_allclose(F.sum(ns.Tensor(of)).item(), matrix.sum(), atol=1e-4)
    np.testing.assert_array_equal(host(w.block_norms())[3:], [0, 0])
    gate = np.float32([0.5, 0, -2, np.nan, 0])
    values[1] = np.nan  # which nothing reads, as its gate is 0
    w = ns.BlockSparse(put(values), layout)
    gated = ns.BlockSparse(host_w.values * gate[:3, None, None], right).toarray()
    for x, of, other in ((64, w, gated), (96, w.T, gated.T)):
        x = rng.standard_normal((3, x)).astype(np.float32)
        close(ns.matmul(put(x), of, gate=put(gate)), x, other.astype(np.float64), "float32")
    if place == "cuda":  # a tile whose gate is 0 is not multiplied
        x = np.where(np.arange(64) < 32, np.nan, 1).astype(np.float32)[None]
        how = {"kernel": "k8_small_batch", "precision": "high"}  # nor is it computed again
        y = host(ns.matmul(put(x), w, gate=put(gate), **how))[0]
        rest = gated[32:, 32:]
        assert (abs(y[32:] - rest.sum(0)) <= 2**-9 * abs(rest).sum(0)).all()
    assert ns.nn.Linear(64, 96, layout=layout).weight.matrix.layout == right


def test_a_captured_step_makes_it_anew(rng):
    if not device.is_available():
        pytest.skip(device.why_unavailable())

    def step(rows, columns, x, values):
        layout = Layout.on_device(rows, columns, (2, 3), capacity=4)
        return ns.matmul(x, ns.BlockSparse(values, layout))

    graph = ns.graph(step)
    x = rng.standard_normal((2, 64)).astype(np.float16)
    values = rng.standard_normal((4, 32, 32)).astype(np.float16)
    for places in ([5, 1, -1], [0, 4, 2], [3, -1, -1]):
        rows, columns = np.array(places) // 3, np.array(places) % 3
        y = graph(rows, columns, x, values)
        kept = np.zeros((2, 3), bool)
        kept[rows[rows >= 0], columns[rows >= 0]] = True
        w = ns.BlockSparse(values[: kept.sum()].astype(np.float64), kept)
        close(y, x.astype(np.float64), w.toarray(), "float16")
    assert graph.captures == (not device.SIMULATED)
    graph(np.array([1, 1, -1]), np.array([2, 2, 0]), x, values)  # by a replay
    with pytest.raises(ValueError, match="1 blocks a second time, 0 from outside"):
        ns.synchronize()


def test_what_it_refuses(rng, place, put):
    one, layout = put(np.array([0])), made(np.ones((1, 1), bool), rng, put, more=0)
    for bad, columns, shape, capacity, said in (
        (put(np.zeros(1, np.float32)), one, (1, 1), 1, "rows takes int"),
        (one, put(np.zeros((1, 1), int)), (1, 1), 1, "columns takes the shape of rows"),
        (one, one, (1,), 1, "shape takes"),
        (one, one, (1, 1), -1, "capacity takes"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            Layout.on_device(bad, columns, shape, capacity=capacity)
    for ask in ("pattern", "indices", "indptr", "T", "flat_indices"):
        with pytest.raises(TypeError, match="to_host"):
            getattr(layout, ask)
    with pytest.raises(TypeError, match="to_host"):
        layout | layout
    assert layout == layout
    assert layout != made(np.ones((1, 1), bool), rng, put, more=0)


def test_it_says_blocks_where_they_were_counted_and_places_before(rng, place, put):
    layout = made(np.array([[1, 0, 1, 0]], bool), rng, put)
    w = ns.BlockSparse(put(np.ones((4, 32, 32), np.float32)), layout)
    there = "" if place == "cpu" else ", on cuda"
    for _ in range(2):
        counted = place == "cpu" or layout._kept is not None
        said = (
            "{}2 blocks{} in 4 places, density 0.5"
            if counted
            else "{}places for 4 blocks{}, density 1 at most"
        )
        assert repr(layout) == said.format("Layout(1 x 4, ", "") + f", on {place})"
        size = " of 32 x 32"
        assert repr(w) == said.format("BlockSparse(32 x 128, float32, ", size) + f"{there})"
        assert layout.density == w.density == (0.5 if counted else 1)
        assert layout.check() == 2


def test_places_are_not_mixed(rng):
    if not device.is_available():
        pytest.skip(device.why_unavailable())
    one, x = np.array([0]), np.ones((1, 32), np.float32)
    on_gpu, on_cpu = (
        Layout.on_device(put(one), put(one), (1, 1)) for put in (ns.to_device, put_not)
    )
    with pytest.raises(TypeError, match="on the GPU"):
        ns.matmul(x, ns.BlockSparse(np.ones((1, 32, 32), np.float32), on_gpu))
    with pytest.raises(TypeError, match="on the CPU"):
        ns.matmul(x, ns.BlockSparse(ns.to_device(np.ones((1, 32, 32), np.float32)), on_cpu))
    with pytest.raises(ValueError, match="one device"):
        Layout.on_device(ns.to_device(one), one, (1, 1))
    small = ns.BlockSparse(ns.to_device(np.ones((1, 16, 16), np.float32)), on_gpu)
    with pytest.raises(ValueError, match=r"blocks of \(32, 64, 128\), got 16"):
        ns.matmul(x[:, :16], small)
    with pytest.raises(ValueError, match="plans its layout on the host"):
        planned(on_gpu.device_index, longest_first_of_all)


def put_not(a):
    return a


def longest_first_of_all(index):
    raise AssertionError("the index is not on the host")
