"""What the Hopper weight-gradient works out of a layout: every block once, every tile in place."""

import numpy as np
import pytest

from numbsparse import patterns
from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import MAPS, RUNS, Tile, rows_of_blocks
from numbsparse.kernels.matmul.k6_hopper.weight_grad_pairs import pairs_of_rows
from numbsparse.kernels.matmul.k6_hopper.weight_grad_plan import cut, plan
from numbsparse.kernels.matmul.k6_hopper.weight_grad_regions import regions
from numbsparse.layout import Layout

TILES = [
    Tile(32, 2, 8, (32,), 32, 3, 37, 1),
    Tile(32, 2, 8, (32,), 32, 3, 37, 2),
    Tile(32, 2, 8, (32,), 32, 3, 37, 4),
    Tile(32, 2, 8, (32,), 64, 2, 27, 1),
    Tile(64, 2, 1, (64, 128, 192, 256), 64, 3, 9, 1),
    Tile(64, 2, 1, (64, 128, 192, 256), 64, 3, 9, 2),
    Tile(128, 2, 1, (128, 256), 64, 4, 6, 1),
    Tile(128, 2, 1, (128, 256), 64, 4, 6, 2),
]
CHUNKS = 64
STEPS = 512  # so long that a cut pays


def layouts(rng):
    yield Layout(rng.random((40, 50)) < 0.1)
    yield Layout(rng.random((30, 45)) < 0.6)
    yield Layout(np.eye(20, dtype=bool))
    yield Layout(np.ones((3, 90), dtype=bool))
    yield Layout(np.zeros((4, 5), dtype=bool))
    one = np.zeros((50, 50), dtype=bool)
    one[7, 31] = True
    yield Layout(one)


def products(tile, edges, heads, loads, places, outs, work):
    """(block, panel of x, panel of dy) as the tensor cores would multiply them in one block."""
    rank, first = work % tile.CLUSTER, work - work % tile.CLUSTER
    step = tile.PANEL_BYTES >> 4
    slots = {}
    for other in range(first, first + tile.CLUSTER):
        for panel, code in loads[other, : heads[other, 2]]:
            operand, which = divmod(code >> 8 & 0xFF, MAPS)
            whole = edges[operand][0]
            at_edge = which == len(RUNS)
            if code >> 16 >> rank & 1:
                for k in range(1 if at_edge else RUNS[which]):
                    slot = (code & 0xFF) + k
                    assert slot not in slots
                    assert slot < tile.SLOTS
                    assert at_edge or panel + k < whole or k == 0
                    slots[slot] = ("x", "dy")[operand], int(whole if at_edge else panel + k)
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
            panels = tile.B // 64
            for k in range(number):
                for p in range(panels):
                    dy = slots[starts[0, 1] + (k * panels + p) * apart[0, 1]]
                    yield outs[work, group, k], slots[starts[0, 0]], dy


@pytest.mark.parametrize(
    "tile", TILES, ids=lambda tile: f"B{tile.B}-{tile.SLOTS}slots-cluster{tile.CLUSTER}"
)
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "side by side"])
def test_every_block_is_computed_from_its_tiles(tile, apart, rng):
    for layout in layouts(rng):
        index, parts = layout.index, tile.B // tile.PANEL
        edges = tuple((n * parts - 1, True) for n in layout.shape)
        *tables, blocks, _ = plan(index, tile, CHUNKS, 8, apart, edges)
        heads = tables[0]
        steps = np.zeros((layout.n_blocks, parts, parts), int)
        for work in range(heads.shape[0]):
            for block, x, dy in products(tile, edges, *tables, work):
                if heads[work, 4]:
                    block = blocks[block % blocks.size]
                row, column = index.block_rows[block], index.block_columns[block]
                assert (x[0], x[1] // parts) == ("x", row)
                assert (dy[0], dy[1] // parts) == ("dy", column)
                steps[block, x[1] % parts, dy[1] % parts] += heads[work, 1]
        assert (steps == CHUNKS).all()


@pytest.mark.parametrize("tile", TILES[:2], ids=["alone", "cluster"])
def test_pieces_cover_the_batch_in_order(tile, rng):
    layout = Layout(rng.random((20, 20)) < 0.2)
    heads, _, _, outs, blocks, pieces = plan(
        layout.index, tile, STEPS, 132, True, ((20, False), (20, False))
    )
    assert pieces > 1
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


def test_rows_with_the_same_columns_share_their_tiles():
    tile = TILES[1]

    def panels(pattern):
        items = regions(Layout(pattern).index, tile, 1)
        return sum(len(s.x_loads) + len(s.dy_loads) for item in items for s in item)

    banded, rng = patterns.banded(128, 128, width=8), np.random.default_rng(0)
    shuffled = banded[rng.permutation(128)]
    assert panels(shuffled) < 1.15 * panels(banded) < 0.7 * panels(rng.permuted(banded, axis=1))


def test_few_products_are_half_empty(rng):
    layout = Layout(rng.random((128, 128)) < 0.1)
    items = regions(layout.index, TILES[0], 1)
    products = sum(share.counts.sum() for item in items for share in item)
    assert layout.n_blocks <= 2 * products < 1.1 * layout.n_blocks


def test_cut_fills_the_places():
    tile, steps = TILES[3], 256
    item = next(rows_of_blocks(Layout(np.ones((1, 26), bool)).index, tile))
    assert cut([item] * 8, 8, steps, tile) == (8, 1)
    whole, pieces = cut([item] * 9, 8, steps, tile)
    assert whole == 8
    assert pieces > 1
    whole, pieces = cut([item] * 3, 8, steps, tile)
    assert whole == 0
    assert pieces > 1
    assert cut([item] * 3, 8, 2, tile)[1] == 1  # too short


def test_few_items_are_made_smaller(rng):
    layout, tile = Layout(rng.random((128, 128)) < 0.02), TILES[3]
    few, enough = (list(regions(layout.index, tile, places)) for places in (1, 60))
    assert len(few) < len(enough)
    largest = [max(share.arriving for item in items for share in item) for items in (few, enough)]
    assert largest[1] < largest[0]


def test_neighbours_come_in_one_copy():
    tile = TILES[0]
    edges = ((3, False), (90, False))
    dense = Layout(np.ones((3, 90), dtype=bool))
    heads, loads, *_ = plan(dense.index, tile, CHUNKS, 8, True, edges)
    assert (heads[:, 2] <= heads[:, 3] / 2).all()
    assert (loads[:, :, 1] >> 8 & 0xFF).max() < MAPS + len(RUNS)  # none at an edge


def test_pairs_of_rows_share_tiles(rng):
    layout = Layout(rng.random((128, 128)) < 0.1)
    panels = [
        sum(len(share.x_loads) + len(share.dy_loads) for item in items for share in item)
        for items in (rows_of_blocks(layout.index, TILES[4]), pairs_of_rows(layout.index, TILES[4]))
    ]
    assert panels[1] < 0.9 * panels[0]
