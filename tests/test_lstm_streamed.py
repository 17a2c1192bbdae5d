"""Recurrent steps that stream their weight: dealt evenly, and the steps of the textbook."""

from itertools import pairwise

import numpy as np
import pytest
from conftest import HALVES

import numbsparse as ns
from numbsparse import ops
from numbsparse.dtypes import as_dtype, finfo
from numbsparse.kernels.lstm import deal, producers, weights
from numbsparse.kernels.lstm import steps as steps_kernels
from numbsparse.kernels.matmul.k0_cpu import lines
from numbsparse.nn import functional as F
from numbsparse.ops import lstm_streamed
from numbsparse.testing import races

STEPS, B = 3, 32
HUB = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
CUT = np.array([[1, 0], [1, 0]], bool)  # two blocks of threads share a line where one may be cut


pytestmark = pytest.mark.usefixtures("cheap_products")


def draw(rng, dtype, inputs, hidden, batch, drop, steps=STEPS, meets=True, size=B):
    """What F.lstm takes, of float64 but representable in `dtype`, and `kept`."""

    def numbers(*shape):
        return (rng.standard_normal(shape) / 2).astype(as_dtype(dtype)).astype(float)

    def weight(features, pattern):
        layout = ns.Layout(np.repeat(pattern, 4, axis=1))
        values = numbers(layout.n_blocks, size, size)
        return ns.BlockSparse(values, layout, shape=(features, columns))

    hub = HUB if hidden > 2 * B else CUT
    if size != B:
        hub = (rng.random((-(-hidden // size),) * 2) < 0.5) | np.eye(-(-hidden // size), dtype=bool)
    state, columns = (batch, hidden), 4 * size * len(hub)
    of_inputs = np.arange(-(-inputs // size))[:, None] <= np.arange(len(hub)) % 3
    given = [numbers(steps, batch, inputs), weight(inputs, of_inputs & meets)]
    given += [weight(hidden, hub), numbers(columns), numbers(*state), numbers(*state)]
    return given, rng.integers(0, 2, (steps, *state)) * 2.0 if drop else None


@pytest.mark.parametrize(
    ("dtype", "inputs", "hidden", "batch", "steps", "meets", "size"),
    [
        (HALVES[0], 32, 72, 3, STEPS, True, B),
        ("float32", 64, 72, 2, 2, True, B),
        (HALVES[0], 8, 40, 66, 2, True, B),
        (HALVES[0], 32, 40, 2, 2, False, B),
        (HALVES[0], 32, 43, 3, 2, True, B),
        ("float32", 8, 37, 2, 2, True, B),
        (HALVES[0], 8, 43, 3, 2, True, 8),
        ("float32", 8, 40, 2, 2, True, 8),
        (HALVES[0], 8, 40, 3, 2, True, 8),
        ("float32", 8, 32, 2, 2, True, 8),
        (HALVES[0], 16, 43, 34, 2, True, 16),
        (HALVES[0], 8, 72, 3, 2, True, 64),
        ("float32", 8, 64, 2, 2, True, 64),
        ("exact", 32, 40, 2, 2, True, B),
        ("exact", 8, 40, 34, 2, True, 64),
    ],
    ids=lambda a: str(a),
)
def test_streamed_steps_are_the_steps(
    rng, monkeypatch, dtype, inputs, hidden, batch, steps, meets, size
):
    monkeypatch.setattr(lstm_streamed, "FEW_STEPS", 2)
    monkeypatch.setattr(deal, "MOST_ROWS", 192)
    monkeypatch.setattr(lstm_streamed, "LAUNCHES", 99)
    monkeypatch.setattr(deal, "TO_JOIN", -5 if size == B and hidden % 8 else 12)  # then CUT is
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    monkeypatch.setattr(lstm_streamed, "MOST_INPUTS", 2.0)
    precision = "highest" if dtype == "exact" else "high"
    dtype = "float32" if dtype == "exact" else dtype
    exact, kept = draw(rng, dtype, inputs, hidden, batch, True, steps, meets, size)
    to = as_dtype(dtype)

    def put(a, to=to):
        a = a.astype(to)
        return a.to("cuda") if isinstance(a, ns.BlockSparse) else ns.to_device(a)

    x, weight_ih, weight_hh, bias, h = map(put, exact[:5])
    c, kept_ = put(exact[5], np.float32), None if kept is None else put(kept)
    hs = put(np.zeros((steps + 1, batch, hidden)))
    streams = lstm_streamed.streamed(weight_hh, hs, precision)
    if streams is None:
        pytest.skip("takes a GPU of compute capability 9.0, or the simulator")
    assert streams.takes(x, weight_ih) == (
        meets and inputs % B == 0 and size == B and precision == "high"
    )
    cells = ops.LSTMCells(weight_hh, bias, weight_ih, kept=kept_, precision=precision)
    trace = ops.lstm(x, cells, h, c)
    dy = [rng.standard_normal(shape) for shape in (trace.h[1:].shape, h.shape, h.shape)]
    given = [put(a, kind) for a, kind in zip(dy, (to, to, np.float32), strict=True)]
    before = trace.gates.numpy()
    grads = ops.lstm_grad(trace, cells, *given, in_place=kept is None)
    assert (grads.gates is trace.gates) == (kept is None)
    if kept is not None:
        np.testing.assert_array_equal(trace.gates.numpy().view("u1"), before.view("u1"))
    dh = ops.matmul(grads.gates[0], weight_hh.T, precision=precision)
    got = trace.h[1:], trace.c[-1], grads.bias, dh, grads.c

    monkeypatch.setattr(lines, "pays", lambda *_: 0)  # which would compile four kernels for this
    tensors = [ns.Tensor(a, requires_grad=i > 2) for i, a in enumerate(exact)]
    y, h_end, c_end = F.lstm_step_by_step(*tensors, kept=kept)
    ((y * dy[0]).sum() + (h_end * dy[1]).sum() + (c_end * dy[2]).sum()).backward()
    expected = y.data, c_end.data, *(tensor.grad.data for tensor in tensors[3:])
    # A few roundings a step, each of at most eps of numbers near 1, and as many sums as units; a
    # float32 is cut off to tf32, which has float16's mantissa.
    wide = np.float32 if precision == "highest" and dtype == "float32" else np.float16
    eps = float(finfo(to if dtype in HALVES else wide).eps)
    bound = 4 * steps * eps * np.sqrt(hidden)
    for a, b in zip(got, expected, strict=True):
        assert abs(a.numpy().astype(float) - b).max() <= bound * max(1, abs(b).max())
    columns = grads.gates.numpy().reshape(steps, batch, -1, 4, size)
    beyond = np.moveaxis(columns, 3, 2).reshape(steps, batch, 4, -1)[..., hidden:]
    np.testing.assert_array_equal(beyond.astype(float), 0)


@pytest.mark.parametrize(
    ("dtype", "batch", "tile", "join", "waits"),
    [
        (HALVES[0], 32, 32, 12, False),
        (HALVES[0], 64, 64, -5, True),
        (HALVES[0], 64, 32, 12, True),
        ("float32", 32, 32, 12, True),
    ],
    ids=["without waiting", "cut lines", "two half tiles", "float32, whose rows lanes read"],
)
def test_steps_wait_for_what_they_take(rng, monkeypatch, dtype, batch, tile, join, waits):
    """Of whole tiles; rows beyond the batch are copied as they come and left out."""
    if not ns.device.SIMULATED:
        pytest.skip("races are found in the simulator")
    monkeypatch.setattr(lstm_streamed, "FEW_STEPS", 2)
    monkeypatch.setattr(deal, "rows_of_tile", lambda *of: tile)
    monkeypatch.setattr(deal, "TO_JOIN", join)
    made: list[deal.Plan] = []

    def planned(*args):
        made.append(deal.deal(*args))
        return made[-1] if waits else made[-1]._replace(awaited=0 * made[-1].awaited)

    monkeypatch.setattr(steps_kernels, "deal", planned)
    exact, _ = draw(rng, dtype, B, 2 * B, batch, False)

    def put(a, to=dtype):
        a = a.astype(as_dtype(to))
        return a.to("cuda") if isinstance(a, ns.BlockSparse) else ns.to_device(a)

    x, weight_ih, weight_hh, bias, h = map(put, exact[:5])
    precision = "highest" if dtype == "float32" else "high"
    cells = ops.LSTMCells(weight_hh, bias, weight_ih, precision=precision)

    def run():
        trace = ops.lstm(x, cells, h, put(exact[5], "float32"))
        ops.lstm_grad(trace, cells, trace.h[1:], None, None)

    assert (races(run) == []) == waits
    assert any((plan.pieces[:, 4] > 1).any() for plan in made) == (join < 0)


@pytest.mark.parametrize(("dtype", "units"), [(HALVES[0], 24), ("float32", 24), (HALVES[0], 19)])
def test_what_blocks_hold_beyond_the_last_unit_is_never_read(rng, monkeypatch, dtype, units):
    monkeypatch.setattr(lstm_streamed, "FEW_STEPS", 2)
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    to, ends = as_dtype(dtype), []
    values, x = rng.standard_normal((4, B, B)), rng.standard_normal((2, 1, B))
    for beyond in (0, np.nan):
        values[:, units:] = values[:, :, units:] = beyond
        w = ns.BlockSparse(values.astype(to), np.ones((1, 4)), shape=(units, 4 * B)).to("cuda")
        h, bias = (ops.zeros(shape, to, "cuda") for shape in ((1, units), (4 * B,)))
        c = ops.zeros(h.shape, "float32", "cuda")
        weight_ih = ns.BlockSparse(ops.inside(w), w.layout)
        cells = ops.LSTMCells(w, bias, weight_ih, precision="high")
        trace = ops.lstm(ns.to_device(x.astype(to)), cells, h, c)
        grads = ops.lstm_grad(trace, cells, trace.h[1:], None, None)
        ends.append([a.numpy().astype(float) for a in (trace.h, grads.gates, grads.c, grads.bias)])
    assert ends[0][0][1:].all()
    for without, with_nan in zip(*ends, strict=True):
        np.testing.assert_array_equal(without, with_nan)


@pytest.mark.parametrize("places", [1, 3, 50])
@pytest.mark.parametrize(
    ("transposed", "itemsize"),
    [(False, 2), (True, 2), (True, 4)],
    ids=["columns", "rows", "half rows"],
)
@pytest.mark.parametrize("tiles", [1, 3])
def test_lines_are_dealt_evenly(rng, places, transposed, itemsize, tiles):
    few = deal.few_of(transposed, itemsize)
    pattern = rng.random((9, 9)) < 0.4
    pattern[:, 4] = pattern[2] = False
    pattern[:, 5] = pattern[3] = True
    index = ns.Layout(np.repeat(pattern, 4, axis=1)).index
    starts, pieces, read_starts, reads, awaited, partials, tickets = deal.deal(
        index, places, transposed, itemsize, 10, tiles
    )
    line, count, part, first_part, many, top, ends = pieces.T
    item = top // 64 * 9 + line  # a line of a tile
    lengths = np.tile(pattern.sum(1 if transposed else 0) * (4 // few), tiles)
    np.testing.assert_array_equal(np.bincount(item, count), lengths)
    np.testing.assert_allclose(np.bincount(item, 1 / many), 1)
    cut = many > 1
    assert sorted(part[cut]) == list(range(cut.sum()))
    assert (part - first_part < many)[cut].all()
    assert (part >= first_part)[cut].all()
    parts = max(cut.sum(), 1)
    assert (partials.size, tickets.size) == (10 * parts, deal.WARPS * parts)

    of_line, reads = np.repeat(line, count), reads[:-1]
    np.testing.assert_array_equal(reads[:, 2], np.repeat(top, count))
    np.testing.assert_array_equal(reads[:, 1], 1)
    row, column = (of_line, reads[:, 3]) if transposed else (reads[:, 3], 4 * of_line)
    assert len({*zip(reads[:, 2], row, column, strict=True)}) == lengths.sum()
    np.testing.assert_array_equal(index.block_rows[reads[:, 0]], row)
    np.testing.assert_array_equal(index.block_columns[reads[:, 0]], column)

    taken = [count[a:b].sum() for a, b in pairwise(starts)]
    np.testing.assert_array_equal(np.diff(read_starts), taken)
    assert max(taken) <= -(-lengths.sum() // places) + count.max()

    place = np.repeat(np.arange(places), np.diff(starts))
    told = {(p, t) for p, t in zip(place, top // 64, strict=True)}
    assert sorted(zip(place[ends != 0], top[ends != 0] // 64, strict=True)) == sorted(told)
    assert ((np.diff(top) >= 0) | (np.diff(place) > 0)).all()
    np.testing.assert_array_equal(awaited, np.bincount([t for _, t in told], minlength=tiles))


def test_reads_of_inputs_come_first_and_wait_for_nothing(rng):
    """Inputs are rows below those of the lines: blocks and rows of their own, counted down."""
    of_h, of_x = rng.random((7, 7)) < 0.4, rng.random((2, 7)) < 0.7
    of_h[:, 3] = False  # a line of inputs alone, or of nothing
    index, apart = (
        ns.Layout(np.repeat(pattern, 4, axis=1)).index
        for pattern in (np.concatenate([of_h, of_x]), of_x)
    )
    _, pieces, _, reads, *_ = deal.deal(index, 3, False, 2, 10)
    count = pieces[:, 1]
    block, waits, _, row = reads[: count.sum()].T
    inputs, line = row < 0, np.repeat(pieces[:, 0], count)
    np.testing.assert_array_equal(inputs, block < 0)
    assert (inputs.sum(), (~inputs).sum()) == (of_x.sum(), of_h.sum())
    np.testing.assert_array_equal(apart.block_rows[~block[inputs]], ~row[inputs])
    np.testing.assert_array_equal(apart.block_columns[~block[inputs]], 4 * line[inputs])
    ends = np.cumsum(count)[count > 0] - 1
    assert (waits[ends] == 1).all()
    within = np.delete(np.arange(waits.size), ends)
    np.testing.assert_array_equal(waits[within] == 0, inputs[within])
    assert all((np.diff(waits[a:b]) >= 0).all() for a, b in pairwise([0, *(ends + 1)]))


def test_more_sequences_are_streamed_where_each_line_has_a_place(monkeypatch):
    monkeypatch.setattr(deal, "places", lambda: 6)
    values = ns.to_device(np.zeros((16, B, B), np.float32))
    index = ops.index_beside(ns.Layout(np.ones((2, 8), bool)), values)
    here = deal.SIMULATED or deal.compute_capability() == (9, 0)
    monkeypatch.setattr(deal, "CROWDED", 1)
    for units, batch, streamed in ((64, 192, True), (64, 193, False), (32, 384, True)):
        monkeypatch.setattr(deal, "MOST_ROWS", 190)
        assert deal.serves(values, index, batch, units) == (streamed and here)


def test_few_lines_have_a_multiprocessor_each(monkeypatch):
    """And all its stages; what is exact has one anyway."""
    monkeypatch.setattr(deal, "places", lambda: 8)
    for units, batch, exact, alone in (
        (64, 96, False, False),
        (64, 64, False, True),
        (160, 3, False, True),
        (192, 3, False, False),
        (64, 64, True, True),
    ):
        ring = producers.ring_for(False, 4 if exact else 2, exact, batch, units, B)
        assert (1 if alone else 2) == ring.BLOCKS


def test_lines_of_tf32_one_after_another_are_stored_first(monkeypatch):
    monkeypatch.setattr(deal, "places", lambda: 8)
    ring_for = producers.ring_for
    assert ring_for(False, 4, False, 3, 288, B).rest_first
    assert not ring_for(False, 4, False, 3, 256, B).rest_first
    for transposed, itemsize, exact in ((True, 4, False), (False, 2, False), (False, 4, True)):
        assert not ring_for(transposed, itemsize, exact, 3, 288, B).rest_first


@pytest.mark.parametrize(
    ("size", "soon", "streamed"), [(16, 9, True), (16, 8, False), (64, 0, True)]
)
def test_small_blocks_are_put_together_where_steps_end_soon(monkeypatch, size, soon, streamed):
    """Of 64 units two lines of two reads each, in two places: twice so many and what begins and
    ends, of half a microsecond each, beside what products are expected to take."""
    monkeypatch.setattr(deal, "places", lambda: 2)
    monkeypatch.setattr(deal, "TO_BEGIN_AND_END", 7)
    monkeypatch.setattr(deal, "A_READ", {1: 0.5, 2: 0.5})
    monkeypatch.setattr(lstm_streamed, "LAUNCHES", soon - 4)
    monkeypatch.setattr(lstm_streamed.times, "expected", lambda *_: {"k1": 2, "k2": 99})
    pattern = np.ones((64 // size, 4 * 64 // size), bool)
    values = np.zeros((pattern.sum(), size, size), as_dtype(HALVES[0]))
    if not ns.device.is_available():
        pytest.skip(ns.device.why_unavailable())
    w, hs = ns.BlockSparse(values, pattern).to("cuda"), ops.zeros((9, 3, 64), values.dtype, "cuda")
    here = deal.SIMULATED or deal.compute_capability() == (9, 0)
    assert (lstm_streamed.streamed(w, hs, "high") is not None) == (streamed and here)


def test_gates_of_different_layouts_are_not_streamed():
    """A read loads the adjacent blocks of a unit's four gates."""
    pattern, values = np.ones((2, 8), bool), ns.to_device(np.zeros((15, B, B), np.float32))
    alike = ns.Layout(pattern)
    pattern[0, 2] = False
    for layout, streamed in ((alike, True), (ns.Layout(pattern), False)):
        index = ops.index_beside(layout, values)
        here = deal.SIMULATED or deal.compute_capability() == (9, 0)
        assert deal.serves(values, index, 3, 2 * B) == (streamed and here)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("size", [8, 16, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_reads_of_other_blocks_are_the_weight(rng, size, itemsize, transposed):
    """Each block of a read, times what its read names, added to its line: the dense product."""
    n = 12 if size < 64 else 3
    pattern = rng.random((n, n)) < 0.3
    pattern[:, 3 % n], pattern[0, 1] = False, True
    layout = ns.Layout(np.repeat(pattern, 4, axis=1))
    w = ns.BlockSparse(rng.standard_normal((layout.n_blocks, size, size)), layout)
    few = deal.few_of(transposed, itemsize)
    _, pieces, _, reads, *_ = deal.deal(layout.index, 3, transposed, itemsize, 9, size=size)
    (parts,) = weights.parts_of(layout.index, size, transposed, itemsize)
    side = min(size, B)
    places = np.add.outer(size * np.arange(side), np.arange(side))
    values = np.where(
        parts[..., None, None] < 0, 0, w.values.ravel()[parts[..., None, None] + places]
    )
    values = values.reshape(-1, B // side, B // side, side, side).swapaxes(2, 3).reshape(-1, B, B)

    line, reads = np.repeat(pieces[:, 0], pieces[:, 1]), reads[:-1]
    names = reads[:, 3:]
    one, width = (4 * (B // itemsize), few * B) if transposed else (B // itemsize, B)
    apart, across = (one, width // one) if size < B else (B, 1)
    assert names.shape[1] == across
    x = np.pad(rng.standard_normal(w.shape[transposed]), (0, width))
    terms = x[names[:, :, None] * apart + np.arange(width // across)].reshape(len(reads), -1, B)
    sums = np.zeros((n * size // B, *((B,) if transposed else (4, B))))
    own = values[reads[:, :1] + np.arange(few)]
    np.add.at(sums, line, np.einsum("rgij,rgj->ri" if transposed else "rgij,rgi->rgj", own, terms))
    expected = w.toarray() @ x[:-width] if transposed else x[:-width] @ w.toarray()
    if not transposed:
        expected = expected.reshape(n, 4, size).swapaxes(0, 1).reshape(4, -1)
        sums = sums.swapaxes(0, 1).reshape(4, -1)
    np.testing.assert_allclose(sums.ravel(), expected.ravel(), atol=1e-12)
