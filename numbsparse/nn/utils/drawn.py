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
        found = np.unique(np.concatenate([found, drawn[layout.find(0, drawn) < 0]]))
    return rng.choice(found, n, replace=False)


def swapped(
    flat: np.ndarray, chosen: np.ndarray, columns: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the chosen blocks go, as places in `flat`, and the blocks that they become.

    In each round those that are left meet in pairs; a pair that would become blocks that are there,
    or that an earlier pair becomes, waits for the next round.
    """
    left, new = chosen, flat[:0]
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
    return np.setdiff1d(chosen, left, assume_unique=True), new


def with_blocks(like: Layout, *flat: np.ndarray) -> Layout:
    """The layout of these blocks, given by flat indices, in a grid of that shape."""
    rows, columns = np.divmod(np.sort(np.concatenate(flat)), like.shape[1])
    indptr = np.append(0, np.cumsum(np.bincount(rows, minlength=like.shape[0])))
    return Layout.from_arrays(indptr, columns, like.shape)
