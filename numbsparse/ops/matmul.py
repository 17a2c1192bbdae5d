"""The block-sparse product: check the operands, choose a kernel, allocate, launch."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import (
    DeviceArray,
    empty,
    empty_in_library_of,
    empty_quickly,
    in_library_of,
    in_order_with,
    is_device_operand,
    is_read_only,
    on,
    one_gpu,
    read_quickly,
    runtime,
    to_device,
)
from numbsparse.dtypes import as_array, type_name
from numbsparse.kernels.matmul import (
    function_of,
    rung,
    scales_slowly,
    takes_gates,
    takes_places,
)
from numbsparse.ops.choice import checked_kernel, choose, lies_across, rows_of
from numbsparse.ops.gates import Selection, gated, kept_of
from numbsparse.ops.index import index_beside
from numbsparse.ops.made import taken
from numbsparse.ops.operands import ARRAYS, check_contiguous, check_form, operand, overlap
from numbsparse.ops.precision import checked_precision
from numbsparse.ops.repeats import ALIGNED, C_CONTIGUOUS, remember, replayed
from numbsparse.ops.shape import reshape

GRADIENTS = (((1, 0, 2), (2, 1, 0)), ((0, 0, 2), (2, 0, 1)), ((1, 2, 0), (0, 1, 0)))
"""Of the products y = x @ w, x = y @ w.T and w = sddmm(x.T, y), each linear in both operands: which
one gives the gradient of its first operand, and which that of its second; each with two of the
gradient of its result, its first operand, and its second."""


def matmul(
    x: Any,
    w: Any,
    *,
    gate: Any = None,
    out: Any = None,
    kernel: str = "auto",
    precision: str | None = None,
) -> Any:
    """The product of a dense and a block-sparse matrix, `x @ w` or `w @ x`::

        y[n, k] = sum over c of x[n, c] * w[c, k]

    It takes time proportional to the kept blocks. In `w @ x` the features of x and of the result
    come before the batch, in memory too. The input-gradient is `matmul(dy, w.T)`. A product is
    computed where the weight is; a NumPy operand is copied to a GPU for it, and the result back.

    Parameters
    ----------
    x : array, (..., in_features), or BlockSparse
    w : BlockSparse, (in_features, out_features), or array, (out_features, batch)
        One of the two is a BlockSparse. Dense operands are arrays of NumPy, or of torch or JAX on
        the CPU, or GPU arrays of numbsparse, torch, CuPy, JAX or Numba, of the weight's dtype:
        float16, bfloat16 (with the package ml_dtypes), float32, and on the CPU float64. Strides are
        any; on a GPU none is negative.
    gate : array, (n_blocks,), or BlockSparse of 1 x 1 blocks in the layout of w, optional
        A number for each block, in the order of `w.data`, for `y = x @ (gate[:, None, None] * w)`,
        on w's device: float32, or float64 where w is. The gated weight is rounded to the dtype of
        w. A block whose gate is zero is skipped, in both gradients too: neither it nor its gate
        gets one. NaN and infinity as gates are multiplied like any number, but may leave zeros of
        w where features end inside a block.
        For each new set of zeros the host makes a layout and a plan; the last 16 are remembered.
        It reads gates on a GPU once after each change that this library makes to them; another
        library's arrays, and those lent to one, at every product. Within a step that `ns.graph`
        captures it reads only those that the step keeps and does not write: see there. Zeros of
        others, such as trained ones, are skipped by the kernels that BENCHMARKS.md names, under
        "Layouts that change". Results are the same, unless x or gates have infinity or NaN.
        In a layout that `Layout.on_device` made the host reads no gate either, and they are in
        the order of `w.values`, for `w.T` too.
    out : array, (..., out_features), or (in_features, batch) in `w @ x`, optional
        C-contiguous, of the same dtype, in memory that no operand has; written whole and returned.
    kernel : str
        "auto", or a rung of `numbsparse.kernels.matmul.LADDER` by name.
    precision : str, optional
        For float32: "highest" is as accurate as a float32 product: a sum of n terms is within
        (n + 8) 2^-23 of the sum of `|x w|`, for n = 1 too; "high" lets tensor cores round operands
        to tf32, 10 bits of mantissa, for another 2^-9 of it. Sums are float32 in both. Default:
        what `numbsparse.set_precision` says, at first "highest".

    Returns
    -------
    array, (..., out_features), or (in_features, batch) in `w @ x`
        Beside the dense operand: NumPy for NumPy, torch for torch, CuPy for CuPy, JAX for JAX, of
        Numba a DeviceArray. JAX's on a GPU is a copy, and was waited for: `numbsparse.jax` does
        neither. Sums are kept in float32, for float64 in float64, and rounded at the end.

    Raises
    ------
    TypeError
        If neither or both operands are block-sparse, or dtypes differ; for a gate of another dtype.
    ValueError
        If shapes do not meet, places do not fit, `out` does not fit, or no kernel serves the case:
        the message says what each of them lacks. For a tensor of torch on a GPU that requires
        grad, outside of `torch.no_grad()`: `numbsparse.torch` records gradients.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.BlockSparse(np.ones((1, 4, 4), np.float32), ns.Layout([[1, 0]]))
    >>> ns.matmul(np.ones((2, 4), np.float32), w)
    array([[4., 4., 4., 4., 0., 0., 0., 0.],
           [4., 4., 4., 4., 0., 0., 0., 0.]], dtype=float32)

    Follows S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
    """
    if isinstance(x, BlockSparse) and isinstance(w, BlockSparse):
        raise TypeError("matmul takes one block-sparse operand, got two")
    if isinstance(w, BlockSparse):
        return _multiply(x, w, gate, False, out, kernel, precision)
    if isinstance(x, BlockSparse):
        return _multiply(w, x, gate, True, out, kernel, precision)
    raise TypeError(f"matmul takes one BlockSparse, got x a {type_name(x)} and w a {type_name(w)}")


def _multiply(
    dense: Any,
    w: BlockSparse,
    gate: Any,
    feature_major: bool,
    out: Any,
    kernel: str,
    precision: str | None,
) -> Any:
    """The product: its launches again, where all of it is known."""
    precision, y = checked_precision(precision), out
    known = gate is None and checked_kernel(kernel) == "auto"
    if known and type(dense) is type(w.values) is np.ndarray:
        return _of_arrays(dense, w, feature_major, out, precision)
    if known and w.place == "cuda" and not runtime.several_devices:
        y = _memory_beside(dense, w, feature_major) if out is None else out
        if y is not None:
            what = feature_major, w.is_transposed, w.shape, precision
            of = dense, w, None, feature_major, y, kernel, precision
            replayed(w.stored_layout, what, (dense, w.values, y), partial(_in_order, *of))
            return y
    return _in_order(dense, w, gate, feature_major, out, kernel, precision)


def _of_arrays(
    dense: np.ndarray, w: BlockSparse, feature_major: bool, out: Any, precision: str
) -> Any:
    """The product of NumPy arrays: what follows from their shapes and dtype is worked out once."""
    values, index, dtype = w.values, w.stored_layout.index, dense.dtype
    case = dense.shape, w.shape, w.is_transposed, feature_major, values.shape, dtype
    flags = values.flags.num
    usual = flags & C_CONTIGUOUS and flags & dense.flags.num & ALIGNED and dtype is values.dtype
    if usual and (known := index.calls.get(case)):
        shape, compute = known
        y = np.empty(shape, dtype) if out is None else _checked_out(out, shape, dense, w)
        compute(dense, values, y)
        return y if out is None else out
    y = _in_order(dense, w, None, feature_major, out, "auto", precision)
    if usual:
        batch = prod(dense.shape[1:] if feature_major else dense.shape[:-1])
        product = "input_grad" if w.is_transposed != feature_major else "forward"
        compute = rung("k0_cpu").again(product, batch, values, index)
        if feature_major:
            compute = _of_columns(compute)
        elif dense.ndim != 2:
            compute = _of_rows(compute, batch, *w.shape)
        remember(index, case, (tuple(y.shape), compute))
    return y


def _of_rows(compute: Callable[..., None], batch: int, n: int, k: int) -> Callable[..., None]:
    """The same of arrays with any number of axes before the features."""
    return lambda x, values, y: compute(x.reshape(batch, n), values, y.reshape(batch, k))


def _of_columns(compute: Callable[..., None]) -> Callable[..., None]:
    """The same of features before the batch."""
    return lambda x, values, y: compute(_columns_as_rows(x), values, _columns_as_rows(y))


def _memory_beside(dense: Any, w: BlockSparse, feature_major: bool) -> Any:
    """Memory for the result beside an array of ours or a tensor of torch on a GPU; else None."""
    if type(dense) is not DeviceArray and not getattr(dense, "is_cuda", False):
        return None
    shape = _shape_of_result(dense.shape, w, feature_major)
    return None if shape is None else empty_quickly(dense, shape)


def _in_order(dense: Any, w: BlockSparse, gate: Any, *of: Any) -> Any:
    """`_product`, in order with the work of the library that `dense` comes from."""
    if runtime.several_devices:
        home = one_gpu({"x": dense, "w": w, "gate": gate, "out": of[1]})
        if home is not None and home != runtime.current_id():
            with on(home):
                return _multiply(dense, w, gate, *of)
    if type(dense) in ARRAYS:
        return _product(dense, dense, w, None if gate is None else kept_of(w, gate), *of)
    if gate is None:
        x = read_quickly(dense) if is_device_operand(dense) else as_array(dense, "x")
        if x is not None:
            return _product(dense, x, w, None, *of)
    with in_order_with(dense):
        kept = None if gate is None else kept_of(w, gate)
        return _product(dense, operand(dense, "x"), w, kept, *of)


def _product(
    dense: Any,
    x: Any,
    w: BlockSparse,
    kept: Selection | None,
    feature_major: bool,
    out: Any,
    kernel: str,
    precision: str,
) -> Any:
    """dense, x as an array of ours, @ w; or w @ x if `feature_major`: features before the batch."""
    on_gpu, w_on_gpu = isinstance(x, DeviceArray), isinstance(w.values, DeviceArray)
    here = "in w @ x, " if feature_major else ""  # `matmul(w, x)`: x is the second one
    if on_gpu and not w_on_gpu:
        move = 'move the weight with w.to("cuda") first'
        raise ValueError(f"{here}x is on a GPU and w on the CPU: {move}")
    if x.dtype != w.dtype:
        raise TypeError(f"{here}x and w take one dtype, got {x.dtype} and {w.dtype}")
    if feature_major and x.ndim > 2:
        raise ValueError(f"{here}x takes one or two axes, got {x.ndim}")
    shape = _shape_of_result(x.shape, w, feature_major)
    if shape is None:
        takes = f"({w.shape[1]}, batch)" if feature_major else f"(..., {w.shape[0]})"
        raise ValueError(f"{here}x takes the shape {takes} with this w, got {x.shape}")
    target = None if out is None else _checked_out(out, shape, x, w)
    if w_on_gpu and not on_gpu:
        y = target if isinstance(target, DeviceArray) else empty(shape, w.dtype)
        _run(to_device(x), w, y, feature_major, kernel, precision, kept)
        if target is None:
            return in_library_of(dense, y.numpy())
        if target is not y:
            target[...] = y.numpy()
        return out
    if target is None and on_gpu:
        out, target = empty_in_library_of(dense, shape, x.dtype)
    elif target is None:
        target = np.empty(shape, x.dtype)
    elif isinstance(target, DeviceArray) != on_gpu:
        raise ValueError("out takes the device of x, got one on the CPU and one on a GPU")
    _run(x, w, target, feature_major, kernel, precision, kept)
    return in_library_of(dense, target) if out is None else out


def _shape_of_result(
    shape: tuple[int, ...], w: BlockSparse, feature_major: bool
) -> tuple[int, ...] | None:
    """Of x of this shape times w, or of w times x; None where they do not meet."""
    rows, columns = w.shape
    if feature_major:
        return (rows, *shape[1:]) if shape and shape[0] == columns else None
    return (*shape[:-1], columns) if shape and shape[-1] == rows else None


def _run(
    x: Any,
    w: BlockSparse,
    y: Any,
    feature_major: bool,
    kernel: str,
    precision: str,
    kept: Selection | None = None,
) -> None:
    """One product on operands of one place: y = x @ w, or w @ x = (x.T @ w.T).T by strides."""
    across = lies_across(_columns_as_rows(x) if feature_major else x)
    if feature_major:
        x, y, w = _columns_as_rows(x), _columns_as_rows(y), w.T
    elif len(x.shape) != 2:
        batch = prod(x.shape[:-1])
        x, y = (reshape(a, (batch, a.shape[-1])) for a in (x, y))
    product, layout = "input_grad" if w.is_transposed else "forward", w.stored_layout
    if kept is not None:
        layout = kept.layout
    case = product, kernel, w.block_size, x, rows_of(x), precision, layout
    chosen = choose(*case, kept is not None, across)
    compute, values = function_of(chosen, product), w.values
    on_gpu = isinstance(x, DeviceArray)
    if kept is not None and on_gpu and _reads_all_of_w(chosen, product, kept, values.dtype):
        factors = None if kept.ones else kept.gates
        compute(x, values, kept.index_beside(x), y, precision, gates=factors)
        return
    if kept is not None:
        v = gated(w.T if w.is_transposed else w, kept.gates, kept)
        values, layout = v.values, v.stored_layout
    compute(x, taken(layout, values), index_beside(layout, x), y, precision)


def multiplies_gates(
    x: Any,
    w: Any,
    kept: Selection,
    kernel: str = "auto",
    precision: str = "highest",
    trained: bool = False,
) -> bool:
    """Whether the kernel of a product with gates, `x @ w` or `w @ x`, is to read w as it is.

    Not where gates are `trained`, and so mostly neither 0 nor 1, and that kernel is slow then: the
    gated weight, computed before, serves the input-gradient too. Of 512 rows, 8,192 features,
    density 0.1 and blocks of 32 to 128 an H200 took 1.4 to 1.5 times as long as without gates, and
    in the kernel 1.7 to 2.1.
    """
    first = isinstance(x, BlockSparse)
    dense, w = (w, x) if first else (x, w)
    if not isinstance(dense, DeviceArray) or dense.dtype != w.dtype:
        return False
    batch = prod(dense.shape[1:] if first else dense.shape[:-1])
    product = "forward" if w.is_transposed == first else "input_grad"
    case = product, kernel, w.block_size, dense, batch, precision, kept.layout
    across = lies_across(_columns_as_rows(dense) if first else dense)
    chosen, n = choose(*case, True, across), batch * w.values.size
    slow = w.dtype.itemsize == 2 and scales_slowly(chosen, w.block_size, n)
    if trained and not kept.is_known and slow:
        return False
    return _reads_all_of_w(chosen, product, kept, w.dtype)


def _reads_all_of_w(chosen: str, product: str, kept: Selection, dtype: Any) -> bool:
    """Whether a rung takes w as it is, with what its gates leave."""
    by_places = kept.ones and takes_places(chosen, product, dtype)
    return by_places or takes_gates(chosen, product, kept.is_known)


def _columns_as_rows(a: Any) -> Any:
    """(features, batch) as (batch, features), a view; a vector is one column."""
    return a.T if a.ndim == 2 else a.reshape(1, -1) if isinstance(a, np.ndarray) else a[None]


def _checked_out(out: Any, shape: tuple[int, ...], x: Any, w: BlockSparse) -> Any:
    array = operand(out, "out")
    check_form("out", array, shape, w.dtype)
    check_contiguous("out", array)
    on_cpu = isinstance(array, np.ndarray)
    # A second view of a torch tensor shares its memory; a second copy of a list does not.
    if on_cpu and not (
        array is out or not array.size or np.may_share_memory(array, operand(out, "out"))
    ):
        raise ValueError(f"out takes a writeable array, got {type_name(out)}")
    if not array.flags.writeable if on_cpu else is_read_only(out):
        raise ValueError(f"out takes a writeable array, got a read-only {type_name(out)}")
    for name, other in (("x", x), ("w", w.values)):
        if isinstance(other, DeviceArray) != on_cpu and overlap(array, other):
            raise ValueError(f"out takes memory of its own, got some of {name}")
    return array


def _times(w: BlockSparse, x: Any) -> Any:
    """`x @ w`, of NumPy arrays without the arguments that `matmul` asks for."""
    if type(x) is type(w.values) is np.ndarray:
        return _of_arrays(x, w, False, None, checked_precision(None))
    return matmul(x, w)


# The matrix cannot import the package that multiplies it, so that package adds the operator.
BlockSparse.__matmul__ = matmul  # type: ignore[method-assign]
BlockSparse.__rmatmul__ = _times  # type: ignore[method-assign]
