"""Two block rows that keep some of the same block columns, for a warpgroup each.

A warpgroup multiplies one tile of x by up to four tiles of dy that lie side by side. Two of them
that have different block rows can still share tiles of dy: those of the columns that both rows
keep, in the middle. On a random layout of density 0.1 this brings 1.16 tiles per kept block, with
one block row for both, down to 0.98 at B = 64.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import Share, Tile, pieces_of_row
from numbsparse.layout import Index

ROWS = 128  # among which pairs are looked for
LEAST = 3  # columns in common; with two, a pair reads as many tiles as one row


def pairs_of_rows(index: Index, tile: Tile) -> Iterator[list[Share]]:
    """Pairs with the most columns in common first, then what is left of each row."""
    indptr, columns, _ = index.rows
    kept_rows = np.flatnonzero(np.diff(indptr))
    for top in range(0, kept_rows.size, ROWS):
        rows = kept_rows[top : top + ROWS]
        used = np.unique(np.concatenate([columns[indptr[r] : indptr[r + 1]] for r in rows]))
        ids = np.full((rows.size, used.size), -1)
        for k, r in enumerate(rows):
            blocks = np.arange(indptr[r], indptr[r + 1])
            ids[k, np.searchsorted(used, columns[blocks])] = blocks
        left = ids >= 0
        for pair, own, both in _pairs(left, tile.OUTS):
            parts = [(ids[r, c], ids[r, both]) for r, c in zip(pair, own, strict=True)]
            yield [_share(tile, rows[list(pair)], columns, parts)]
        for k, r in enumerate(rows):
            yield from pieces_of_row(tile, int(r), columns, ids[k, left[k]])


def _pairs(
    left: np.ndarray, most: int
) -> Iterator[tuple[tuple[int, int], list[np.ndarray], np.ndarray]]:
    """(two rows, what each has alone, what both have), up to `most` a row, taken out of `left`."""
    weights = left.astype(np.float32)
    common = weights @ weights.T
    np.fill_diagonal(common, 0)
    while common.max(initial=0) >= LEAST:
        i, j = divmod(int(common.argmax()), common.shape[1])
        both = np.flatnonzero(left[i] & left[j])[:most]
        left[[i, j], both[:, None]] = False
        own = []
        for r in (i, j):
            own.append(np.flatnonzero(left[r])[: most - both.size])
            left[r, own[-1]] = False
            weights[r] = left[r]
        for r in (i, j):
            common[r] = common[:, r] = weights @ weights[r]
            common[r, r] = 0
        yield (i, j), own, both


def _share(tile: Tile, rows: np.ndarray, columns: np.ndarray, parts) -> Share:
    """Slots of x for both rows, then dy: what the first has alone, both, the second alone."""
    step, mine = tile.PANEL_BYTES >> 4, 1 << 16
    (first, both), (second, _) = parts
    order = np.concatenate([first, both, second])
    x_loads = [(int(row), slot | mine) for slot, row in enumerate(rows)]
    dy_loads = [(int(columns[block]), 2 + k | mine) for k, block in enumerate(order)]
    counts = np.array([first.size + both.size, both.size + second.size], np.int32)
    outs = np.full((2, tile.OUTS), -1, np.int32)
    outs[0, : counts[0]] = np.concatenate(parts[0])
    outs[1, : counts[1]] = np.concatenate([parts[1][1], second])
    where = np.array([[0, 2], [1, 2 + first.size]]) * step | step << 16
    return Share(x_loads, dy_loads, 2 + order.size, counts, where.astype(np.int32), outs)
