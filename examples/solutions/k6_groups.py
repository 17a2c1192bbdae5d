"""k6_hopper: how many block columns share a tile of x, if neighbours or likes are grouped.

A block of threads computes 8 block columns at once, and loads a tile of x once for all of them
that keep the block row. On a random layout of density d that are 8 d / (1 - (1 - d)^8) columns of
neighbours, and a sixth more of columns that keep much the same. On a banded layout neighbours are
alike already, and matching finds nothing better. Shuffle its columns, and neighbours share as
little as in a random one: there matching gains nearly four times as much, most of what they had.
"""

import numpy as np

import numbsparse as ns
from numbsparse.kernels.parts.groups import grouped

COLUMNS = 8


def columns_per_tile(pattern, groups):
    """Kept blocks over tiles of x that the groups fetch."""
    tiles = sum(pattern[:, group[group >= 0]].any(1).sum() for group in groups)
    return pattern.sum() / tiles


shared = {}
band = ns.patterns.banded(256, 256, width=12)
for name, pattern in {
    "random": ns.patterns.random(256, 256, 0.1, seed=0),
    "banded": band,
    "shuffled": band[:, np.random.default_rng(0).permutation(256)],
}.items():
    walk = ns.Layout(pattern).index.columns
    neighbours = np.arange(256).reshape(-1, COLUMNS)
    matched = grouped(walk, 256, COLUMNS)
    assert sorted(matched.ravel()) == list(range(256))
    shared[name] = [columns_per_tile(pattern, groups) for groups in (neighbours, matched)]
    print("{}: a tile of x serves {:.2f} neighbours, {:.2f} matched".format(name, *shared[name]))

expected = COLUMNS * 0.1 / (1 - 0.9**COLUMNS)
assert abs(shared["random"][0] - expected) < 0.05
assert 1.15 < shared["random"][1] / shared["random"][0] < 1.25
assert min(shared["banded"]) > 3 * expected
assert 0.95 < shared["banded"][1] / shared["banded"][0] < 1.05
assert abs(shared["shuffled"][0] - expected) < 0.1
assert shared["shuffled"][1] > 0.8 * shared["banded"][1] > 3.5 * shared["shuffled"][0]
