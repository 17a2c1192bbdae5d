"""The blocks of a block-sparse matrix times a number each, those times zero left out."""

from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, record, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.layout import Layout
from numbsparse.nn.functional.arithmetic import as_matrix
from numbsparse.nn.functional.shape import reshape, take_rows, transpose
from numbsparse.ops.made import MadeLayout

AsStored = tuple[Tensor, Tensor, Any]


def scale_blocks(w: Any, gate: Any, *, tap_features: int | None = None) -> Tensor:
    """gate[b] * w.data[b] of each block b whose gate is not zero, in a layout of these only.

    What `matmul` does with a gate, for other functions of block-sparse weights: see there. Of a
    convolution's weight the rows of each tap end after `tap_features`; default: w is a matrix.

    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> w = ns.Tensor(ns.BlockSparse(np.ones((2, 4, 4)), [[1, 1]]), requires_grad=True)
    >>> gate = ns.Tensor(np.array([0.0, 3.0]), requires_grad=True)
    >>> gated = F.scale_blocks(w, gate)
    >>> gated
    Tensor(BlockSparse(4 x 8, float64, 1 blocks of 4 x 4, density 0.5))
    >>> F.sum(np.ones((1, 4)) @ gated).backward()
    >>> gate.grad
    Tensor([ 0., 16.])
    """
    w, gate = as_tensor(w, "w"), as_tensor(gate, "gate")
    return scaled(w, as_stored(w, gate), tap_features)


def as_stored(w: Tensor, gate: Tensor) -> AsStored:
    """(w, its gates, what these leave of it), all in the order in which w is stored."""
    own = unread(as_matrix(w))
    numbers = ops.gate_numbers(own, gate.data)
    if own.is_transposed:
        if isinstance(unread(gate), BlockSparse):
            gate = transpose(gate)
        elif not isinstance(own.stored_layout, MadeLayout):  # whose gates are as values are stored
            gate = in_order(gate, own.layout)
        return as_stored(transpose(w), gate)
    return w, numbers_of(gate), ops.select_gated(own, numbers)


def scaled(w: Tensor, gates: AsStored, taps: int | None = None) -> Tensor:
    """`scale_blocks` by gates that are `as_stored`."""
    if gates[2].is_all and not gates[1].requires_grad:
        return w
    result = _gated(*gates, taps)
    return transpose(result) if unread(w).is_transposed else result


def _gated(w: Tensor, by: Tensor, kept: Any, taps: int | None) -> Tensor:
    """Of the blocks that are kept; with `ungated` and `dots` closed under differentiation."""
    return record(
        ops.gated(w.matrix, by.data, kept),
        (w, lambda dv, v: ungated(dv, by, kept, taps)),
        (by, lambda dv, v: dots(dv, w, kept, taps)),
    )


def ungated(v: Tensor, by: Tensor, kept: Any, taps: int | None, in_place: bool = False) -> Tensor:
    """The other way round; `in_place` if nobody else has v."""
    return record(
        ops.ungated(v.matrix, by.data, kept, in_place and not by.requires_grad),
        (v, lambda de, e: _gated(de, by, kept, taps)),
        (by, lambda de, e: dots(v, de, kept, taps)),
    )


def dots(v: Tensor, w: Tensor, kept: Any, taps: int | None) -> Tensor:
    """sum(v * w) of each block, v of the blocks that are kept, w of all."""
    return record(
        ops.block_dots(ops.inside(v.matrix, taps), ops.inside(w.matrix, taps), kept),
        (v, lambda dd, d: _gated(w, dd, kept, taps)),
        (w, lambda dd, d: ungated(v, dd, kept, taps)),
    )


def numbers_of(gate: Tensor) -> Tensor:
    """(n_blocks,) of a gate that may be a matrix of 1 x 1 blocks."""
    own = unread(gate)
    if not isinstance(own, BlockSparse):
        return gate
    if own.is_transposed:
        return in_order(numbers_of(transpose(gate)), own.stored_layout)
    flat = ops.reshape(gate.matrix.values, (own.n_blocks,))
    return record(flat, (gate, lambda dy, y: _matrix(dy, own)))


def in_order(numbers: Tensor, layout: Layout) -> Tensor:
    """`ops.in_order`, differentiable."""
    order = ops.index_beside(layout, numbers.data).columns.blocks
    return reshape(take_rows(reshape(numbers, (-1, 1)), order), (-1,))


def _matrix(numbers: Tensor, like: BlockSparse) -> Tensor:
    """The other way round."""
    matrix = like.with_values(ops.reshape(numbers.data, like.values.shape))
    return record(matrix, (numbers, lambda dm, m: numbers_of(dm)))
