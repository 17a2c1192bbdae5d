"""Blocks that take the place of others, drawn at random or by swaps: as flat indices."""

import numpy as np

from numbsparse.layout import SPREAD, Layout, layout_of, positions_among

ROUNDS = 16  # in which blocks that could not be swapped look for another partner


def changed(layout: Layout, stay: np.ndarray, new: np.ndarray) -> Layout:
    """A layout of those blocks that stay, bool, and new ones: rising flat indices of others."""
    return layout_of(layout.shape, layout.flat_indices[stay], new)


def absent_blocks(layout: Layout, n: int, rng: np.random.Generator) -> np.ndarray:
    """Rising flat indices of n blocks, or all, that a layout does not keep, drawn at random."""
    own, total = layout.flat_indices, layout.shape[0] * layout.shape[1]
    n = max(min(n, total - own.size), 0)
    if 2 * (own.size + n) > total:
        absent = np.setdiff1d(np.arange(total), own, assume_unique=True)
        return np.sort(rng.choice(absent, n, replace=False))
    found, seen = own[:0], np.zeros(total if total <= SPREAD * own.size else 0, bool)
    while found.size < n:  # of those drawn at least every other is new
        drawn = rng.integers(total, size=2 * n)
        if seen.size:  # a table is faster than a sort
            seen[drawn] = True
            seen[own] = False
            found = np.flatnonzero(seen)
        else:
            found = np.unique(np.concatenate([found, drawn[positions_among(own, drawn) < 0]]))
    return np.sort(rng.choice(found, n, replace=False))


def swapped(
    flat: np.ndarray, chosen: np.ndarray, columns: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Which blocks stay, bool, and what the chosen ones that do not stay become.

    flat : of all blocks; chosen : bool, which of them are to go

    In each round those that are left meet in pairs; a pair that would become blocks that are there,
    or that an earlier pair becomes, waits for the next round.
    """
    left, new = np.flatnonzero(chosen), flat[:0]
    for _ in range(ROUNDS):
        if left.size < 2:
            break
        left = rng.permutation(left)
        pairs, odd = left[: left.size // 2 * 2].reshape(-1, 2), left[left.size // 2 * 2 :]
        (i, k), (j, m) = (a.T for a in np.divmod(flat[pairs], columns))
        become = np.stack([i * columns + m, k * columns + j], 1)
        first = np.zeros(become.size, bool)
        first[np.unique(become, return_index=True)[1]] = True
        free = (positions_among(flat, become) < 0) & (positions_among(new, become) < 0)
        done = (first.reshape(-1, 2) & free).all(1)
        new = np.sort(np.concatenate([new, become[done].reshape(-1)]))
        left = np.concatenate([pairs[~done].reshape(-1), odd])
    stay = ~chosen
    stay[left] = True
    return stay, new
