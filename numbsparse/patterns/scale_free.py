"""Scale-free patterns: few hubs with many blocks, many units with few."""

import numpy as np

from numbsparse.patterns.checks import Pattern, Seed, generator, integer


def barabasi_albert(n: int, m: int, *, seed: Seed) -> Pattern:
    """A pattern grown by preferential attachment: units that have many connections get more.

    It starts from m units, and unit m joined to all of them. Units m + 1 ... n - 1 then come one by
    one, and each is joined to m different earlier ones, drawn with a probability in proportion to
    the connections that they have. The diagonal and the blocks among the first m units are kept
    besides. The pattern is symmetric and has exactly 2m (n - m) + m^2 + (n - m) blocks. Every row
    has at least m + 1, the first ones many more: rows of k blocks are about as frequent as k^-3.

    Same distribution as `networkx.barabasi_albert_graph(n, m, initial_graph=...)` from a star of m
    leaves whose centre is unit m, with the diagonal and the corner [:m, :m] added, as in the
    examples of openai/blocksparse.

    Parameters
    ----------
    n : int
        Blocks on each side, at least 2.
    m : int
        Connections that a new unit makes, 1 to n - 1.
    seed : int or numpy.random.Generator

    References
    ----------
    Barabasi, Albert, "Emergence of scaling in random networks", Science 286, 1999, p. 509-512.

    Examples
    --------
    >>> import numbsparse as ns
    >>> pattern = ns.patterns.barabasi_albert(160, 5, seed=0)
    >>> int(pattern.sum()) == 2 * 5 * (160 - 5) + 5**2 + (160 - 5)
    True
    >>> int(pattern.sum(axis=0).max())
    51
    """
    n = integer("n", n, least=2)
    m = integer("m", m, most=n - 1)
    rng = generator(seed)
    pattern = np.eye(n, dtype=bool)
    pattern[:m, :m] = True
    # The blocks of the diagonal and the corner are not counted as connections.
    connections = np.zeros(n)
    joined = np.arange(m)
    for unit in range(m, n):
        pattern[unit, joined] = pattern[joined, unit] = True
        connections[joined] += 1
        connections[unit] = m
        joined = _draw(connections[: unit + 1], m, rng)
    return pattern


def barabasi_albert_rectangular(in_blocks: int, out_blocks: int, m: int, *, seed: Seed) -> Pattern:
    """Preferential attachment between inputs and outputs: hubs on both sides.

    It starts from the first m rows and the first m columns, all joined. The others come one by one,
    rows and columns alternating in proportion to their numbers. A new row is joined to m different
    of the columns so far, a new column to m such rows, drawn with a probability in
    proportion to the blocks that they have. The pattern has exactly m (in_blocks + out_blocks - m)
    blocks, and at least m in every row and every column. No diagonal is added.

    Parameters
    ----------
    in_blocks, out_blocks : int
    m : int
        Blocks of a new row or column, 1 to the shorter side.
    seed : int or numpy.random.Generator

    Examples
    --------
    >>> import numbsparse as ns
    >>> pattern = ns.patterns.barabasi_albert_rectangular(100, 50, 4, seed=0)
    >>> int(pattern.sum()) == 4 * (100 + 50 - 4)
    True
    >>> int(pattern.sum(axis=0).min()), int(pattern.sum(axis=1).min())
    (4, 4)
    """
    in_blocks = integer("in_blocks", in_blocks)
    out_blocks = integer("out_blocks", out_blocks)
    m = integer("m", m, most=min(in_blocks, out_blocks))
    rng = generator(seed)
    pattern = np.zeros((in_blocks, out_blocks), dtype=bool)
    pattern[:m, :m] = True
    in_row, in_column = np.full(in_blocks, m), np.full(out_blocks, m)
    for rows, columns, brings_row in _arrivals(in_blocks, out_blocks, m):
        if brings_row:
            joined = _draw(in_column[:columns], m, rng)
            pattern[rows, joined] = True
            in_column[joined] += 1
        else:
            joined = _draw(in_row[:rows], m, rng)
            pattern[joined, columns] = True
            in_row[joined] += 1
    return pattern


def _draw(weights: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
    """m different indices, drawn one after the other in proportion to the weights.

    The m first of independent events with these rates (Efraimidis, Spirakis, "Weighted random
    sampling with a reservoir", Information Processing Letters 97, 2006).
    """
    waits = rng.standard_exponential(weights.size) / weights
    return np.argpartition(waits, m - 1)[:m]


def _arrivals(in_blocks: int, out_blocks: int, m: int) -> list[tuple[int, int, bool]]:
    """Rows and columns take turns, each kind spread evenly: (rows so far, columns so far, row?)."""
    new_rows, new_columns = in_blocks - m, out_blocks - m
    times = [((i + 0.5) / new_rows, True) for i in range(new_rows)]
    times += [((j + 0.5) / new_columns, False) for j in range(new_columns)]
    arrivals, rows, columns = [], m, m
    for _, brings_row in sorted(times):
        arrivals.append((rows, columns, brings_row))
        rows, columns = rows + brings_row, columns + (not brings_row)
    return arrivals
