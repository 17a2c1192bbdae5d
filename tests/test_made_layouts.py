"""Layouts made from coordinates on a device: their index, its next owner, what they refuse."""

import numpy as np
import pytest
from conftest import host
from made_helpers import close, made

import numbsparse as ns
from numbsparse import Layout, device
from numbsparse.kernels.parts.plans import planned
from numbsparse.nn import functional as F
from numbsparse.ops import made as made_layouts


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
