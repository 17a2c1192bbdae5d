"""What the tests of plans made on the GPU share."""

from itertools import pairwise

import numpy as np

import numbsparse as ns
from numbsparse import Layout

PATTERNS = {
    "random": (3, 35, 0.4),
    "tall": (35, 3, 0.4),
    "full": (9, 5, 1.0),
    "none": (3, 9, 0.0),
    "few": (9, 3, 0.5),
}


def both(name, rng, more=3):
    """(the pattern's index made on the GPU, that of the host)"""
    rows, columns, density = PATTERNS[name]
    pattern = rng.random((rows, columns)) < density
    places = (ns.to_device(lines) for lines in np.nonzero(pattern))
    made = Layout.on_device(*places, pattern.shape, capacity=int(pattern.sum()) + more)
    return made.device_index, Layout(pattern).index


def check_dealt(tiles, starts):
    """To all units alike, and down the rows."""
    assert (np.diff(np.diff(starts)) <= 1).all()
    steps = tiles[:, 3] - tiles[:, 2]
    longest = [steps[a:b].sum() for a, b in pairwise(starts)]
    least = steps.min() if (np.diff(starts) == starts[1]).all() else 0  # as many tiles each
    assert max(longest) - min(longest) <= steps.max() - least
    assert all((np.diff(tiles[a:b, 1]) >= 0).all() for a, b in pairwise(starts))
