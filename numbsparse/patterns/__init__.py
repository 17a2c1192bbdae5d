"""Patterns: which blocks of a weight are kept, as bool arrays (in_blocks, out_blocks).

Entry (i, j) says whether block i of the inputs is joined to block j of the outputs. A pattern is a
plain NumPy array, so `|`, `&`, `~`, `.T`, `.sum()` and indexing work on it as on any other.

Makers that draw at random take `seed`, an integer or a `numpy.random.Generator`. The same integer
gives the same pattern every time; a Generator moves on with each call.

All refuse by the argument's name: TypeError for what is no number, pattern or seed, ValueError for
a number out of its range.

>>> import numbsparse as ns
>>> ns.patterns.banded(4, 4, width=1).astype(int)
array([[1, 1, 0, 0],
       [1, 1, 1, 0],
       [0, 1, 1, 1],
       [0, 0, 1, 1]])
"""

from numbsparse.patterns.balanced import balanced_random
from numbsparse.patterns.bck import from_bck
from numbsparse.patterns.checks import as_pattern
from numbsparse.patterns.mixing import mean_path_length, mixing_steps
from numbsparse.patterns.scale_free import barabasi_albert, barabasi_albert_rectangular
from numbsparse.patterns.simple import banded, block_diagonal, dense, random
from numbsparse.patterns.small_world import watts_strogatz, watts_strogatz_2d
from numbsparse.patterns.taps import causal, taps
from numbsparse.patterns.weights import from_dense

__all__ = [
    "as_pattern",
    "balanced_random",
    "banded",
    "barabasi_albert",
    "barabasi_albert_rectangular",
    "block_diagonal",
    "causal",
    "dense",
    "from_bck",
    "from_dense",
    "mean_path_length",
    "mixing_steps",
    "random",
    "taps",
    "watts_strogatz",
    "watts_strogatz_2d",
]
