"""The plan of the Hopper rung's forward and input_grad: every kept block once, in its place."""

from itertools import pairwise

import numpy as np
import pytest

import numbsparse as ns
from numbsparse.kernels.matmul.k6_hopper.plan import (
    BEFORE,
    EDGE,
    LAST,
    MOST,
    TILES,
    Tile,
    steps_of,
)
from numbsparse.kernels.parts.deal import schedule
from numbsparse.kernels.parts.groups import grouped

CASES = [
    *TILES.values(),
    Tile(64, 4, 2, 5, 1, 4, 3),
    Tile(16, 4, 3, 9, 1, 1, 2),
    Tile(32, 8, 3, 8, 1, 4, 2, SHARES=4),
    *(Tile(B, columns, 1, columns, 1, 4, 2, ITEM=4) for B, columns in ((32, 2), (64, 1), (128, 1))),
]


def pattern(rng, rows=21, columns=13, density=0.4):
    kept = rng.random((rows, columns)) < density
    kept[:, 5] = kept[7] = False
    return kept


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile", CASES, ids=lambda t: f"B{t.B}-{t.COLUMNS}-{8 * t.ITEM}bit")
def test_steps_tell_of_every_block_once(tile, transposed, rng):
    layout = ns.Layout(pattern(rng))
    records, strips, lengths = steps_of(layout.index, transposed, tile, True)
    records = records.view(np.uint32).astype(np.int64)
    kept = layout.pattern.T if transposed else layout.pattern
    numbers = np.full(layout.shape, -1)
    numbers[layout.index.block_rows, layout.index.block_columns] = np.arange(layout.n_blocks)
    numbers = numbers.T if transposed else numbers
    assert sorted(strips[strips >= 0]) == list(range(kept.shape[1] * tile.ACROSS))

    found = []
    for group, (start, n_steps) in enumerate(zip(lengths.starts, lengths.steps, strict=True)):
        assert n_steps > 0
        for i, record in enumerate(records[start : start + n_steps]):
            masks, counts, *rest = np.split(record, [tile.SHARES, tile.SHARES + 1])
            counts, (inputs, blocks) = int(counts[0]), np.split(rest[0], [tile.INPUTS])
            taken = 0
            for share, mask in enumerate(masks):
                assert (mask & LAST > 0) == (i == n_steps - 1)
                assert mask >> BEFORE & MOST == taken
                for bit in np.flatnonzero(mask >> np.arange(BEFORE) & 1):
                    e, column = divmod(bit, tile.SHARE)
                    assert e < counts & 255
                    strip, block = strips[group, share * tile.SHARE + column], blocks[taken]
                    line, across = divmod(strip, tile.ACROSS)
                    taken += 1
                    source, part = divmod(inputs[e], tile.PARTS)
                    assert (block & EDGE > 0) == (source == len(kept) - 1)
                    number = numbers[source, line] * tile.ACROSS + across
                    assert block & ~EDGE == number * tile.PARTS + part
                    found.append((source, strip, part))
            assert counts >> 8 == taken <= tile.BLOCKS
    assert len(set(found)) == len(found) == layout.n_blocks * tile.ACROSS * tile.PARTS


def test_strips_that_keep_the_same_inputs_share_steps():
    kinds = np.array([[1, 0], [1, 0], [1, 1], [0, 1], [0, 1]], bool)
    layout = ns.Layout(kinds[:, [0, 1, 0, 1]])
    _, strips, lengths = steps_of(layout.index, False, Tile(32, 2, 1, 2, 1, 4, 2, ITEM=4), False)
    assert sorted(sorted(pair) for pair in strips.tolist()) == [[0, 2], [1, 3]]
    np.testing.assert_array_equal(lengths.steps, [3, 3])


def test_all_bits_of_a_mask_have_room():
    assert all(tile.INPUTS * tile.SHARE <= BEFORE for tile in CASES)
    assert all(tile.COLUMNS <= tile.BLOCKS <= MOST for tile in CASES)
    assert all(tile.SHARED_BYTES <= 227 * 1024 - 256 for tile in TILES.values())


def test_lines_that_meet_the_same_inputs_are_grouped(rng):
    kinds = rng.random((40, 6)) < 0.3
    layout = ns.Layout(kinds[:, rng.permutation(np.repeat(np.arange(6), 4))])
    groups = grouped(layout.index.columns, 40, 4)
    for group in groups:
        assert (layout.pattern[:, group] == layout.pattern[:, group[:1]]).all()
    odd = grouped(ns.Layout(pattern(rng)).index.columns, 21, 4)
    assert sorted(odd[odd >= 0]) == list(range(13))


def test_neighbours_are_grouped_where_they_share_as_much(rng):
    band = ns.patterns.banded(64, 61, 6)
    for own, kept in ((band, True), (band[:, rng.permutation(61)], False)):
        groups = grouped(ns.Layout(own).index.columns, 64, 8)
        assert (groups.reshape(-1)[:61] == range(61)).all() == kept
        inputs = sum(own[:, group[group >= 0]].any(1).sum() for group in groups)
        assert inputs < own.sum() / 3


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("row_tiles", [1, 2, 9])
def test_every_tile_is_computed_once(row_tiles, together, rng):
    layout, tile = ns.Layout(pattern(rng, 40, 30)), TILES[64]
    _, lines, lengths = steps_of(layout.index, False, tile, False)
    tiles, starts = schedule(layout.index, lengths, row_tiles, 6, 1, together)
    assert len(tiles) == starts[-1] == len(lines) * row_tiles
    assert len({tuple(own[:2]) for own in tiles}) == len(tiles)
    for group, _, first, end in tiles:
        assert (first, end - first) == (lengths.starts[group], lengths.steps[group])
    if row_tiles > 2:  # evenly shared out
        loads = [lengths.steps[tiles[a:b, 0]].sum() for a, b in pairwise(starts)]
        assert max(loads) - min(loads) <= 2 * lengths.steps.max()
