"""k7_small_blocks: how many features of x a strip of 512 columns reads, and how many a block reads.

A rung that owns one block column reads x once for each kept block of it: K / B values per output.
A strip reads each group of 32 features once if any of its 64 block columns keeps a block there. On
a random layout that is all of x; on a banded one the few that its columns have in common.
"""

import numpy as np

import numbsparse as ns

B, STRIP, GROUP = 8, 512, 32  # of a block, of a strip's columns, of features that come together
FEATURES = 4096


def reads_per_output(pattern):
    """Values of x per output: by block column, and by strip."""
    by_block = pattern.sum() * B / FEATURES
    groups = pattern.reshape(-1, GROUP // B, FEATURES // STRIP, STRIP // B).any((1, 3))
    return by_block, groups.sum() * GROUP / FEATURES


n = FEATURES // B
for name, pattern in {
    "random, 0.10": ns.patterns.random(n, n, 0.1, seed=0),
    "random, 0.01": ns.patterns.random(n, n, 0.01, seed=0),
    "banded": ns.patterns.banded(n, n, width=25),
}.items():
    by_block, by_strip = reads_per_output(pattern)
    print(
        f"{name:12} {pattern.mean():.3f} kept: {by_block:4.1f} by block, {by_strip:3.1f} by strip"
    )
    if name == "random, 0.10":
        assert by_strip == FEATURES / STRIP  # all of x, for every strip
        assert by_block > 6 * by_strip
    if name == "random, 0.01":
        assert np.isclose(by_block / by_strip, 0.7, atol=0.1)  # few blocks: a strip reads in vain
    if name == "banded":
        assert by_strip < 0.3 * FEATURES / STRIP
