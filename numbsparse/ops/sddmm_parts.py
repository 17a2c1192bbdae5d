"""A weight-gradient in parts, so that who sums it over several cards begins before all is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.matmul import function_of
from numbsparse.layout import Layout
from numbsparse.ops.choice import choose
from numbsparse.ops.index import index_beside
from numbsparse.ops.matmul import sddmm
from numbsparse.ops.precision import checked_precision


def sddmm_in_parts(
    a: Any,
    b: Any,
    like: BlockSparse,
    parts: int,
    done: Callable[[Any, int, int], None],
    precision: str | None = None,
) -> BlockSparse:
    """`sddmm(a, b, like)` by ranges of block rows, `parts` of them with about as many blocks.

    After each of them done(values, first, last) is called: blocks `first` to `last` are there.

    >>> found = []
    >>> like = BlockSparse(np.zeros((3, 4, 4)), [[1, 0], [1, 1]])
    >>> dw = sddmm_in_parts(np.ones((8, 2)), np.ones((2, 8)), like, 2, lambda *p: found.append(p))
    >>> [part[1:] for part in found], float(dw.data.min())
    ([(0, 1), (1, 3)], 2.0)
    """
    if like.is_transposed or parts < 2:
        whole: BlockSparse = sddmm(a, b, like, precision=precision)
        done(whole.values, 0, like.n_blocks)
        return whole
    precision, size = checked_precision(precision), like.block_size
    values = (empty if isinstance(a, DeviceArray) else np.empty)(like.values.shape, a.dtype)
    for rows, blocks, layout in _parts_of(like.stored_layout, parts):
        own = a[rows.start * size : rows.stop * size]
        chosen = choose("weight_grad", "auto", size, own, a.shape[1], precision, layout)
        index = index_beside(layout, a)
        function_of(chosen, "weight_grad")(own.T, b, index, values[blocks], precision)
        done(values, blocks.start, blocks.stop)
    return like.with_values(values)


@lru_cache(maxsize=16)
def _parts_of(layout: Layout, parts: int) -> list[tuple[slice, slice, Layout]]:
    """Ranges of block rows with the range of their blocks, and the layout of these rows."""
    ends = layout.indptr
    cuts = np.searchsorted(ends, np.arange(1, parts) * layout.n_blocks // parts)
    return [
        (slice(r, s), slice(int(ends[r]), int(ends[s])), Layout(layout.pattern[r:s]))
        for r, s in pairwise([0, *cuts.tolist(), layout.shape[0]])
        if ends[r] < ends[s]
    ]
