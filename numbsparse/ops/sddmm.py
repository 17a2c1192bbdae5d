"""The kept blocks of a dense product, the weight-gradient: whole, into memory, or in parts."""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse, unchecked
from numbsparse.blocks import checked_shape
from numbsparse.device import DeviceArray, runtime
from numbsparse.dtypes import FLOATS
from numbsparse.kernels.matmul import function_of, rung, takes_gates, takes_places
from numbsparse.layout import Layout, as_layout
from numbsparse.ops.choice import checked_kernel, choose, lies_across, rows_of
from numbsparse.ops.create import empty_beside
from numbsparse.ops.gates import Selection
from numbsparse.ops.index import index_beside
from numbsparse.ops.made import MadeLayout, clear_rest, taken
from numbsparse.ops.operands import ARRAYS, check_pair, in_order, operand
from numbsparse.ops.precision import checked_precision
from numbsparse.ops.repeats import remember, replayed
from numbsparse.patterns.checks import integer


def sddmm(
    a: Any,
    b: Any,
    layout: Any,
    *,
    block_size: int | None = None,
    kernel: str = "auto",
    precision: str | None = None,
) -> Any:
    """The kept blocks of the product of two dense matrices: the weight-gradient.

    s[c, k] = sum over n of a[c, n] * b[n, k] where the layout keeps the block of (c, k).

    Parameters
    ----------
    a : array, (in_features, batch); for a weight-gradient `x.T`
    b : array, (batch, out_features); for a weight-gradient `dy`
        Both NumPy arrays or both GPU arrays, of one dtype and of any strides; dtypes as in
        `matmul`.
    layout : Layout, pattern, or BlockSparse
        Which blocks to compute; a BlockSparse also gives the block size.
    block_size : int, optional
        B. Needed only where the features are not multiples of it.
    kernel : str
        "auto", or a rung of `numbsparse.kernels.matmul.LADDER` by name.
    precision : str, optional
        "highest" or "high", as in `matmul`.

    Returns
    -------
    BlockSparse, (in_features, out_features), on the device of `a` and `b`

    Raises
    ------
    TypeError
        If the dtypes of `a` and `b` differ, or are none of floats.
    ValueError
        If shapes do not meet, places differ, or no kernel serves the case.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> x, dy = np.ones((3, 8), np.float32), np.ones((3, 4), np.float32)
    >>> ns.sddmm(x.T, dy, ns.Layout([[1], [0]])).toarray()[:5, 0]
    array([3., 3., 3., 3., 0.], dtype=float32)

    Follows S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
    """
    precision, kernel = checked_precision(precision), checked_kernel(kernel)
    of_ours = type(a) is type(b) and type(a) in ARRAYS
    if of_ours and kernel == "auto" and not runtime.several_devices:
        return _repeated(a, b, layout, block_size, precision)
    return _sddmm(a, b, layout, block_size, kernel, precision)


@in_order
def _sddmm(
    a: Any, b: Any, layout: Any, block_size: int | None, kernel: str, precision: str
) -> BlockSparse:
    (a, b), gates = _factors(a, b), None
    kept = index = None
    if isinstance(layout, Selection):  # of gates; what is computed where they are 0 is open
        kept, layout = layout, layout.layout
        gates = None if kept.is_known else kept.gates
    shape = (a.shape[0], b.shape[1])
    if isinstance(layout, BlockSparse):
        if layout.shape != shape:
            raise ValueError(f"layout has the shape {layout.shape}, a @ b has {shape}")
        if layout.is_transposed:  # keep the order of the stored blocks
            how: Any = {"block_size": block_size, "kernel": kernel, "precision": precision}
            return sddmm(b.T, a.T, layout.T, **how).T
        layout, block_size = layout.stored_layout, layout.own_size(block_size)
    layout = as_layout(layout)
    size = size_of_blocks(shape, layout.shape, block_size)
    if kept is not None and kept.in_place and kept.places is not None and layout.n_blocks:
        chosen = _chosen(a, size, layout, kernel, precision)
        if takes_places(chosen, "weight_grad", a.dtype):
            kernel, layout, index = chosen, kept.full, kept.index_beside(a)
    values = empty_beside((layout.n_blocks, size, size), a)
    return sddmm_into(values, a, b, layout, kernel, precision, gates, index)


def _chosen(a: Any, size: int, layout: Layout, kernel: str, precision: str) -> str:
    """The rung that takes a product of factors a and b in blocks of so many."""
    case = "weight_grad", kernel, size, a, rows_of(a.T), precision, layout
    return choose(*case, feature_major=lies_across(a.T))


def sddmm_into(
    values: Any,
    a: Any,
    b: Any,
    layout: Layout,
    kernel: str = "auto",
    precision: str = "highest",
    gates: Any = None,
    index: Any = None,
) -> BlockSparse:
    """`sddmm` with memory for its values, (n_blocks, B, B); they are open where a gate is 0.

    index : of those blocks that are computed, if not all: others are open too
    """
    (a, b), values = _factors(a, b), operand(values, "values")
    chosen = _chosen(a, values.shape[1], layout, kernel, precision)
    dw = BlockSparse(values, layout, shape=(a.shape[0], b.shape[1]))
    compute = function_of(chosen, "weight_grad")
    if gates is not None and takes_gates(chosen, "weight_grad", False):
        compute = partial(compute, gates=gates)
    index = index_beside(layout, a) if index is None else index
    compute(a.T, b, index, taken(layout, values), precision)
    if not getattr(rung(chosen.partition("/")[0]), "CLEARS_REST", False):
        clear_rest(layout, values)
    return dw


def _factors(a: Any, b: Any) -> tuple[Any, Any]:
    a, b = operand(a, "a"), operand(b, "b")
    check_pair("a", a, "b", b)
    if str(a.dtype) not in FLOATS:
        raise TypeError(f"a and b take {', '.join(FLOATS)}, got {a.dtype}")
    check_factors(a, b)
    return a, b


def check_factors(a: Any, b: Any) -> None:
    """Refuse arrays of any library that are not (in_features, batch) and (batch, out_features)."""
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a and b take the shapes (in_features, batch) and (batch, out_features), "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )


def _repeated(a: Any, b: Any, layout: Any, block_size: int | None, precision: str) -> BlockSparse:
    """`sddmm` of arrays of ours: what follows from shapes and dtype is worked out once.

    On a GPU its launches are started again: see ops/repeats.py.
    """
    kept, own = layout, None
    if isinstance(layout, BlockSparse):
        kept, own = layout.stored_layout, (layout.shape, layout.block_size, layout.is_transposed)
    case = type(a), a.shape, b.shape, a.dtype, block_size, own
    size_is_usual = block_size is None or type(block_size) is int
    usual = type(kept) is Layout and size_is_usual and a.dtype is b.dtype
    if usual and (known := kept.index.calls.get(case)):
        shape, compute = known
        values = empty_beside(shape, a)
        if compute is None:
            work = partial(sddmm_into, values, a, b, kept, "auto", precision)
            replayed(kept, ("sddmm", precision), (a, b, values), work)
        else:
            compute(a.T, b, values)
        return unchecked(values, kept, (a.shape[0], b.shape[1]))
    found = _sddmm(a, b, layout, block_size, "auto", precision)
    if usual and not found.is_transposed:
        of = "weight_grad", len(b), found.values, kept.index
        compute = None if type(a) is DeviceArray else rung("k0_cpu").again(*of)
        remember(kept.index, case, (found.values.shape, compute))
    return found


def size_of_blocks(shape: tuple[int, int], grid: tuple[int, int], given: int | None) -> int:
    """B of a product a @ b of this shape: as given, else what its features and blocks say.

    Raises TypeError or ValueError where it is none, and where the product does not end within the
    last blocks.
    """
    if given is None:
        sizes = {n / blocks for n, blocks in zip(shape, grid, strict=True)}
        if len(sizes) != 1 or not (size := sizes.pop()).is_integer() or size == 0:
            raise ValueError(
                f"block_size is needed: features {shape} do not divide into the layout's {grid} "
                "blocks"
            )
        return int(size)
    size = integer("block_size", given)
    checked_shape(f"a @ b, in blocks of {size},", shape, grid, size)
    return size


def sddmm_in_parts(
    a: Any,
    b: Any,
    like: BlockSparse,
    shares: tuple[float, ...],
    done: Callable[[Any, int, int], None],
    precision: str,
) -> BlockSparse:
    """`sddmm(a, b, like)` by ranges of block rows, with about these shares of all blocks.

    So who sums it over several cards begins before all is there.

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
