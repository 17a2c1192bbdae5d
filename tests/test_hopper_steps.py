"""The plan of the Hopper rung's forward and input_grad: every kept block once, in its place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import numbsparse as ns
from numbsparse.kernels.matmul.k6_hopper import steps as plan
from numbsparse.kernels.matmul.k6_hopper.steps import (
    BEFORE,
    EDGE,
    LAST,
    MOST,
    grouped,
    schedule,
    steps_of,
)
from numbsparse.kernels.matmul.k6_hopper.tile import TILES, Tile

CASES = [
    *TILES.values(),
    Tile(64, 4, 2, 5, 1, 4, 3),
    Tile(16, 4, 3, 9, 1, 1, 2),
    Tile(32, 8, 3, 8, 1, 4, 2, SHARES=4),
]


def pattern(rng, rows=21, columns=13, density=0.4):
    kept = rng.random((rows, columns)) < density
    kept[:, 5] = kept[7] = False
    return kept


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("tile", CASES, ids=lambda tile: f"B{tile.B}-{tile.COLUMNS}")
def test_steps_tell_of_every_block_once(tile, turned, rng):
    layout = ns.Layout(pattern(rng))
    records, lines, lengths = steps_of(layout.index, turned, tile, True)
    records = records.view(np.uint32).astype(np.int64)
    kept = layout.pattern.T if turned else layout.pattern
    numbers = np.full(layout.shape, -1)
    numbers[layout.index.block_rows, layout.index.block_columns] = np.arange(layout.n_blocks)
    numbers = numbers.T if turned else numbers

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
                    line, block = lines[group, share * tile.SHARE + column], blocks[taken]
                    taken += 1
                    source, part = divmod(inputs[e], tile.PARTS)
                    assert (block & EDGE > 0) == (source == len(kept) - 1)
                    assert block & ~EDGE == numbers[source, line] * tile.PARTS + part
                    found.append((source, line, part))
            assert counts >> 8 == taken <= tile.BLOCKS
    assert len(set(found)) == len(found) == layout.n_blocks * tile.PARTS


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


def test_groups_exchange_lines_that_others_share_more_of(rng, monkeypatch):
    layout = ns.Layout(pattern(rng, 64, 61, 0.1))

    def inputs():
        groups = grouped(layout.index.columns, 64, 8)
        assert sorted(groups[groups >= 0]) == list(range(61))
        return sum(layout.pattern[:, group[group >= 0]].any(1).sum() for group in groups)

    after = inputs()
    monkeypatch.setattr(plan, "EXCHANGES", 0)
    assert after < 0.99 * inputs()


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("row_tiles", [1, 2, 9])
def test_every_tile_is_computed_once(row_tiles, together, rng):
    layout, tile = ns.Layout(pattern(rng, 40, 30)), TILES[64]
    _, lines, lengths = steps_of(layout.index, False, tile, False)
    tiles, starts = schedule(layout.index, lengths, row_tiles, 6, together)
    assert len(tiles) == starts[-1] == len(lines) * row_tiles
    assert len({tuple(own[:2]) for own in tiles}) == len(tiles)
    for group, _, first, end in tiles:
        assert (first, end - first) == (lengths.starts[group], lengths.steps[group])
    if row_tiles > 2:  # evenly shared out
        loads = [lengths.steps[tiles[a:b, 0]].sum() for a, b in pairwise(starts)]
        assert max(loads) - min(loads) <= 2 * lengths.steps.max()
