"""The gradient of blocks that are not there, piece by piece."""

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.device import moved
from numbsparse.layout import Layout, as_layout
from numbsparse.patterns.checks import check_block_size, integer


def absent_norms(
    x: Any, dy: Any, layout: Any, *, block_size: int, by: str = "l2", piece: int = 4096
) -> np.ndarray:
    """The norms of the gradient x.T @ dy in the blocks that a layout does not keep.

    Computed piece by piece, by `ns.sddmm`: the dense gradient is never in memory.

    Parameters
    ----------
    x : array, (batch, in_features); dy : array, (batch, out_features)
        Both NumPy arrays or both GPU arrays.
    layout : Layout or pattern, (in_blocks, out_blocks)
    block_size : int
    by : "l1", "l2" or "max"
    piece : int
        How many blocks are computed at a time, at least; a piece is whole block rows.

    Returns
    -------
    NumPy array, (in_blocks, out_blocks); 0 where the layout keeps a block

    Raises ValueError for a layout of another grid, and what `ns.sddmm` raises.

    Examples
    --------
    >>> import numpy as np
    >>> from numbsparse.nn.utils import absent_norms
    >>> x, dy = np.ones((3, 8), np.float32), np.float32([[1, 1, 1, 1, 2, 2, 2, 2]] * 3)
    >>> absent_norms(x, dy, [[1, 0], [0, 1]], block_size=4)
    array([[ 0., 24.],
           [12.,  0.]])
    """
    layout, piece = as_layout(layout), integer("piece", piece)
    x, dy = ops.operand(x, "x"), ops.operand(dy, "dy")
    for argument, a in (("x", x), ("dy", dy)):
        if a.ndim != 2:
            raise ValueError(f"{argument} takes the shape (batch, features), got {a.shape}")
    if x.shape[0] != dy.shape[0] or x.dtype != dy.dtype:
        got = f"{x.shape} of {x.dtype} and {dy.shape} of {dy.dtype}"
        raise ValueError(f"x and dy take one batch and one dtype, got {got}")
    size = check_block_size(block_size)
    grid = tuple(-(-a.shape[1] // size) for a in (x, dy))
    if grid != layout.shape:
        raise ValueError(f"layout takes {grid} blocks for this x and dy, got {layout.shape}")
    found, absent, height = np.zeros(layout.shape), ~layout.pattern, max(piece // grid[1], 1)
    for first in range(0, grid[0], height):
        part = Layout(absent[first : first + height])
        columns = slice(first * size, (first + part.shape[0]) * size)
        blocks = ops.sddmm(x[:, columns].T, dy, part, block_size=size)
        norms = moved(ops.block_norms(blocks, by), "cpu")
        found[first + part.index.block_rows, part.indices] = norms
    return found
