"""k9_dense_tiles: from which density on it costs less to multiply zeros than to pick blocks.

Count what 64 rows of y by 128 columns read from shared memory, for 64 features of x. Block by
block, each kept block of B x B reads 64 rows of its own B features, and itself. A tile reads 64
rows of all 64 features once, and all of w, zeros too.
"""

import numpy as np

import numbsparse as ns

ROWS, FEATURES, COLUMNS = 64, 64, 128


def by_block(pattern, B):
    """Values read, if each kept block picks its own."""
    return pattern.sum() * (ROWS * B + B * B)


def by_tile():
    """Values read, whatever is kept."""
    return ROWS * FEATURES + FEATURES * COLUMNS


for B in (8, 16):
    even = None
    for percent in range(1, 100):
        pattern = ns.patterns.random(FEATURES // B, COLUMNS // B, percent / 100, seed=0)
        if even is None and by_block(pattern, B) >= by_tile():
            even = pattern.mean()
    print(f"B = {B:2}: a tile reads less from a density of {even:.2f} on")
    blocks = by_tile() / (ROWS * B + B * B)
    assert np.isclose(even, blocks * B * B / (FEATURES * COLUMNS), atol=0.04)
