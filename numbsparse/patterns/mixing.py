"""How fast a signal spreads over a pattern that is applied again and again."""

import math
from typing import Any

import numpy as np

from numbsparse.patterns.checks import Pattern, as_square

SLAB_BYTES = 2**24


def mixing_steps(pattern: Any) -> float:
    """How many applications it takes until a signal from every unit reaches every unit.

    The smallest k >= 1 for which no entry of the k-th power of the square `pattern` is zero, so
    that after k steps of a recurrent network (or k layers) each unit hears from all. `math.inf` if
    there is no such k. It never falls as blocks are taken away.

    Costs about 2 log2(k) matrix products of n x n in float32.

    >>> import numbsparse as ns
    >>> ns.patterns.mixing_steps(ns.patterns.dense(100, 100))
    1
    >>> ns.patterns.mixing_steps(ns.patterns.watts_strogatz(100, 2, 0.0, seed=0))
    25
    >>> ns.patterns.mixing_steps(ns.patterns.watts_strogatz(100, 2, 0.2, seed=0))
    8
    >>> ns.patterns.mixing_steps(ns.patterns.block_diagonal(100, 100, groups=2))
    inf
    """
    power = as_square(pattern)
    # Once a power is full, all later ones are: find the first full one of powers 1, 2, 4, ...
    powers: list[Pattern] = []
    while not power.all():
        # Wielandt: a power beyond (n - 1)^2 + 1 is full if any is.
        stuck = powers and np.array_equal(power, powers[-1])
        if stuck or 2 ** len(powers) > len(power) ** 2:
            return math.inf
        powers.append(power)
        power = _compose(power, power)
    if not powers:
        return 1
    # The largest power that is not full, from its highest binary digit down to its lowest.
    power, steps = powers[-1], 2 ** (len(powers) - 1)
    for digit in reversed(range(len(powers) - 1)):
        longer = _compose(power, powers[digit])
        if not longer.all():
            power, steps = longer, steps + 2**digit
    return steps + 1


def mean_path_length(pattern: Any) -> float:
    """The mean, over all ordered pairs of different units, of the fewest steps between them.

    A step leads from unit i to unit j where the square `pattern` keeps block (i, j). `math.inf` if
    some unit cannot be reached from another; 0 for a single unit.

    A breadth-first search from all units at once, in which a set of units is a row of bits: each
    step reads about blocks * n / 8 bytes.

    >>> import numbsparse as ns
    >>> ns.patterns.mean_path_length(ns.patterns.watts_strogatz(101, 2, 0.0, seed=0))
    13.0
    >>> small_world = ns.patterns.watts_strogatz(101, 2, 0.2, seed=0)
    >>> round(ns.patterns.mean_path_length(small_world), 1)
    4.2
    >>> ns.patterns.mean_path_length(ns.patterns.block_diagonal(100, 100, groups=2))
    inf
    """
    pattern = as_square(pattern)
    n = len(pattern)
    if n == 1:
        return 0.0
    # Each unit steps to itself too, so that what is reached stays reached.
    row, column = np.nonzero(pattern | np.eye(n, dtype=bool))
    first_of_row = np.flatnonzero(np.diff(row, prepend=-1))
    slab = 64 * max(1, SLAB_BYTES // (8 * row.size))
    total = 0.0
    for first in range(0, n, slab):
        targets = np.arange(first, min(first + slab, n))
        total += _sum_of_distances(column, first_of_row, targets)
    return total / (n * (n - 1))


def _compose(one: Pattern, other: Pattern) -> Pattern:
    """Where two patterns lead, applied one after the other."""
    return one.astype(np.float32) @ other.astype(np.float32) > 0


def _sum_of_distances(column: np.ndarray, first_of_row: np.ndarray, targets: np.ndarray) -> float:
    """The distances from every unit to each of the targets, added up."""
    n = first_of_row.size
    # Bit t of reaches[i] says whether unit i reaches targets[t] in the steps so far.
    reaches: np.ndarray = np.zeros((n, -(-targets.size // 64)), dtype=np.uint64)
    bit = np.arange(targets.size)
    reaches[targets, bit // 64] = np.uint64(1) << (bit % 64).astype(np.uint64)
    far = n * targets.size - targets.size
    total = 0
    while far:
        # A pair at distance d is counted here in the rounds 0 ... d - 1.
        total += far
        reaches = np.bitwise_or.reduceat(reaches[column], first_of_row, axis=0)
        still_far = n * targets.size - int(np.bitwise_count(reaches).sum())
        if still_far == far:
            return math.inf
        far = still_far
    return total
