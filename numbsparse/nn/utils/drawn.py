"""Blocks that are drawn at random, or by swaps, to take the place of others: as flat indices."""

from __future__ import annotations

import numpy as np

from numbsparse.layout import Layout, positions_among

ROUNDS = 16  # in which blocks that could not be swapped look for another partner


def absent_blocks(layout: Layout, n: int, rng: np.random.Generator) -> np.ndarray:
    """Flat indices of n blocks, or all, that a layout does not keep, drawn at random."""
    own, total = layout.flat_indices, layout.shape[0] * layout.shape[1]
    n = max(min(n, total - own.size), 0)
    if 2 * (own.size + n) > total:
        return rng.choice(np.setdiff1d(np.arange(total), own, assume_unique=True), n, replace=False)
    found = own[:0]
    while found.size < n:  # of those drawn at least every other is new
        drawn = rng.integers(total, size=2 * n)
        found = np.sort(np.concatenate([found, drawn[positions_among(own, drawn) < 0]]))
        found = found[np.diff(found, prepend=-1) > 0]
    return rng.choice(found, n, replace=False)


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
