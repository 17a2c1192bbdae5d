"""Which lines of a layout are computed together: those that meet the same inputs."""

from __future__ import annotations

import numpy as np

from numbsparse.layout import Walk

MATCHED = 4096  # lines: more of them are grouped as they come
EXCHANGES, EXCHANGED = 16, 1024  # rounds at most, of at most so many lines


def strips_of(walk: Walk, across: int) -> Walk:
    """The walk of `across` strips of each line, which keep parts of the same blocks."""
    if across == 1:
        return walk
    lengths = np.diff(walk.indptr).repeat(across)
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    strip = np.repeat(np.arange(lengths.size), lengths)
    entry = walk.indptr[strip // across] + np.arange(strip.size) - indptr[strip]
    blocks = walk.blocks[entry].astype(np.int64) * across + strip % across
    return Walk(indptr, walk.indices[entry], blocks)


def grouped(walk: Walk, n_inputs: int, size: int) -> np.ndarray:
    """(groups, size) int32: lines that meet many inputs together, -1 for none.

    Pairs with the largest overlap are matched, then pairs of pairs; and as long as two groups gain
    by it, they exchange a line.
    """
    n_lines = len(walk.indptr) - 1
    groups = np.arange(n_lines, dtype=np.int32)[:, None]
    if size == 1 or n_lines > MATCHED:
        groups = np.append(groups, np.full(-n_lines % size, -1, np.int32))
        return groups.reshape(-1, size)
    meets: np.ndarray = np.zeros((n_lines, n_inputs), np.float32)
    meets[np.repeat(np.arange(n_lines), np.diff(walk.indptr)), walk.indices] = 1
    own = meets
    while groups.shape[1] < size:
        if len(groups) % 2:
            groups = np.vstack([groups, np.full((1, groups.shape[1]), -1, np.int32)])
            meets = np.vstack([meets, np.zeros((1, n_inputs), np.float32)])
        pairs = _pairs(meets)
        groups = np.hstack([groups[pairs[:, 0]], groups[pairs[:, 1]]])
        meets = np.maximum(meets[pairs[:, 0]], meets[pairs[:, 1]])
    return _exchanged(groups, own)


def _pairs(meets: np.ndarray) -> np.ndarray:
    """(n / 2, 2): every line with the one of those left that shares most inputs with it."""
    overlap = meets @ meets.T
    np.fill_diagonal(overlap, -1)
    left = np.ones(len(meets), bool)
    pairs = []
    for line in np.argsort(-meets.sum(1), kind="stable"):
        if left[line]:
            left[line] = False
            other = int(np.argmax(np.where(left, overlap[line], -2)))
            left[other] = False
            pairs.append((line, other))
    return np.array(pairs, np.int64).reshape(-1, 2)


def _exchanged(groups: np.ndarray, meets: np.ndarray) -> np.ndarray:
    """The groups after exchanges of two lines that leave fewer inputs to both together."""
    size, lines = groups.shape[1], groups.reshape(-1).copy()
    group = np.arange(lines.size) // size
    meets = np.vstack([meets, np.zeros((1, meets.shape[1]), np.float32)])  # of line -1: none
    for _ in range(EXCHANGES if lines.size <= EXCHANGED else 0):
        own = meets[lines]
        held = own.reshape(len(groups), size, -1).sum(1)
        inputs = np.repeat((held > 0).sum(1), size).astype(np.float32)
        others = (np.repeat(held, size, axis=0) > own).astype(np.float32)
        # [i, j]: inputs of the group of i if line j stood in the place of line i
        with_other = others.sum(1)[:, None] + own.sum(1) - others @ own.T
        gain = inputs[:, None] + inputs - with_other - with_other.T
        gain[group[:, None] == group] = 0
        best, most = gain.argmax(1), gain.max(1)
        free = np.ones(len(groups), bool)
        for i in np.argsort(-most, kind="stable")[: np.count_nonzero(most > 0)]:
            a, b = group[i], group[best[i]]
            if free[a] and free[b]:
                lines[[i, best[i]]] = lines[[best[i], i]]
                free[[a, b]] = False
        if free.all():
            break
    return lines.reshape(-1, size)


def blocks_by_group(walk: Walk, lines: np.ndarray) -> list[np.ndarray]:
    """Of each kept block its group, input, column in the group, and number; in this order."""
    flat = lines.reshape(-1)
    place = np.empty(len(walk.indptr) - 1, np.int64)
    place[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    group, column = np.divmod(np.repeat(place, np.diff(walk.indptr)), lines.shape[1])
    inputs, blocks = walk.indices.astype(np.int64), walk.blocks.astype(np.int64)
    order = np.lexsort((column, inputs, group))
    return [array[order] for array in (group, inputs, column, blocks)]
