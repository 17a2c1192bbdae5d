"""What k8_small_batch plans and chooses: shares of lines, warps, rows of a tile, stages."""

import itertools
import math

import numpy as np
import pytest
from ptx_helpers import needs_ampere

import numbsparse as ns
from numbsparse import device
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.matmul import PRODUCTS
from numbsparse.kernels.matmul import k8_small_batch as rung
from numbsparse.kernels.matmul.k8_small_batch import blocks, lines
from numbsparse.kernels.matmul.k8_small_batch import launch as launches
from numbsparse.kernels.matmul.k8_small_batch.blocks import plan_blocks
from numbsparse.kernels.matmul.k8_small_batch.plan import READ_AHEAD, lines_of, plan_lines
from numbsparse.kernels.parts import shares as cutting
from numbsparse.kernels.parts.ring import Source
from numbsparse.kernels.parts.store import ANY
from numbsparse.kernels.parts.store_lines import Sums
from numbsparse.kernels.parts.tiles import Form, Operand


def units_of(plan, sections, together):
    """(units as rows of numbers, cuts) of a plan for lines."""
    units = plan[: sections.counts].reshape(-1, 2 * together + 2)
    return units[:-READ_AHEAD], plan[sections.cuts : sections.empty].reshape(-1, 3)


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
    how = index, transposed, size, 29, 2, 100
    plan, each, sections, empty, _, tickets = plan_lines(*how, unit=10.0)  # that cutting pays
    together, cut = max(32 // size, 1), max(size // 32, 1)
    units, cuts = units_of(plan, sections, together)
    assert len(units) == 29 * 2 * each
    shares = (units[:, -1].reshape(29, 2 * each) > 0).sum(1)
    counts = plan[sections.counts : sections.cuts].reshape(29, 2)
    np.testing.assert_array_equal(abs(counts).sum(1), shares)
    assert np.isin(abs(counts[:, 0]) - abs(counts[:, 1]), (0, 1)).all()
    firsts, lasts = (
        units.reshape(29, 2, each, -1)[:, 1, 0, -1],
        units.reshape(29, 2, each, -1)[np.arange(29), 0, abs(counts[:, 0]) - 1, -1],
    )
    np.testing.assert_array_equal(counts[:, 1] < 0, (counts[:, 1] != 0) & (firsts == lasts))
    units = units[units[:, -1] > 0]
    places = units[:, 0 : 2 * together : 2]
    squares = np.sort(squares_at(places[places >= 0], size))
    np.testing.assert_array_equal(squares, np.arange(pattern.sum() * cut * cut))
    assert shares.max() <= 1.5 * shares.mean()
    assert empty == cut
    assert tickets.size == len(cuts) > 1
    names = units[:, -2]
    lines = names.copy()
    lines[names < 0] = cuts[-1 - names[names < 0], 0]
    mine = index.block_rows if transposed else index.block_columns
    for unit, line in zip(units, lines, strict=True):
        for place in unit[0 : 2 * together : 2]:
            if place >= 0:
                assert mine[32 * place // size**2] == line // cut


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_the_map_of_w_has_a_square_at_its_place(size, dtype, rng):
    w = rng.standard_normal((3, size, size)).astype(dtype)
    squares, box = launches.squares_of(device.to_device(w))
    of_place = np.lib.stride_tricks.as_strided(w, squares.shape, squares.strides)
    _, _, places = lines_of(ns.Layout([[1, 1, 1]]).index, False, size)
    blocks = w.reshape(3, size // 32, 32, size // 32, 32).swapaxes(2, 3).reshape(-1, 32, 32)
    assert box == (squares.shape[0], 1, squares.shape[2])
    assert box[2] * w.itemsize == (128 if size == 32 else 32 * w.itemsize)
    assert places.max() < squares.shape[1] == w.size // 32
    for place, number in zip(places, squares_at(places, size), strict=True):
        np.testing.assert_array_equal(of_place[:, place].reshape(32, 32), blocks[number])


@pytest.mark.parametrize(("rows", "warps"), [(16, 1), (1600, 2)])
def test_few_units_have_half_as_many_warps(rows, warps):
    x, y = (device.empty((rows, 64), np.float16) for _ in range(2))
    values, form = device.empty((20, 8, 8), np.float16), Form("float16", False)
    how = False, form, Source(False, 0, True), False
    assert launches._lines(x, values, y, *how).warps == warps * launches.WARPS


@pytest.mark.parametrize(("longest", "unit", "parts"), [(30, 0.3, 1), (30, 0.9, 4), (99, 0.3, 4)])
def test_a_line_is_cut_where_that_ends_sooner(longest, unit, parts):
    pattern = np.zeros((100, 3), bool)
    pattern[:longest, 0] = pattern[7, 1] = True
    index = ns.Layout(pattern).index
    *_, tickets = plan_lines(index, False, 32, 132, 8, 100, unit=unit)
    assert tickets.size == parts


def test_pieces_are_whole_lines_and_parts_of_longer_ones_than_a_share(rng):
    counts = rng.integers(0, 30, 200)
    counts[[5, 70]] = 400, 900
    line, first, units, many, share = cutting.pieces_of(counts, 20, 8, unit=1.0)
    assert set(line[many > 1]) == {5, 70}
    np.testing.assert_array_equal(np.bincount(line, units, 200), counts)
    for own in (line == k for k in np.flatnonzero(counts)):
        np.testing.assert_array_equal(first[own], np.cumsum(units[own]) - units[own])
        assert (many[own] == own.sum()).all()
    loads = np.bincount(share, units, 20)
    assert loads.max() <= 1.1 * loads.mean()


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


@pytest.mark.parametrize("warps", [8, 24, 1056])
def test_no_more_warps_than_steps_and_places(warps):
    """And no fewer: of one block of threads twice as many, of several another one."""

    def fits(split, cuts):
        """Steps of each warp are two, or of several blocks of threads as many as there are."""
        all_of = split * cuts
        return all_of * units <= warps and all_of * max(cuts, 2) <= steps + 1

    for units, steps in itertools.product((1, 3, 5, 35, 66, 1000, 2000), (1, 2, 3, 7, 12, 256)):
        split, cuts = blocks.split_of(steps, units, warps)
        assert split in (1, 2, 4, launches.WARPS)
        assert (split, cuts) == (1, 1) or fits(split, cuts)
        assert not (fits(split, cuts + 1) if split == launches.WARPS else fits(2 * split, 1))


def test_a_step_of_a_weight_grad_has_two_tiles_where_that_pays():
    plain, exact, half = Form("float32", False), Form("float32", True), Form("float16", False)
    for batch in (1, 32, 65):
        assert blocks.tiles_of(batch, True, half, 4.0) == 1
    assert blocks.tiles_of(33, False, half, 4.0) == 1
    for batch, units in itertools.product((33, 64), (0.3, 1.0, 4.0, launches.FEW)):
        assert blocks.tiles_of(batch, True, half, units) == 2
        assert blocks.tiles_of(batch, True, exact, units) == (2 if units == launches.FEW else 1)
        assert blocks.tiles_of(batch, True, plain, units) == (1 if units == 1 else 2)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("size", [8, 16, 32, 128])
def test_tiles_are_longer_where_there_are_many(size, dtype, monkeypatch):
    monkeypatch.setattr(launches, "MANY", 4)
    monkeypatch.setattr(launches, "n_shares", lambda: 10)
    monkeypatch.setattr(launches, "WARPS", 2)
    form = Form(dtype, dtype == "float32")
    most = {8: 80 if form.is_16_bit else 20}.get(size, 40 if form.is_16_bit else 2**30)
    units = 0 if form.is_16_bit else 10 * launches.WARPS + 1  # more than warps have one of
    squares = -(-units * min(size, 32) // 32)
    batches = (1, 17, 32, 33, 64, 65, 96, 97, 1000)
    for batch, n in itertools.product(batches, (3, 10, 11, 20, 40, 100)):
        three = 64 < batch <= 96 and not (form.is_16_bit and size == 8)
        for across in (False, True):
            rows = launches.tile_rows(batch, n, squares, size, form, across)
            if size == 8 and batch == 65 and form.split and not across:
                assert rows == 24
            elif batch > 32:
                assert rows == (32 if three or n * math.ceil(batch / 32) <= most else 64)
                much = launches.tile_rows(batch, 1, 2**20, size, form, True)
                longer = form.is_16_bit and size > 8 and not three
                assert much == (64 if longer else 32) or batch == 1000
            else:
                assert rows == (16 if batch <= 16 and not across else 32)


def test_tiles_of_float32_are_as_long_only_in_long_batches_on_cards_before_hopper(monkeypatch):
    monkeypatch.setattr(launches, "shared_memory", lambda: 163 * 1024)
    monkeypatch.setattr(launches, "n_shares", lambda: 10)
    half, form = Form("float16", False), Form("float32", False)
    for batch, rows in ((128, 32), (129, 32), (992, 32), (1024, 64), (1025, 32), (1088, 64)):
        assert launches.tile_rows(batch, 900, 900, 8, form, False) == rows
        assert launches.tile_rows(batch, 900, 900, 8, half, False) == 64
        assert launches.tile_rows(batch, 900, 200, 8, form, False) == 64  # lines of no unit


@pytest.mark.parametrize("size", [8, 16, 64])
def test_16_bit_tiles_are_shorter_where_several_warps_leave_some_of_a_line(size, monkeypatch):
    """1,000 rows of 60 units: more of them in a line only shorten what was long."""
    monkeypatch.setattr(launches, "n_shares", lambda: 132)
    monkeypatch.setattr(launches, "WARPS", 8)
    half, squares = Form("float16", False), 60 * min(size, 32) // 32

    def rows_of(longest, form=half, lines=60):
        return launches.tile_rows(1000, lines, squares, size, form, False, longest)

    assert rows_of(launches.NEAR) == rows_of(1) == rows_of(4) == 64
    assert rows_of(40) == (32 if size > 8 else 64)
    assert rows_of(40, lines=1) == rows_of(4, lines=1) == 32
    full = Form("float32", False)
    assert rows_of(40, full) == rows_of(launches.NEAR, full)


@pytest.mark.parametrize("units", [1, 30, 200])
@pytest.mark.parametrize("longest", [1, 9, 30])
def test_the_longest_run_from_numbers_is_that_of_the_plan(units, longest):
    shares, warps, unit = 4, 8, 0.5
    longest = min(longest, units)
    counts = np.array([longest, *[1] * (units - longest)])
    each, others, cut = cutting.longest_run(units, longest, shares, warps, unit)
    work = cutting.spread(counts, shares, warps, unit)
    assert abs(work.each - each) <= 1
    assert cut == max(len(work.cuts), 1)
    assert 0 <= others < warps


@pytest.mark.parametrize("size", [8, 16, 64])
def test_split_tiles_of_few_rows_are_shorter(size, monkeypatch):
    """Where no tile needs more rows, and lines of y are long; of blocks of 8 where three do not."""
    monkeypatch.setattr(launches, "n_shares", lambda: 3)
    lines, split, plain = 10, Form("float32", True), Form("float32", False)
    squares = 8 * lines * min(size, 32) // 32  # eight units in a line
    others = (32,) if size > 8 else (32, 64)
    for batch in range(33, 200):
        few = 65 <= batch <= 72 or (batch <= 48 and size > 8)
        rows = launches.tile_rows(batch, lines, squares + 1, size, split, False)
        assert rows in ((24,) if few else others)
        short = launches.tile_rows(batch, lines, squares, size, split, False)
        assert short in ((24,) if few and size == 8 else others)
        assert launches.tile_rows(batch, lines, squares + 1, size, split, True) in others
        assert launches.tile_rows(batch, lines, squares + 1, size, plain, False) in others


@pytest.mark.parametrize("size", [8, 16, 64])
def test_split_tiles_have_16_rows_where_no_warp_has_two_units(size, monkeypatch):
    monkeypatch.setattr(launches, "n_shares", lambda: 100)
    split, plain = Form("float32", True), Form("float32", False)
    for batch in range(17, 130):
        units = 100 * launches.WARPS // -(-batch // 16)
        squares = units * min(size, 32) // 32
        assert launches.tile_rows(batch, 1, squares, size, split, False) == 16
        for more in ((squares + 1, split, False), (squares, split, True), (squares, plain, False)):
            assert launches.tile_rows(batch, 1, more[0], size, *more[1:]) > 16


@needs_ampere
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("size", [8, 32])
def test_large_batches_are_refused(product, size):
    case = product, size, as_dtype("float32"), "cuda"
    assert rung.unsupported(*case, 2**19) is None
    reason = rung.unsupported(*case, 2**19 + 1)
    assert reason == "k8_small_batch takes batches up to 524288, got 524289"


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


@pytest.mark.parametrize("nbytes", [101_376, 166_912, 232_448])  # of RTX cards, A100 and H100
@pytest.mark.parametrize(
    "form", [Form("float16", False), Form("float32", False), Form("float32", True)]
)
def test_a_stage_fits_in_the_shared_memory_of_any_card(form, nbytes, monkeypatch):
    monkeypatch.setattr(launches, "WARPS", 8)  # as on a card
    monkeypatch.setattr(launches, "MANY", 6)
    monkeypatch.setattr(launches, "shared_memory", lambda: nbytes)
    monkeypatch.setattr(launches, "copy_engine", lambda: nbytes == 232_448)
    drawn, found = ((8, 16, 32, 64), (9, 24, 33, 101), (False, True), (0, 3)), set()
    for size, rows, feature_major, ends in itertools.product(*drawn):
        values = ns.to_device(np.zeros((4, size, size), form.dtype))
        shapes = ((rows, n)[:: -1 if feature_major else 1] for n in (2 * size - ends, 64))
        x, y = (ns.to_device(np.zeros(shape, form.dtype)) for shape in shapes)
        if feature_major:
            x, y = x.T, y.T
        source = launches.source_of(launches.serves(x, values), size, x)
        for gated in (False, True):
            made = launches._lines(x, values, y, False, form, source, gated)
            assert made.source.stages > 0
            assert made.shared_bytes <= nbytes - launches.BARRIERS
            found.add(made.warps)
    assert found <= {4, 8, 16}
