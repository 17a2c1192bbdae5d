"""Blocks that reach over the edge of their matrix, and places that no block has: never read there.

Products skip it. A function of the stored values as they are, a norm or a sum, takes them from
`inside`; one of each value by itself may take them as they are.
"""

from typing import Any

from numbsparse import kernels
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.lstm import GATES
from numbsparse.ops.elementwise import gapless
from numbsparse.ops.index import index_beside
from numbsparse.ops.made import MadeLayout, clear_rest, taken
from numbsparse.patterns.checks import integer


def inside(w: BlockSparse, tap_features: int | None = None, units: int | None = None) -> Any:
    """The stored blocks of w with zeros beyond its edge, (n_blocks, B, B); no copy without an edge.

    Zeros are also in the places that no block has, of a layout that `on_device` made.

    Of a convolution's weight the rows of each tap end after `tap_features`: see `ops.conv`. Of an
    LSTM's the columns of each gate end after `units`: see `ops.lstm`.

    >>> import numpy as np
    >>> inside(BlockSparse(np.ones((1, 2, 2)), [[1]], shape=(2, 1)))
    array([[[1., 0.],
            [1., 0.]]])
    """
    shape = w.shape[::-1] if w.is_transposed else w.shape
    features = shape[0] if tap_features is None else integer("tap_features", tap_features)
    columns, together = (shape[1], 1) if units is None else (units, GATES)  # block columns of each
    size, layout = w.block_size, w.stored_layout
    if features % size == 0 and columns % size == 0 and not isinstance(layout, MadeLayout):
        return w.values
    index, in_blocks = index_beside(layout, w.values), -(-features // size)
    if isinstance(w.values, DeviceArray):
        out = empty(w.values.shape, w.dtype)
        places = index.block_rows, index.block_columns
        kernels.edge.inside(gapless(w.values), *places, in_blocks, features, columns, out, together)
        clear_rest(layout, out)
        return out
    values = w.values.copy()
    kept = taken(layout, values)
    kept[index.block_rows % in_blocks == features // size, features % size :] = 0
    kept[index.block_columns // together == columns // size, :, columns % size :] = 0
    clear_rest(layout, values)
    return values
