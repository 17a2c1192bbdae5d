"""Small worlds: a ring or a grid of neighbours with some connections rewired to far places."""

import numpy as np

from numbsparse.patterns.checks import Pattern, Seed, generator, integer, number


def watts_strogatz(n: int, m: int, p: float, *, seed: Seed) -> Pattern:
    """A small world on a ring: each of n units is joined to its neighbours, some of them far away.

    Unit i is joined to i - m ... i + m (modulo n). Then, for each pair of neighbours in turn, with
    probability p the far end of their connection moves to a unit drawn from those not joined yet.
    The pattern is symmetric, its diagonal is kept, and it has exactly n (2m + 1) blocks.
    p = 0 keeps the ring, p = 1 is almost a random graph; between, at p of 0.01 to 0.2, units still
    share neighbours while a signal reaches all of them in few steps (see `mean_path_length`).

    Same distribution as `networkx.watts_strogatz_graph(n, 2 * m, p)` with self-loops added.

    Parameters
    ----------
    n : int
        Blocks on each side.
    m : int
        Neighbours to each side, at least 1; 2m < n.
    p : float
        Probability of rewiring, 0 to 1.
    seed : int or numpy.random.Generator

    References
    ----------
    Watts, Strogatz, "Collective dynamics of 'small-world' networks", Nature 393, 1998, p. 440-442.
    Gray, Radford, Kingma, "GPU kernels for block-sparse weights", 2017.

    Examples
    --------
    >>> import numbsparse as ns
    >>> pattern = ns.patterns.watts_strogatz(100, 3, 0.1, seed=0)
    >>> int(pattern.sum()) == 100 * (2 * 3 + 1)
    True
    """
    n = integer("n", n, least=3)
    m = integer("m", m, most=(n - 1) // 2)
    p = number("p", p, most=1)
    return _rewire(_neighbours(1, n, m), p, generator(seed))


def watts_strogatz_2d(height: int, width: int, m: int, p: float, *, seed: Seed) -> Pattern:
    """A small world on a grid: as `watts_strogatz`, with neighbours in two dimensions.

    n = height * width units form a grid whose edges meet (a torus); unit r * width + c is in
    row r and column c. Each is joined to itself and to its 2m nearest units by straight distance:
    m = 2 gives the 4 units next to it, m = 4 the 8 around it, m = 6 the 12 within distance 2.
    Neighbours come in opposite pairs; of pairs equally far, the ones in the unit's own row come
    first, then those of the next rows, so m = 1 joins units along rows only. Connections are then
    rewired with probability p. The pattern is n x n and symmetric, its diagonal is kept, and it
    has exactly n (2m + 1) blocks.

    Parameters
    ----------
    height, width : int
        Sides of the grid; a grid of one row is the ring of `watts_strogatz`.
    m : int
        Half the number of neighbours, at least 1; at most the number of opposite pairs there are.
    p : float
        Probability of rewiring, 0 to 1.
    seed : int or numpy.random.Generator

    Examples
    --------
    The 1024 units of a grid, each joined to the 8 around it, are 11 steps apart in the mean; with
    one connection in five rewired, fewer than 5.

    >>> import numbsparse as ns
    >>> grid = ns.patterns.watts_strogatz_2d(32, 32, 4, 0.0, seed=0)
    >>> small_world = ns.patterns.watts_strogatz_2d(32, 32, 4, 0.2, seed=0)
    >>> round(ns.patterns.mean_path_length(grid), 2)
    10.68
    >>> round(ns.patterns.mean_path_length(small_world), 2)
    4.13
    """
    height = integer("height", height)
    width = integer("width", width)
    pairs = len(_opposite_pairs(height, width))
    if not pairs:
        raise ValueError(
            "height and width take a grid where a unit has neighbours to two opposite sides, "
            f"got {height} x {width}"
        )
    m = integer("m", m, most=pairs)
    p = number("p", p, most=1)
    return _rewire(_neighbours(height, width, m), p, generator(seed))


def _opposite_pairs(height: int, width: int) -> np.ndarray:
    """Steps (rows, columns) on a torus, nearest first, one of each two that undo each other."""
    steps: np.ndarray = np.indices((height, width)).reshape(2, -1).T
    undone = -steps % (height, width)
    # A step that undoes itself, such as half way round, leads to one unit and not to a pair.
    first_of_pair = steps @ (width, 1) < undone @ (width, 1)
    distance2 = (np.minimum(steps, undone) ** 2).sum(axis=1)
    steps, distance2 = steps[first_of_pair], distance2[first_of_pair]
    return steps[distance2.argsort(kind="stable")]


def _neighbours(height: int, width: int, m: int) -> np.ndarray:
    """For each of the m nearest opposite pairs, the neighbour of every unit: (m, n)."""
    row, column = np.indices((height, width)).reshape(2, -1)
    down, right = _opposite_pairs(height, width)[:m].T[:, :, None]
    return (row + down) % height * width + (column + right) % width


def _rewire(neighbours: np.ndarray, p: float, rng: np.random.Generator) -> Pattern:
    """Join each unit u to itself and to neighbours[:, u]; move far ends with probability p."""
    m, n = neighbours.shape
    units = np.arange(n)
    pattern = np.eye(n, dtype=bool)
    pattern[units, neighbours] = True
    pattern[neighbours, units] = True
    moved = rng.random((m, n)) < p
    # In the order of Watts and Strogatz: round by round outwards, unit by unit.
    for u, old in zip(np.nonzero(moved)[1], neighbours[moved], strict=True):
        free = np.flatnonzero(~pattern[u])
        if free.size:
            new = free[rng.integers(free.size)]
            pattern[u, old] = pattern[old, u] = False
            pattern[u, new] = pattern[new, u] = True
    return pattern
