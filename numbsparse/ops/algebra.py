"""Arithmetic of block-sparse matrices, as SciPy has it: what is not stored is zero.

Operands have one shape, block size, dtype and place; others are refused by name. Results are in
that dtype and place; on the CPU those of 16 bits are computed in float32 and rounded once, as on a
GPU. Blocks are never dropped because they hold zeros: a layout follows from layouts alone.

>>> layout, other = [[1, 0], [0, 1]], [[1, 1], [0, 0]]
>>> a = BlockSparse(np.full((2, 4, 4), 1.0), layout)
>>> b = BlockSparse(np.full((2, 4, 4), 2.0), other)
>>> a + b, 2 * a * b
(BlockSparse(8 x 8, float64, 3 blocks of 4 x 4, density 0.75),
 BlockSparse(8 x 8, float64, 1 blocks of 4 x 4, density 0.25))
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse

from numbsparse import kernels
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, empty, is_device_operand, to_device
from numbsparse.dtypes import check_kind, type_name
from numbsparse.layout import Layout, as_layout
from numbsparse.ops import elementwise, embedding, reduce
from numbsparse.ops.create import zeros
from numbsparse.ops.edge import inside
from numbsparse.ops.gates import in_order
from numbsparse.ops.index import index_beside, positions_beside
from numbsparse.ops.made import taken
from numbsparse.ops.matmul import matmul
from numbsparse.ops.operands import ARRAYS, at_home, place_of
from numbsparse.ops.shape import reshape
from numbsparse.patterns.checks import BLOCK_SIZES, INTEGER, LARGEST, integer, word

NORMS = ("l1", "l2", "max")


def remap(w: BlockSparse, layout: Any, fresh: BlockSparse | None = None) -> BlockSparse:
    """The matrix in another layout: blocks of both keep their values, new ones are zero.

    Parameters
    ----------
    layout : Layout or pattern, (in_blocks, out_blocks)
        If it equals the layout of `w`, the result is `w` itself.
    fresh : BlockSparse of that layout, like `w` otherwise, optional
        What new blocks hold in place of zeros.

    Raises ValueError for another grid of blocks.

    >>> w = BlockSparse(np.ones((2, 1, 1)), [[1, 1, 0]])
    >>> w.remap([[0, 1, 1]]).toarray()
    array([[0., 1., 0.]])
    """
    layout = as_layout(layout)
    if layout.shape != w.layout.shape:
        raise ValueError(f"layout takes {w.layout.shape} blocks, as the matrix, got {layout.shape}")
    if fresh is not None:
        check_kind("fresh", fresh, BlockSparse, "a BlockSparse or None")
        w, fresh = _like_each_other(w, fresh, "remap")
    if layout == w.layout:
        return w
    if w.is_transposed:
        return remap(w.T, layout.T, None if fresh is None else fresh.T).T
    of = None if fresh is None else fresh.values
    mapped = w.with_values(in_layout(w.values, layout, w.stored_layout, of))
    mapped.stored_layout = layout
    return mapped


def in_layout(values: Any, layout: Layout, other: Layout, fresh: Any = None) -> Any:
    """Stored values of `other` in the order of `layout`, with `fresh` ones, or zeros, between."""
    return _taken(values, positions_beside(layout, other, values), fresh)


def block_norms(w: BlockSparse, by: str = "l2", tap_features: int | None = None) -> Any:
    """The norm of each kept block, (n_blocks,), in the order of `w.data`.

    l1 is `sum(abs(w))`, l2 `sqrt(sum(w**2))`, max `max(abs(w))`, of what is inside the edge.
    In float64 on the CPU, in float32 on a GPU, where the result stays and squares are of float64.
    Of a convolution's weight the rows of each tap end after `tap_features`. Raises ValueError for
    another norm.

    >>> w = BlockSparse(np.float32([[[3, -4], [0, 0]], [[1, 1], [1, 1]]]), [[1, 1]])
    >>> w.block_norms("l1"), w.block_norms(), w.block_norms("max")
    (array([7., 4.]), array([5., 2.]), array([4., 1.]))
    """
    checked_norm(by)
    values = inside(w, tap_features)
    flat = reshape(values, (w.n_blocks, w.block_size**2))
    norms = row_norms(flat, by)
    return in_order(norms, w.stored_layout) if w.is_transposed else norms


def checked_norm(by: str) -> str:
    """The name of a norm; another is refused."""
    return word("by", by, NORMS)


def row_norms(values: Any, by: str) -> Any:
    if isinstance(values, DeviceArray):
        norms = empty((values.shape[0],), np.float32)
        kernel = {"l1": "sum of sizes", "l2": "length", "max": "max of sizes"}[by]
        kernels.reduce.reduce(kernel, norms, values, (1,))
        return norms
    values = _wide(values)
    if by == "l2":
        return np.sqrt(np.einsum("ni,ni->n", values, values, dtype=np.float64))
    if by == "l1":
        return np.abs(values).sum(axis=1, dtype=np.float64)
    return np.abs(values).max(axis=1).astype(np.float64)


def sum(w: BlockSparse, axis: int | None = None, *, out: None = None) -> Any:
    """The sum of each column (axis 0), of each row (axis 1) or of all, as a dense array.

    In the dtype and place of w; 16-bit floats are summed in float32. `numpy.sum(w)` passes `out`.

    >>> BlockSparse(np.ones((1, 2, 2)), [[0, 1]]).sum(axis=0)
    array([0., 0., 2., 2.])
    """
    if out is not None:
        raise ValueError(f"out takes None, got {type(out).__name__}")
    if axis is None:
        total = _computed(reduce.sum, inside(w))
        return total if isinstance(total, DeviceArray) else total[()]
    if isinstance(axis, bool) or not isinstance(axis, INTEGER) or axis not in (-2, -1, 0, 1):
        raise ValueError(f"axis takes 0, 1 or None, got {axis!r}")
    if w.place == "cuda" and w.block_size in BLOCK_SIZES:  # as products with ones
        ones = to_device(np.ones(w.shape[axis], w.dtype))
        product = (ones, w) if axis in (0, -2) else (w, ones)
        return matmul(*product, precision="highest")
    if w.is_transposed:
        return sum(w.T, 1 - axis % 2)
    index, over = index_beside(w.stored_layout, w.values), axis % 2
    lines = index.block_rows if over else index.block_columns
    of_blocks = reduce.sum(_wide(taken(w.stored_layout, inside(w))), 1 + over)
    total = embedding.sum_rows(of_blocks, lines, w.stored_layout.shape[1 - over])
    return elementwise.cast(reshape(total, (-1,))[: w.shape[1 - over]], w.dtype)


def diagonal(w: BlockSparse, k: int = 0) -> Any:
    """w[i, i + k] for each i, as a dense array on w's device.

    >>> BlockSparse(np.arange(8.0).reshape(2, 2, 2), [[1, 0], [0, 1]]).diagonal()
    array([0., 3., 4., 7.])
    """
    k = max(-w.shape[0], min(integer("k", k, least=-LARGEST), w.shape[1]))
    if w.is_transposed:
        return diagonal(w.T, -k)
    size = w.block_size
    rows = np.arange(max(0, -k), min(w.shape[0], w.shape[1] - k))
    columns = rows + k
    where = w.stored_layout.find(rows // size, columns // size)
    met = where >= 0
    blocks, nth = np.unique(where[met], return_inverse=True)
    items = np.full(rows.size, -1)
    items[met] = nth * size**2 + (rows % size * size + columns % size)[met]
    return reshape(_taken(reshape(_taken(w.values, blocks), (-1, 1)), items), (rows.size,))


def getitem(w: BlockSparse, key: Any) -> BlockSparse:
    """w[rows] or w[rows, columns]: slices of whole block rows and block columns.

    They start and stop at multiples of the block size, or at the end. Of `w[rows]` the values are a
    view of those of w, and so of the columns of a transposed one; others are copied. Raises
    TypeError for other keys, ValueError for other slices.

    >>> w = BlockSparse(np.ones((3, 4, 4)), [[1, 0], [1, 1]])
    >>> w[4:], np.shares_memory(w[4:].data, w.data)
    (BlockSparse(4 x 8, float64, 2 blocks of 4 x 4, density 1), True)
    """
    (row, row_end, height), (column, column_end, width) = _block_ranges(w, key)
    if w.is_transposed:
        return getitem(w.T, _both(key)[::-1]).T
    layout, values = w.stored_layout, w.values
    start, stop = layout.indptr[row], layout.indptr[row_end]
    indptr, indices = layout.indptr[row : row_end + 1] - start, layout.indices[start:stop]
    values = values[start:stop]
    if width < w.shape[1]:
        kept = (indices >= column) & (indices < column_end)
        indptr = np.append(0, np.cumsum(kept))[indptr]
        indices, values = indices[kept] - column, _taken(values, np.flatnonzero(kept))
    part = Layout.from_arrays(indptr, indices, (row_end - row, column_end - column))
    return BlockSparse(values, part, shape=(height, width))


def placed(v: BlockSparse, like: BlockSparse, key: Any) -> BlockSparse:
    """Zeros in the layout of `like`, with v in the place of `like[key]`, as which it is stored."""
    if like.is_transposed:
        return placed(v.T, like.T, _both(key)[::-1]).T
    (row, *_), (column, *_) = _block_ranges(like, key)
    index = like.stored_layout.index
    where = v.stored_layout.find(index.block_rows - row, index.block_columns - column)
    return like.with_values(_taken(v.values, where))


def _both(key: Any) -> tuple[Any, Any]:
    """The rows and the columns of a key."""
    return key if isinstance(key, tuple) and len(key) == 2 else (key, slice(None))


def _block_ranges(w: BlockSparse, key: Any) -> list[tuple[int, int, int]]:
    given = zip(("rows", "columns"), _both(key), w.shape, strict=True)
    return [_block_range(*each, w.block_size) for each in given]


def _block_range(argument: str, given: Any, n: int, size: int) -> tuple[int, int, int]:
    """The first block of a slice, the one behind the last, and how many features that is."""
    if not isinstance(given, slice):
        raise TypeError(
            f"{argument} takes a slice of whole blocks, got {given!r}: see toarray() for others"
        )
    start, stop, step = given.indices(n)
    if step != 1 or start % size or (stop % size and stop != n) or stop <= start:
        raise ValueError(
            f"{argument} takes a slice from one multiple of the block size {size} to another, of "
            f"step 1 and not empty, got {start}:{stop}:{step} of {n}"
        )
    return start // size, -(-stop // size), stop - start


def _taken(values: Any, where: Any, fresh: Any = None) -> Any:
    """values[where], with `fresh`, or zeros, in each place where that is -1."""
    shape = (where.size, *values.shape[1:])
    if not values.size:
        if fresh is not None:
            return elementwise.copy(fresh)
        return zeros(shape, values.dtype, place_of(values))
    if not isinstance(values, DeviceArray):
        taken = np.take(values, where, axis=0, mode="wrap")
        if (gone := where < 0).any():
            taken[gone] = 0 if fresh is None else fresh[gone]
        return taken
    if isinstance(where, np.ndarray):
        where = to_device(where.astype(np.int32))
    taken, width = empty(shape, values.dtype), values.size // values.shape[0]
    flat = (None if a is None else reshape(a, (-1, width)) for a in (values, fresh, taken))
    values, fresh, rows = flat
    kernels.embedding.take_rows(values, where, rows, fresh, np.float32(0))
    return taken


def _like_each_other(a: BlockSparse, b: BlockSparse, what: str) -> tuple[BlockSparse, BlockSparse]:
    """Both of them, stored in row order both or in column order both."""
    for name in ("shape", "block_size", "dtype", "place"):
        one, two = getattr(a, name), getattr(b, name)
        if one != two:
            kind = TypeError if name == "dtype" else ValueError
            raise kind(
                f"{what} takes two matrices of one {name.replace('_', ' ')}, got {one} and {two}"
            )
    if a.is_transposed == b.is_transposed:
        return a, b
    if b.is_transposed:
        return a, BlockSparse(b.data, b.layout, shape=b.shape)
    return BlockSparse(a.data, a.layout, shape=a.shape), b


def _computed(function: Callable[..., Any], *operands: Any) -> Any:
    """A function of arrays and numbers; those of 16 bits on the CPU are widened for it."""
    first = next(x for x in operands if isinstance(x, ARRAYS))
    if isinstance(first, DeviceArray) or first.dtype.itemsize > 2:
        return function(*operands)
    wide = (_wide(x) if isinstance(x, np.ndarray) else x for x in operands)
    return elementwise.cast(function(*wide), first.dtype)


def _wide(a: Any) -> Any:
    return elementwise.cast(a, np.float32) if a.dtype.itemsize == 2 else a


def _of_each(function: Callable[[Any], Any]) -> Callable[[BlockSparse], BlockSparse]:
    return lambda w: w.with_values(_computed(function, w.values))


def _absolute(a: Any) -> Any:
    if isinstance(a, DeviceArray):
        return elementwise.maximum(a, elementwise.negative(a))
    return np.abs(a)


def _of_pairs(
    symbol: str, function: Callable[[Any, Any], Any], layout_of: Callable[[Layout, Layout], Layout]
) -> Callable[[BlockSparse, Any], Any]:
    """An operator of two matrices; of a matrix and a number where that keeps zeros."""
    is_sum = symbol in "+-"

    def operator(a: BlockSparse, b: Any) -> Any:
        if isinstance(b, elementwise.NUMBERS) and not isinstance(b, bool):
            if not is_sum:
                return a.with_values(_computed(function, a.values, b))
            if b == 0:  # as the sum() of several begins
                return a.copy()
            raise TypeError(f"{symbol} takes two block-sparse matrices, or 0, got {b!r}: dense")
        if not isinstance(b, BlockSparse):
            return _refused(symbol, b)
        a, b = _like_each_other(a, b, symbol)
        layout, other = a.stored_layout, b.stored_layout
        layout = layout if layout is other else layout_of(layout, other)
        one, two = _in(a, layout), _in(b, layout)
        return one.with_values(_computed(function, one.values, two.values))

    return operator


def _in(w: BlockSparse, stored: Layout) -> BlockSparse:
    return remap(w.T, stored).T if w.is_transposed else remap(w, stored)


def _refused(symbol: str, other: Any) -> Any:
    """Arrays are refused in words; other types may know this matrix themselves."""
    if isinstance(other, ARRAYS) or is_device_operand(other):
        raise TypeError(
            f"{symbol} takes two block-sparse matrices or one and a number, got a "
            f"{type_name(other)}: see toarray() and BlockSparse.from_dense()"
        )
    return NotImplemented


def _divided(a: BlockSparse, b: Any) -> Any:
    if isinstance(b, elementwise.NUMBERS) and not isinstance(b, bool):
        return a.with_values(_computed(elementwise.divide, a.values, b))
    if isinstance(b, BlockSparse):
        raise TypeError("/ takes a number on the right, got a BlockSparse: it would be 0 / 0")
    return _refused("/", b)


def _compared(name: str) -> Callable[[BlockSparse, Any], Any]:
    """== or !=, as SciPy has them: a sparse matrix of booleans, on the host."""

    def operator(a: BlockSparse, b: Any) -> Any:
        sparse = isinstance(b, BlockSparse) or scipy.sparse.issparse(b)
        if not sparse and not (isinstance(b, elementwise.NUMBERS) and not isinstance(b, bool)):
            return _refused(name, b)
        if sparse and a.shape != b.shape:
            raise ValueError(f"{name} takes two matrices of one shape, got {a.shape} and {b.shape}")
        if isinstance(b, BlockSparse):
            b = _as_csr(b)
        elif type(b) in (int, float):  # which takes the dtype of w, as NumPy has it
            b = a.dtype.type(b)
        return _as_csr(a) == b if name == "==" else _as_csr(a) != b

    return operator


def _as_csr(w: BlockSparse) -> scipy.sparse.csr_array:
    """The values inside the edge, those of 16 bits in float32."""
    if w.is_transposed:
        return _as_csr(w.T).T.tocsr()
    host = w.to("cpu")
    layout = host.stored_layout
    arrays = _wide(host.values), layout.indices, layout.indptr
    full = tuple(n * w.block_size for n in layout.shape)
    return scipy.sparse.bsr_array(arrays, shape=full).tocsr()[: w.shape[0], : w.shape[1]]


_add = _of_pairs("+", elementwise.add, Layout.__or__)
_subtract = _of_pairs("-", elementwise.subtract, Layout.__or__)
_multiply = _of_pairs("*", elementwise.multiply, Layout.__and__)
_negative = _of_each(elementwise.negative)


# As in ops/matmul.py: the package that computes adds the operators to the matrix.
_OPERATORS: dict[str, Callable[..., Any]] = {
    "__add__": _add,
    "__radd__": _add,
    "__sub__": _subtract,
    "__rsub__": lambda w, other: _add(_negative(w), other),
    "__mul__": _multiply,
    "__rmul__": _multiply,
    "__truediv__": _divided,
    "__neg__": _negative,
    "__abs__": _of_each(_absolute),
    "__eq__": _compared("=="),
    "__ne__": _compared("!="),
    "__getitem__": getitem,
    "block_norms": block_norms,
    "diagonal": diagonal,
    "remap": remap,
    "sum": sum,
}

for _name, _function in _OPERATORS.items():
    setattr(BlockSparse, _name, at_home(_function))
