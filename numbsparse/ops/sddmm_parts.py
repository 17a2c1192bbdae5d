"""A weight-gradient in parts, so that who sums it over several cards begins before all is there."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.layout import Layout
from numbsparse.ops.create import empty_beside
from numbsparse.ops.made import MadeLayout
from numbsparse.ops.matmul import sddmm, sddmm_into


def sddmm_in_parts(
    a: Any,
    b: Any,
    like: BlockSparse,
    shares: tuple[float, ...],
    done: Callable[[Any, int, int], None],
    precision: str,
) -> BlockSparse:
    """`sddmm(a, b, like)` by ranges of block rows, with about these shares of all blocks.

    After each of them done(values, first, last) is called: blocks `first` to `last` are there.

    >>> found = []
    >>> like, halves = BlockSparse(np.zeros((3, 4, 4)), [[1, 0], [1, 1]]), (0.5, 0.5)
    >>> done = lambda *part: found.append(part[1:])
    >>> dw = sddmm_in_parts(np.ones((8, 2)), np.ones((2, 8)), like, halves, done, "highest")
    >>> found, float(dw.data.min())
    ([(0, 1), (1, 3)], 2.0)
    """
    layout, size = like.stored_layout, like.block_size
    if like.is_transposed or isinstance(layout, MadeLayout):
        whole: BlockSparse = sddmm(a, b, like, precision=precision)
        done(whole.values, 0, len(whole.values))
        return whole
    values = empty_beside(like.values.shape, a)
    for rows, blocks, own in _parts_of(layout, shares):
        own_a = a[rows.start * size : rows.stop * size]
        sddmm_into(values[blocks], own_a, b, own, precision=precision)
        done(values, blocks.start, blocks.stop)
    return like.with_values(values)


@lru_cache(maxsize=16)
def _parts_of(layout: Layout, shares: tuple[float, ...]) -> list[tuple[slice, slice, Layout]]:
    """Ranges of block rows with the range of their blocks, and the layout of these rows."""
    ends = layout.indptr
    cuts = np.searchsorted(ends, (np.cumsum(shares)[:-1] * layout.n_blocks).astype(int))
    return [
        (slice(r, s), slice(int(ends[r]), int(ends[s])), Layout(layout.pattern[r:s]))
        for r, s in pairwise([0, *cuts.tolist(), layout.shape[0]])
        if ends[r] < ends[s]
    ]
