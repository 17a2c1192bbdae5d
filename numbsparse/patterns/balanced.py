"""Random patterns in which no row and no column is worse off than another."""

import numpy as np

from numbsparse.patterns.checks import Pattern, Seed, generator, integer

TRADES_PER_COLUMN = 20


def balanced_random(in_blocks: int, out_blocks: int, fan_in: int, *, seed: Seed) -> Pattern:
    """A random pattern with exactly `fan_in` blocks in each column, and rows as even as can be.

    Each row keeps fan_in * out_blocks / in_blocks blocks; if that is not an integer, it keeps the
    integer below or above, at random. So density is fan_in / in_blocks exactly, and with a work
    item per row or per column all items are equally long. `fan_in` is at most `in_blocks`.

    A regular pattern comes first, then it is shuffled by trades that keep all sums: columns meet
    in random pairs, and the blocks that only one of the two has are dealt out again (Strona
    et al., "A fast and unbiased procedure to randomize ecological binary matrices with fixed row
    and column totals", Nature Communications 5, 2014).

    >>> import numbsparse as ns
    >>> pattern = ns.patterns.balanced_random(6, 9, fan_in=2, seed=0)
    >>> pattern.sum(axis=0), pattern.sum(axis=1)
    (array([2, 2, 2, 2, 2, 2, 2, 2, 2]), array([3, 3, 3, 3, 3, 3]))
    """
    in_blocks = integer("in_blocks", in_blocks)
    out_blocks = integer("out_blocks", out_blocks)
    fan_in = integer("fan_in", fan_in, most=in_blocks)
    rng = generator(seed)
    # Blocks are dealt to the rows in turn, fan_in of them to each column.
    deal = np.arange(fan_in * out_blocks)
    columns = np.zeros((out_blocks, in_blocks), dtype=bool)
    columns[deal // fan_in, rng.permutation(in_blocks)[deal % in_blocks]] = True
    for _ in range(TRADES_PER_COLUMN):
        order = rng.permutation(out_blocks)
        pairs = out_blocks // 2
        _trade(columns, order[:pairs], order[pairs : 2 * pairs], rng)
    return np.ascontiguousarray(columns.T)


def _trade(columns: Pattern, one: np.ndarray, other: np.ndarray, rng: np.random.Generator) -> None:
    """Deal out anew, for each pair of columns, the blocks that just one of the two has."""
    unshared = columns[one] ^ columns[other]
    to_one = (columns[one] & unshared).sum(axis=1, keepdims=True)
    lots = np.where(unshared, rng.random(unshared.shape), 2)
    # rank[k, i]: the place of row i among the unshared rows of pair k, in the order of their lots
    rank = lots.argsort(axis=1).argsort(axis=1)
    given = rank < to_one
    columns[one] = np.where(unshared, given, columns[one])
    columns[other] = np.where(unshared, ~given, columns[other])
