"""The block-sparse products: check the operands, choose a kernel, allocate, launch."""

from __future__ import annotations

from math import prod
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import (
    DeviceArray,
    as_device_array,
    empty,
    in_library_of,
    is_device_operand,
    to_device,
)
from numbsparse.kernels.matmul import PRECISIONS, RUNGS, rung
from numbsparse.layout import Index, Layout, Walk, as_layout
from numbsparse.ops.elementwise import copy_into
from numbsparse.ops.shape import reshape


def matmul(
    x: Any, w: Any, *, out: Any = None, kernel: str = "auto", precision: str = "highest"
) -> Any:
    """The product of a dense and a block-sparse matrix, `x @ w` or `w @ x`.

    y[n, k] = sum over c of x[n, c] * w[c, k], in time proportional to the kept blocks.

    The input-gradient is the same product with the transposed view, `matmul(dy, w.T)`. The weight's
    place decides where the product is computed, the dense operand's where the result lives: a NumPy
    operand meets a weight on the GPU by being copied there, and the result copied back.

    Parameters
    ----------
    x : array, (..., in_features), or BlockSparse
    w : BlockSparse, (in_features, out_features), or array, (out_features, batch)
        One of the two is a BlockSparse. Dense operands are NumPy arrays, or GPU arrays of
        numbsparse, torch, CuPy, JAX or Numba, of the weight's dtype and of any strides.
    out : array, (..., out_features), optional
        C-contiguous, of the same dtype; written whole and returned.
    kernel : str
        "auto", or a rung of `numbsparse.kernels.matmul.LADDER` by name.
    precision : str
        For float32: "highest" is as accurate as a float32 product; "high" lets tensor cores round
        the factors to tf32, 10 bits of mantissa. Sums are float32 in both.

    Returns
    -------
    array, (..., out_features)
        Beside the dense operand: NumPy for NumPy, torch for torch, CuPy for CuPy, else a
        DeviceArray. Sums are kept in float32 for float16 and float32, in float64 for float64.

    Raises
    ------
    TypeError
        If neither or both operands are block-sparse, or dtypes differ.
    ValueError
        If shapes do not meet, places do not fit, `out` does not fit, or no kernel serves the case.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), ns.Layout([[1, 0]]))
    >>> ns.matmul(np.ones((2, 4), np.float32), w)
    array([[4., 4., 4., 4., 0., 0., 0., 0.],
           [4., 4., 4., 4., 0., 0., 0., 0.]], dtype=float32)

    Follows S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
    """
    if isinstance(w, BlockSparse):
        if isinstance(x, BlockSparse):
            raise TypeError("matmul takes one block-sparse operand, got two")
        return _dense_times_sparse(x, w, out, kernel, precision)
    if not isinstance(x, BlockSparse):
        raise TypeError(
            f"matmul takes one BlockSparse, got x a {type(x).__name__} and w a {type(w).__name__}"
        )
    if len(np.shape(w)) > 2:
        raise ValueError(f"w @ x takes an x of one or two axes, got {len(np.shape(w))}")
    y = _dense_times_sparse(w.T, x.T, None, kernel, precision).T  # w @ x = (x.T @ w.T).T
    if out is None:
        return y
    copy_into(_checked_out(out, tuple(y.shape), x.dtype), _operand(y, "y"))
    return out


def sddmm(
    a: Any,
    b: Any,
    layout: Any,
    *,
    block_size: int | None = None,
    kernel: str = "auto",
    precision: str = "highest",
) -> Any:
    """The product of two dense matrices at the kept blocks alone: the weight-gradient.

    s[c, k] = sum over n of a[c, n] * b[n, k] where the layout keeps the block of (c, k).

    Parameters
    ----------
    a : array, (in_features, batch); for a weight-gradient `x.T`
    b : array, (batch, out_features); for a weight-gradient `dy`
        Both NumPy arrays or both GPU arrays, of one dtype.
    layout : Layout, pattern, or BlockSparse
        Which blocks to compute; a BlockSparse also gives the block size.
    block_size : int, optional
        B. Needed only where the features are no multiples of it.
    kernel : str
        "auto", or a rung of `numbsparse.kernels.matmul.LADDER` by name.
    precision : str
        "highest" or "high", as in `matmul`.

    Returns
    -------
    BlockSparse, (in_features, out_features), in the place of `a` and `b`

    Raises
    ------
    TypeError
        If the dtypes of `a` and `b` differ.
    ValueError
        If shapes do not meet, places differ, or no kernel serves the case.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> x, dy = np.ones((3, 8), np.float32), np.ones((3, 4), np.float32)
    >>> ns.sddmm(x.T, dy, ns.Layout([[1], [0]])).toarray()[:5, 0]
    array([3., 3., 3., 3., 0.], dtype=float32)
    """
    a, b = _operand(a, "a"), _operand(b, "b")
    if isinstance(a, DeviceArray) != isinstance(b, DeviceArray):
        raise ValueError("a and b take the same place, got one on the CPU and one on a GPU")
    if a.dtype != b.dtype:
        raise TypeError(f"a and b take one dtype, got {a.dtype} and {b.dtype}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a and b take the shapes (in_features, batch) and (batch, out_features), "
            f"got {a.shape} and {b.shape}"
        )
    shape = (a.shape[0], b.shape[1])
    if isinstance(layout, BlockSparse):
        if layout.shape != shape:
            raise ValueError(f"layout has the shape {layout.shape}, a @ b has {shape}")
        if layout.is_transposed:  # keep the order of the stored blocks
            return sddmm(b.T, a.T, layout.T, kernel=kernel, precision=precision).T
        layout, block_size = layout.stored_layout, layout.block_size
    layout = as_layout(layout)
    size = block_size or _block_size(shape, layout.shape)
    chosen = _choose("weight_grad", kernel, size, a, a.shape[1], precision)
    values = _empty((layout.n_blocks, size, size), a)
    dw = BlockSparse(values, layout, shape=shape)
    chosen.weight_grad(a.T, b, index_beside(layout, a), values, precision)
    return dw


def index_beside(layout: Layout, array: Any) -> Index:
    """The layout's index arrays in the place of `array`; sent to the GPU once per layout."""
    if not isinstance(array, DeviceArray):
        return layout.index
    index = _device_index.get(layout)
    if index is None:
        host = layout.index
        index = _device_index[layout] = Index(
            Walk(*map(to_device, host.rows)),
            Walk(*map(to_device, host.columns)),
            to_device(host.block_rows),
            to_device(host.block_columns),
        )
    return index


_device_index: WeakKeyDictionary[Layout, Index] = WeakKeyDictionary()


def _dense_times_sparse(x: Any, w: BlockSparse, out: Any, kernel: str, precision: str) -> Any:
    caller, x = x, _operand(x, "x")
    if isinstance(x, DeviceArray) and w.place == "cpu":
        raise ValueError('x is on a GPU and w on the CPU: move the weight with w.to("cuda") first')
    if x.dtype != w.dtype:
        raise TypeError(f"x and w take one dtype, got {x.dtype} and {w.dtype}")
    if x.ndim == 0 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"x takes the shape (..., {w.shape[0]}) with this w, got {x.shape}")
    shape = (*x.shape[:-1], w.shape[1])
    if out is not None:
        out = _checked_out(caller_out := out, shape, w.dtype)
    batch = prod(x.shape[:-1])
    rows = reshape(x, (batch, x.shape[-1])) if x.ndim != 2 else x
    if w.place == "cuda" and not isinstance(rows, DeviceArray):
        y = _product(to_device(rows), w, None, batch, kernel, precision).numpy().reshape(shape)
        if out is None:
            return y
        copy_into(out, y if isinstance(out, np.ndarray) else to_device(y))
        return caller_out
    if out is None:
        y = _product(rows, w, None, batch, kernel, precision).reshape(shape)
        return in_library_of(caller, y) if isinstance(y, DeviceArray) else y
    if isinstance(out, DeviceArray) != isinstance(rows, DeviceArray):
        raise ValueError("out takes the place of x, got one on the CPU and one on a GPU")
    _product(rows, w, out.reshape((batch, w.shape[1])), batch, kernel, precision)
    return caller_out


def _product(x: Any, w: BlockSparse, y: Any, batch: int, kernel: str, precision: str) -> Any:
    """x (batch, in_features) times w, both in one place, into y."""
    product = "input_grad" if w.is_transposed else "forward"
    chosen = _choose(product, kernel, w.block_size, x, batch, precision)
    if y is None:
        y = _empty((batch, w.shape[1]), x)
    getattr(chosen, product)(x, w.values, index_beside(w.stored_layout, x), y, precision)
    return y


def _choose(
    product: str, kernel: str, block_size: int, x: Any, batch: int, precision: str
) -> ModuleType:
    """The rung that serves: the named one, or the fastest that does."""
    place = "cuda" if isinstance(x, DeviceArray) else "cpu"
    if precision not in PRECISIONS:
        raise ValueError(f"precision takes one of {PRECISIONS}, got {precision!r}")
    if kernel != "auto":
        if kernel not in RUNGS:
            raise ValueError(f'kernel takes "auto" or one of {list(RUNGS)}, got {kernel!r}')
        names = [kernel]
    else:  # the reference is for checking, never for speed
        names = [name for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
    reasons = []
    for name in reversed(names):
        reason = rung(name).unsupported(product, block_size, x.dtype, place, batch, precision)
        if reason is None:
            return rung(name)
        reasons.append(reason)
    raise ValueError("; ".join(reasons))


def _operand(x: Any, argument: str) -> Any:
    """A dense operand as a NumPy array or a DeviceArray."""
    if isinstance(x, np.ndarray | DeviceArray):
        return x
    return as_device_array(x, argument) if is_device_operand(x) else np.asarray(x)


def _checked_out(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
    array = _operand(out, "out")
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"out takes {shape} of {dtype}, got {array.shape} of {array.dtype}")
    contiguous = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous
    if not contiguous:
        raise ValueError("out takes a C-contiguous array")
    if isinstance(array, np.ndarray) and (array is not out or not array.flags.writeable):
        raise ValueError(f"out takes a writeable array, got {type(out).__name__}")
    return array


def _empty(shape: tuple[int, ...], beside: Any) -> Any:
    if isinstance(beside, DeviceArray):
        return empty(shape, beside.dtype)
    return np.empty(shape, beside.dtype)


def _block_size(shape: tuple[int, int], grid: tuple[int, int]) -> int:
    """B, where it follows from the features and the layout's blocks."""
    sizes = {n / blocks for n, blocks in zip(shape, grid, strict=True)}
    if len(sizes) != 1 or not (size := sizes.pop()).is_integer() or size == 0:
        raise ValueError(
            f"block_size is needed: features {shape} are no multiples of the layout's {grid} blocks"
        )
    return int(size)


def _matmul(self: BlockSparse, x: Any) -> Any:
    return matmul(self, x)


def _rmatmul(self: BlockSparse, x: Any) -> Any:
    return matmul(x, self)


# The matrix cannot import the room that multiplies it, so that room brings it the operator.
BlockSparse.__matmul__ = _matmul  # type: ignore[method-assign]
BlockSparse.__rmatmul__ = _rmatmul  # type: ignore[method-assign]
