"""Block columns that come in fours, each of four keeping the same blocks: an LSTM's gates.

Then a block of threads computes a dense product: up to eight of the kept block rows, wherever they
are, side by side, by the 128 columns of the four, two of them for each of two warpgroups. It reads
1.5 tiles for 4 kept blocks, where a random layout takes 4 and more.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from numbsparse.kernels.matmul.k6_hopper.weight_grad_items import Share, Tile
from numbsparse.layout import Index

FOUR = 4
ROWS = 8  # block rows of a product


def in_fours(index: Index) -> tuple[bool]:
    """Whether columns 0 to 3 keep the same block rows, 4 to 7 do, and so on."""
    indptr, rows, _ = index.columns
    lengths = np.diff(indptr)
    if lengths.size == 0 or lengths.size % FOUR:
        return (False,)
    lengths = lengths.reshape(-1, FOUR)
    if (lengths != lengths[:, :1]).any():
        return (False,)
    # Column by column, their rows lie one list after another: those of a four are one list four
    # times over.
    place = np.arange(rows.size) - np.repeat(indptr[:-1], lengths.ravel())
    first = np.repeat(indptr[:-1:FOUR], lengths.sum(1))
    return (bool((rows == rows[first + place]).all()),)


def fours(index: Index, tile: Tile) -> Iterator[list[Share]]:
    """Pieces of the rows that a four keeps; the whole ones side by side, for their tiles of dy."""
    indptr, rows, blocks = index.columns
    for column in range(0, len(indptr) - 1, FOUR):
        lists = [slice(indptr[c], indptr[c + 1]) for c in range(column, column + FOUR)]
        kept = rows[lists[0]]
        ids = np.stack([blocks[of] for of in lists])  # (four, kept rows)
        for first in range(0, kept.size, ROWS):
            piece = slice(first, first + ROWS)
            yield [_share(tile, column, kept[piece], ids[:, piece])]


def _share(tile: Tile, column: int, rows: np.ndarray, ids: np.ndarray) -> Share:
    """Slots of dy for the four columns, then one of x for each row."""
    step, mine = tile.PANEL_BYTES >> 4, 1 << 16
    x_loads = [(int(row), FOUR + k | mine) for k, row in enumerate(rows)]
    dy_loads = [(column + k, k | mine) for k in range(FOUR)]
    counts = np.full(tile.GROUPS, -(-rows.size * tile.B // min(tile.SIZES)), np.int32)
    where = np.array([[2 * group, FOUR] for group in range(tile.GROUPS)]) * step | step << 16
    outs = np.full((tile.GROUPS, tile.OUTS), -1, np.int32)
    for group in range(tile.GROUPS):
        outs[group, : 2 * rows.size] = ids[2 * group : 2 * group + 2].T.ravel()
    return Share(x_loads, dy_loads, FOUR + rows.size, counts, where.astype(np.int32), outs)
