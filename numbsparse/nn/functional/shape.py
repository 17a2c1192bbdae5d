"""Shapes: sums over axes, views, joining and parting."""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, record, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn.functional.joint import results_of
from numbsparse.ops.operands import axes_of, on_gpu, one_axis
from numbsparse.patterns.checks import INTEGER, integer

Axis = int | tuple[int, ...] | None
Shape = int | Sequence[int]


def sum(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The sum over the given axes, or over all; of a block-sparse tensor over 0, 1 or both.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.sum(Tensor([[1.0, 2.0], [3.0, 4.0]]), axis=0)
    Tensor([4., 6.])
    """
    x = as_tensor(x)
    if isinstance(unread(x), BlockSparse):
        from numbsparse.nn.functional.block_sparse import sum_block_sparse  # which sums blocks here

        return sum_block_sparse(x, axis, keepdims)
    kept = kept_shape(x.shape, axis)
    return record(
        ops.sum(x.data, axis, keepdims),
        (x, lambda dy, y: broadcast_to(reshape(dy, kept), x.shape)),
    )


def mean(x: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
    """The mean over the given axes, or over all.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.mean(Tensor([[1.0, 2.0], [3.0, 4.0]]), axis=1, keepdims=True)
    Tensor([[1.5],
            [3.5]])
    """
    x = as_tensor(x)
    kept = kept_shape(x.shape, axis)
    average = ops.mean(x.data, axis, keepdims)  # no sum that 16 bits could not hold
    share = average.size / x.size if x.size else 1.0  # an array without values has no gradients
    return record(average, (x, lambda dy, y: broadcast_to(reshape(dy * share, kept), x.shape)))


def sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Undo broadcasting: sum over the axes that `shape` lacks or has as 1."""
    if x.shape == shape:
        return x
    return record(ops.sum_to(x.data, shape), (x, lambda dy, y: broadcast_to(dy, x.shape)), reads=())


def broadcast_to(x: Any, shape: Shape) -> Tensor:
    """NumPy's broadcasting to a shape, as an array of its own.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.broadcast_to(Tensor([1.0, 2.0]), (2, 2))
    Tensor([[1., 2.],
            [1., 2.]])
    """
    x, shape = as_tensor(x), _sizes(shape)
    on_gpu(x.data, "x")
    if x.shape == shape:
        return x
    return record(ops.broadcast_to(x.data, shape), (x, lambda dy, y: sum_to(dy, x.shape)))


def reshape(x: Any, shape: Shape) -> Tensor:
    """The same values in another shape; one axis may be -1.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.reshape(Tensor([[1.0, 2.0], [3.0, 4.0]]), (-1,))
    Tensor([1., 2., 3., 4.])
    """
    x = _dense(x)
    return record(
        ops.reshape(x.data, _sizes(shape)), (x, lambda dy, y: reshape(dy, x.shape)), reads=()
    )


def transpose(x: Any, axes: Sequence[int] | None = None) -> Tensor:
    """The axes in another order (default: reversed), as a view. A BlockSparse takes no `axes`.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.transpose(Tensor([[1.0, 2.0], [3.0, 4.0]]))
    Tensor([[1., 3.],
            [2., 4.]])
    """
    x = as_tensor(x)
    if axes is None or isinstance(x.data, BlockSparse):
        return record(x.data.T, (x, lambda dy, y: transpose(dy)), reads=())
    order = axes_of(axes, x.ndim, "axes")
    if len(order) != x.ndim:
        raise ValueError(f"axes takes {x.ndim} axes, got {axes!r}")
    back = tuple(order.index(axis) for axis in range(x.ndim))
    return record(ops.transpose(x.data, order), (x, lambda dy, y: transpose(dy, back)), reads=())


def getitem(x: Any, key: Any) -> Tensor:
    """x[key] for integers and slices; of a block-sparse tensor, for slices of whole blocks.

    To take all the parts of an axis, use `unbind` or `split`.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.getitem(Tensor([1.0, 2.0, 3.0]), slice(1, None))  # or tensor[1:]
    Tensor([2., 3.])
    """
    x = as_tensor(x)
    if isinstance(unread(x), BlockSparse):
        from numbsparse.nn.functional.block_sparse import slice_block_sparse  # as in `sum`

        return slice_block_sparse(x, key)
    return record(ops.getitem(x.data, key), (x, lambda dy, y: _put(x.shape, key, dy)))


def take_rows(table: Tensor, rows: Any) -> Tensor:
    """table[rows], for an array of integers."""
    count = table.shape[0]
    return record(ops.take_rows(table.data, rows), (table, lambda dy, y: sum_rows(dy, rows, count)))


def sum_rows(x: Tensor, rows: Any, count: int) -> Tensor:
    """The gradient of `take_rows`: (count, width)."""
    return record(ops.sum_rows(x.data, rows, count), (x, lambda dy, y: take_rows(dy, rows)))


def concatenate(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """The tensors one after the other along an existing axis.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.concatenate([Tensor([1.0, 2.0]), Tensor([3.0])])
    Tensor([1., 2., 3.])
    """
    tensors = _listed(tensors)
    joined = ops.concatenate([tensor.data for tensor in tensors], axis)
    axis, start, parts = one_axis(axis, joined.ndim), 0, []
    for tensor in tensors:
        stop = start + tensor.shape[axis]
        key = (slice(None),) * axis + (slice(start, stop),)
        parts.append((tensor, lambda dy, y, key=key: getitem(dy, key)))
        start = stop
    return record(joined, *parts)


def stack(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
    """The tensors one after the other along a new axis.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.stack([Tensor([1.0, 2.0]), Tensor([3.0, 4.0])])
    Tensor([[1., 2.],
            [3., 4.]])
    """
    tensors = _listed(tensors)
    stacked = ops.stack([tensor.data for tensor in tensors], axis)
    axis = one_axis(axis, stacked.ndim)
    before = (slice(None),) * axis
    parts = [
        (tensor, lambda dy, y, i=i: getitem(dy, (*before, i))) for i, tensor in enumerate(tensors)
    ]
    return record(stacked, *parts)


def unbind(x: Any, axis: int = 0) -> list[Tensor]:
    """The parts of `x` along an axis, without it: [x[0], x[1], ...].

    Their gradients are joined once, where indexing would add a whole array for each.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.unbind(Tensor([[1.0, 2.0], [3.0, 4.0]]))
    [Tensor([1., 2.]), Tensor([3., 4.])]
    """
    x = _dense(x)
    axis = one_axis(axis, x.ndim)
    keys = [(*(slice(None),) * axis, i) for i in range(x.shape[axis])]
    return _parts(x, keys, lambda pieces: stack(pieces, axis))


def split(x: Any, sections: int, axis: int = -1) -> list[Tensor]:
    """`x` cut along an axis in equal sections; raises ValueError where they would not be equal.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.split(Tensor([1.0, 2.0, 3.0, 4.0]), 2)
    [Tensor([1., 2.]), Tensor([3., 4.])]
    """
    x = _dense(x)
    axis = one_axis(axis, x.ndim)
    sections = integer("sections", sections)
    width, rest = divmod(x.shape[axis], sections)
    if rest:
        raise ValueError(f"sections takes a divisor of {x.shape[axis]}, got {sections}")
    before = (slice(None),) * axis
    keys = [(*before, slice(i * width, (i + 1) * width)) for i in range(sections)]
    return _parts(x, keys, lambda pieces: concatenate(pieces, axis))


def _sizes(shape: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, shape))
    except TypeError:
        if isinstance(shape, INTEGER):
            return (int(shape),)
        raise TypeError(f"shape takes integers, got {shape!r}") from None


def _dense(x: Any, argument: str = "x") -> Tensor:
    x = as_tensor(x, argument)
    if isinstance(unread(x), BlockSparse):
        raise TypeError(f"{argument} takes a dense Tensor, got {x!r}: see .numpy()")
    return x


def _listed(tensors: Sequence[Any]) -> list[Tensor]:
    if isinstance(tensors, BlockSparse) or not np.iterable(tensors):
        raise TypeError(f"tensors takes a list of Tensors, got {tensors!r}")
    listed = [_dense(tensor, f"tensors[{i}]") for i, tensor in enumerate(tensors)]
    if not listed:
        raise ValueError("tensors takes at least one Tensor")
    return listed


def kept_shape(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    """The shape with the given axes as 1."""
    every = range(len(shape))
    reduced = every if axis is None else axes_of(axis, len(shape))
    return tuple(1 if a in reduced else n for a, n in enumerate(shape))


def _put(shape: tuple[int, ...], key: Any, values: Tensor) -> Tensor:
    """Zeros with `values` at `key`: the gradient of getitem."""
    return record(ops.put(shape, key, values.data), (values, lambda dy, y: getitem(dy, key)))


def _parts(x: Tensor, keys: list[Any], join: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
    """x[key] for each key, all recorded behind one hidden tensor that joins their gradients."""
    datas = [ops.getitem(x.data, key) for key in keys]

    def joined(pieces: Any, y: Tensor) -> Tensor:
        whole = [
            pieces[i] if i in pieces else Tensor(ops.zeros(data.shape, data.dtype, x.device))
            for i, data in enumerate(datas)
        ]
        return join(whole)

    hidden = record(x.data, (x, joined))
    if not hidden.requires_grad:
        return [Tensor(data) for data in datas]
    return results_of(hidden, datas, "parts")
