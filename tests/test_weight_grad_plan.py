"""What the Hopper weight-gradient works out of a layout: every block once, every tile in place."""

import numpy as np
import pytest

from numbsparse import patterns
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import (
    TO_START,
    Tile,
    cut,
    cut_of,
    plan,
    tables_of,
    ways_of,
)
from numbsparse.kernels.parts import regions
from numbsparse.kernels.parts.deal import dealt
from numbsparse.layout import Layout

LARGE = Tile(32, 2, 13, 32, 32, 2, 56, 1)
OF_64 = Tile(64, 2, 6, 64, 64, 3, 9, 1)
TILES = [
    Tile(32, 4, 4, 32, 32, 3, 37, 1),
    Tile(32, 4, 4, 32, 32, 4, 27, 1),
    LARGE,
    Tile(32, 1, 2, 32, 32, 3, 5, 1),
    Tile(32, 2, 8, 32, 64, 2, 27, 1),
    OF_64,
    Tile(64, 1, 2, 64, 64, 3, 3, 1),
    Tile(128, 2, 2, 128, 64, 4, 6, 1),
    Tile(128, 2, 2, 128, 64, 4, 6, 2),
]
CHUNKS = 64
STEPS = 512  # so long that a cut pays


def layouts(rng):
    yield Layout(rng.random((40, 50)) < 0.1)
    yield Layout(rng.random((30, 45)) < 0.6)
    yield Layout(np.eye(20, dtype=bool))
    yield Layout(np.ones((3, 90), dtype=bool))
    yield Layout(rng.random((21, 29)) < 0.95)
    yield Layout(np.ones((15, 22), dtype=bool))
    yield Layout(np.zeros((4, 5), dtype=bool))
    one = np.zeros((50, 50), dtype=bool)
    one[7, 31] = True
    yield Layout(one)


def products(tile, shape, heads, loads, places, outs, work):
    """(block, panel of x, panel of dy) as the tensor cores would multiply them in one block."""
    rank, first = work % tile.CLUSTER, work - work % tile.CLUSTER
    step = tile.PANEL_BYTES >> 4
    slots = {}
    for other in range(first, first + tile.CLUSTER):
        for panel, code in loads[other, : heads[other, 2]]:
            operand, slot = code >> 8 & 0xFF, code & 0xFF
            if code >> 16 >> rank & 1:
                assert slot not in slots
                assert slot < tile.SLOTS
                assert 0 <= panel < shape[operand]
                slots[slot] = ("x", "dy")[operand], int(panel)
    assert len(slots) == heads[work, 3]
    for group in range(tile.GROUPS):
        number, words = places[work, group, 0], places[work, group, 1:].reshape(-1, 2)
        starts, apart = (words & 0x3FFF) // step, (words >> 16) // step
        if tile.B == 32:
            for unit in range(number):
                for half in range(2):
                    block = outs[work, group, 2 * unit + half]
                    if block >= 0:
                        dy = slots[starts[unit, 0] + half * apart[unit, 0]]
                        yield block, slots[starts[unit, 1]], dy
        else:
            for unit in range(number):
                for p in range(tile.B // 64):
                    dy = slots[starts[unit, 1] + p * apart[unit, 1]]
                    yield outs[work, group, unit], slots[starts[unit, 0]], dy


@pytest.mark.parametrize(
    "tile",
    TILES,
    ids=lambda tile: f"B{tile.B}-{tile.SLOTS}slots-{tile.STAGES}-cluster{tile.CLUSTER}",
)
def test_every_block_is_computed_from_its_tiles(tile, rng):
    for layout in layouts(rng):
        index, parts = layout.index, tile.B // tile.PANEL
        panels = tuple(n * parts for n in layout.shape)
        *tables, blocks, _, _ = plan(index, tile, CHUNKS, 8)
        heads = tables[0]
        steps = np.zeros((layout.n_blocks, parts, parts), int)
        for work in range(heads.shape[0]):
            for block, x, dy in products(tile, panels, *tables, work):
                if heads[work, 4]:
                    block = blocks[block % blocks.size]
                row, column = index.block_rows[block], index.block_columns[block]
                assert (x[0], x[1] // parts) == ("x", row)
                assert (dy[0], dy[1] // parts) == ("dy", column)
                steps[block, x[1] % parts, dy[1] % parts] += heads[work, 1]
        assert (steps == CHUNKS).all()


@pytest.mark.parametrize("tile", [TILES[0], TILES[-1]], ids=["alone", "cluster"])
def test_pieces_cover_the_batch_in_order(tile, rng):
    layout = Layout(rng.random((20, 20)) < 0.2)
    heads, _, _, outs, blocks, (pieces, step), sums = plan(layout.index, tile, STEPS, 132)
    assert pieces > 1
    assert (step, sums) == (blocks.size, pieces * blocks.size)
    pieces_of = {}
    for head, out in zip(heads, outs, strict=True):
        for at in out[out >= 0] if head[4] else ():
            pieces_of.setdefault(at % blocks.size, {})[at // blocks.size] = head[:2]
    assert sorted(pieces_of) == list(range(blocks.size))
    for found in pieces_of.values():
        ends = 0
        for piece in range(pieces):
            first, steps = found[piece]
            assert first == ends
            ends += steps
        assert ends == STEPS


@pytest.mark.parametrize(("processors", "most"), [(132, 1), (8, 2)])
def test_large_blocks_are_taken_one_by_one_where_places_would_be_left(processors, most):
    layout = Layout(np.ones((8, 8), bool))
    _, _, _, outs, *_, sums = plan(layout.index, TILES[-1], 2, processors)
    assert sums == 0
    assert (outs >= 0).sum(2).max() == most


def tables_in_regions(layout, tile, most):
    """(panels that arrive, places, outs) of each block of threads."""
    (items,) = regions.regions(layout.index, tile.SLOTS, tile.PAIR, [most])
    order = np.arange(items.lines.size)
    heads, _, places, outs = tables_of(layout.index, tile, items, order)
    np.testing.assert_array_equal(heads[:, 1], items.lines)  # as `cut_of` expects
    return heads[:, 1], places, outs


def test_rows_with_the_same_columns_share_their_tiles():
    banded, rng = patterns.banded(128, 128, width=8), np.random.default_rng(0)
    shuffled = banded[rng.permutation(128)]
    read, read_shuffled, read_random = (
        tables_in_regions(Layout(pattern), LARGE, 26)[0].sum()
        for pattern in (banded, shuffled, rng.permuted(banded, axis=1))
    )
    assert read_shuffled < 1.15 * read
    assert read < 0.7 * read_random


@pytest.mark.parametrize(
    ("tile", "share"),
    [(TILES[0], 0.75), (LARGE, 0.7), (OF_64, 1.0)],
    ids=["B32", "B32 large", "B64"],
)
def test_regions_share_more_than_rows(tile, share, rng):
    layout, most = Layout(rng.random((128, 128)) < 0.1), tile.GROUPS * tile.UNITS
    arriving, places, _ = tables_in_regions(layout, tile, most)
    products = places[..., 0].sum(1)
    assert arriving.sum() < share * layout.n_blocks
    assert products.max() <= most
    assert layout.n_blocks <= products.sum() * tile.PAIR < 1.1 * layout.n_blocks


def test_regions_of_many_lines_are_found_part_by_part(rng, monkeypatch):
    monkeypatch.setattr(regions, "PART", 7)
    monkeypatch.setattr(regions, "MOST", 8)
    pattern = rng.random((40, 8)) < 0.2
    pattern[14:21] = False  # a part without blocks
    layout = Layout(np.hstack([pattern, rng.random((40, 22)) < 0.2]))
    _, _, outs = tables_in_regions(layout, LARGE, 26)
    assert sorted(outs[outs >= 0]) == list(range(layout.n_blocks))
    down, across = (regions.parts_of(n) for n in (40, 30))
    assert (np.diff(down).max(), np.diff(across).max()) == (7, 6)
    for item in outs.reshape(len(outs), -1):
        blocks = item[item >= 0]
        for ends, lines in ((down, layout.index.block_rows), (across, layout.index.block_columns)):
            assert len({*np.searchsorted(ends, lines[blocks], "right")}) == 1


@pytest.mark.slow
def test_cut_fills_the_places():
    tile, steps = TILES[-2], 256
    index = Layout(np.ones((1, 26), bool)).index
    (items,) = ways_of(index, tile, 8)

    def cut_of_copies(n, steps):
        each, lines = items.starts[1], items.lines[:1].repeat(n)
        of = regions.Items(np.arange(n * each), np.arange(n + 1) * each, lines)
        return cut_of(of, 27, 8, steps, tile)[1:3]

    assert cut_of_copies(8, steps) == (8, 1)
    whole, pieces = cut_of_copies(9, steps)
    assert whole == 8
    assert pieces > 1
    whole, pieces = cut_of_copies(3, steps)
    assert whole == 0
    assert pieces > 1
    assert cut_of_copies(3, 2)[1] == 1  # too short


@pytest.mark.parametrize("items", [3, 8, 21])
def test_no_cut_ends_before_the_one_that_is_chosen(items, rng):
    times, steps, to_add = np.sort(rng.random(items))[::-1] + 0.5, 64, 16.0
    for sums, least in ((0, 0.0), (2000, 0.0), (100, 60.0)):
        ends = {}
        for pieces in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16):
            whole, rest = np.split(times * steps, [items // 8 * 8])
            parts = np.append(whole, np.tile(rest / pieces, pieces))
            adding = to_add + sums * pieces / 100 if pieces > 1 else 0
            ends[pieces] = max(least, dealt(parts + TO_START, 8)[1]) + adding
        end, _, pieces = cut(times, sums, 8, steps, least, 100.0, to_add, 4)
        assert end == pytest.approx(ends[pieces]) == pytest.approx(min(ends.values()))


def test_few_blocks_and_a_long_batch():
    """Large items, so that what is cut leaves few sums to add."""
    layout = Layout(patterns.random(16, 16, 26 / 256, seed=0))
    heads, *_, (pieces, _), _ = plan(layout.index, TILES[0], 2048, 132)
    items = len(heads) // pieces
    assert items <= 6
    assert 50 <= len(heads) <= 132
    assert heads[:, 3].sum() < 1.4 * layout.n_blocks * pieces


def test_many_blocks_stay_whole_and_fill_all_places_twice():
    layout = Layout(patterns.random(256, 256, 0.1, seed=0))
    heads, *_, sums = plan(layout.index, TILES[0], 256, 132)
    assert sums == 0
    assert 250 <= len(heads) <= 264  # two for each of the 132 multiprocessors


@pytest.mark.parametrize(
    ("side", "density", "least", "most"),
    [(128, 0.1, 224, 264), (64, 0.25, 120, 132)],
    ids=["two even rounds, not one and a bit", "one"],
)
def test_blocks_of_64_fill_whole_rounds(side, density, least, most):
    layout = Layout(patterns.random(side, side, density, seed=0))
    heads, *_, sums = plan(layout.index, OF_64, 128, 132)
    assert sums == 0
    assert least <= len(heads) <= most


@pytest.mark.parametrize("most", [1, 3, 4])
def test_rows_are_cut_into_even_pieces(most, rng):
    layout = Layout(rng.random((9, 12)) < 0.5)
    pattern = layout.pattern.copy()
    pattern[4] = False
    index = Layout(pattern).index
    order, starts, lines = regions.pieces_of_rows(index, most)
    np.testing.assert_array_equal(order, np.arange(index.block_rows.size))
    sizes, rows = np.diff(starts), index.block_rows[starts[:-1]]
    np.testing.assert_array_equal(index.block_rows, rows.repeat(sizes))
    np.testing.assert_array_equal(lines, 1 + sizes)
    assert 0 < sizes.min() <= sizes.max() <= most
    for row in range(9):
        own = sizes[rows == row]
        assert own.size == -(-own.sum() // most)
        assert (np.diff(own) <= 0).all()
        assert own.size == 0 or own.max() - own.min() <= 1


def test_items_of_many_rounds_are_in_the_order_in_which_they_were_found():
    """Of few rounds longest first."""
    starts = np.cumsum([0, 3, 9, 5, 3, 9, 5])
    items = regions.Items(np.arange(starts[-1]), starts, np.diff(starts) + 1)
    for places, right in ((1, [0, 1, 2, 3, 4, 5]), (6, [4, 1, 5, 2, 3, 0])):
        found = cut_of(items, 800, places, 8, TILES[0])[-1]
        np.testing.assert_array_equal(found, right)


def test_regions_are_found_part_by_part_of_the_grid(rng):
    layout = Layout(rng.random((500, 400)) < 0.02)
    (items,) = regions.regions(layout.index, 37, 2, [16])
    first = items.order[items.starts[:-1]]
    part = layout.index.block_rows[first] // 250 * 2 + layout.index.block_columns[first] // 200
    assert (np.diff(part) >= 0).all()
    assert part[-1] == 3
