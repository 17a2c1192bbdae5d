"""The plan of the Hopper rung's forward and input_grad of float32: every part of a block once."""

from __future__ import annotations

import numpy as np
import pytest

import numbsparse as ns
from numbsparse.kernels.matmul.k6_hopper.split_plan import Tile, steps_of


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_steps_tell_of_every_part_of_a_block_once(size, turned, rng):
    pattern = rng.random((9, 7)) < 0.5
    pattern[:, 5] = pattern[7] = False
    layout, tile = ns.Layout(pattern), Tile(size, 4)
    records, features, lengths = steps_of(layout.index, turned, tile)
    numbers = np.full(layout.shape, -1)
    numbers[layout.index.block_rows, layout.index.block_columns] = np.arange(layout.n_blocks)
    numbers = numbers.T if turned else numbers

    strips = np.sort(features[features >= 0])
    np.testing.assert_array_equal(strips, np.arange(0, numbers.shape[1] * size, tile.N))
    found = set()
    for group, start, n_steps in zip(features, lengths.starts, lengths.steps, strict=True):
        assert n_steps > 0
        for x_tile, *images in records[start : start + n_steps]:
            for feature, image in zip(group, images, strict=True):
                if image >= 0:
                    source, part = divmod(x_tile, tile.PARTS)
                    line, across = feature // size, feature % size // tile.N
                    block = numbers[source, line]
                    assert image == (block * tile.ACROSS + across) * tile.PARTS + part
                    found.add(image)
    assert len(found) == layout.n_blocks * tile.ACROSS * tile.PARTS
    assert found == set(range(len(found)))


def test_columns_that_keep_the_same_inputs_share_steps(rng):
    kinds = np.array([[1, 0], [1, 0], [1, 1], [0, 1], [0, 1]], bool)
    layout = ns.Layout(kinds[:, [0, 1, 0, 1]])
    _, features, lengths = steps_of(layout.index, False, Tile(32, 4))
    assert sorted(sorted(pair) for pair in features.tolist()) == [[0, 64], [32, 96]]
    np.testing.assert_array_equal(lengths.steps, [3, 3])
