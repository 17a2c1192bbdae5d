"""Block-sparse convolutions: check the operands, choose a kernel, allocate, launch."""

from __future__ import annotations

from typing import Any

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, in_library_of, to_device
from numbsparse.kernels.conv import RUNGS, Window, chosen
from numbsparse.ops.conv_operands import (
    as_pixels,
    as_rows,
    check_features,
    check_weight,
    is_away,
    only_tap,
    small_space,
    space_of,
)
from numbsparse.ops.conv_window import conv_window, in_blocks_of, transpose_window
from numbsparse.ops.create import empty_like
from numbsparse.ops.index import index_beside
from numbsparse.ops.matmul import matmul, sddmm
from numbsparse.ops.operands import in_order, operand
from numbsparse.ops.precision import checked_precision
from numbsparse.patterns.checks import BLOCK_SIZES


@in_order
def conv(
    x: Any,
    w: BlockSparse,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    kernel: str = "auto",
    precision: str | None = None,
) -> Any:
    """The convolution of images with a block-sparse weight, sparse in features and dense in space.

    The sum is over taps t and channels c, and pixels outside the image are zero::

        y[n, o, k] = sum of x[n, o * stride - padding + t * dilation, c] * w[t, c, k]

    It takes time proportional to the kept blocks; a GPU may unfold x in parts of 256 MB, or a tap.

    Parameters
    ----------
    x : array, (batch, ..., in_features)
        One to three axes of space. A NumPy array, or a GPU array of numbsparse, torch, CuPy, JAX or
        Numba, of the weight's dtype: float16, bfloat16, float32, and on the CPU float64.
    w : BlockSparse, (taps * in_features, out_features)
        The rows of one tap under those of another, in C order of kernel_size; where in_features are
        not a multiple of B, each tap begins with a new block, and the rows that are left over are
        never read. `ns.patterns.taps` makes the layout from that of the features; a tap
        without blocks is masked. It is not a transposed view.
    kernel_size, stride, dilation : int, or one for each axis of space
    padding : int, one for each axis, or a (before, after) pair for each; "valid" or "same"
        "valid" is 0. "same" gives outputs of size ceil(space / stride), the odd pixel after.
    kernel : str
        "auto", or a rung of `numbsparse.kernels.conv.RUNGS` by name.
    precision : str, optional
        "highest" or "high", as in `numbsparse.matmul`.

    Returns
    -------
    array, (batch, ..., out_features)
        In the place of x. The length along an axis of space is
        (space + padding - dilation * (kernel_size - 1) - 1) // stride + 1.

    Raises
    ------
    TypeError
        If w is not a BlockSparse, dtypes differ, or sizes are not whole numbers.
    ValueError
        If sizes give no output, padding is longer than the image, features and layout disagree,
        places do not fit, or no kernel serves the case.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> layout = ns.patterns.taps(ns.patterns.dense(1, 2), (3, 3))
    >>> w = ns.BlockSparse(np.ones((18, 4, 4), np.float32), layout)
    >>> y = ns.conv(np.ones((1, 5, 5, 4), np.float32), w, kernel_size=3, padding="same")
    >>> y.shape, y[0, 0, 0, 0], y[0, 2, 2, 0]
    ((1, 5, 5, 8), np.float32(16.0), np.float32(36.0))

    Follows S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
    """
    here = operand(x, "x")
    window = conv_window(space_of(here), kernel_size, stride, padding, dilation)
    return in_library_of(x, conv_in(here, w, window, kernel, precision))


@in_order
def conv_transpose(
    x: Any,
    w: BlockSparse,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
    out_features: int | None = None,
    kernel: str = "auto",
    precision: str | None = None,
) -> Any:
    """The transpose of `conv` with the same weight: its input-gradient, and a way to larger images.

    With o * stride - padding + t * dilation = p::

        y[n, p, c] = sum over t, o and k of x[n, o, k] * w[t, c, k]

    Parameters
    ----------
    x : array, (batch, ..., features), features being the columns of w
    w : BlockSparse, (taps * out_features, features), as `conv` takes it
    kernel_size, stride, padding, dilation : as in `conv`, whose transpose this is
        With "same" the result is stride times as large as x.
    output_padding : int, or one for each axis, less than the stride or the dilation
        How much larger the result is: several sizes have a convolution to the size of x. Unlike
        in torch, padding is at most the result's length.
    out_features : int, optional
        Default: all rows of a tap. Less than B fewer, where the edge is inside the last block.
    kernel, precision : as in `conv`

    Returns
    -------
    array, (batch, ..., out_features)
        The length along an axis of space is
        (space - 1) * stride - padding + dilation * (kernel_size - 1) + 1 + output_padding.

    Raises TypeError and ValueError as `conv` does.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> layout = ns.patterns.taps([[1, 0], [0, 1]], (2, 2))
    >>> w = ns.BlockSparse(np.ones((8, 4, 4), np.float32), layout)
    >>> x = np.ones((1, 3, 3, 8), np.float32)
    >>> ns.conv_transpose(x, w, kernel_size=2, stride=2).shape
    (1, 6, 6, 8)
    """
    here = operand(x, "x")
    window = transpose_window(
        space_of(here), kernel_size, stride, padding, output_padding, dilation
    )
    axes = here.ndim - 2
    return in_library_of(
        x, conv_transpose_in(here, w, window, axes, out_features, kernel, precision)
    )


@in_order
def conv_weight_grad(
    x: Any,
    dy: Any,
    w: BlockSparse,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    kernel: str = "auto",
    precision: str | None = None,
) -> BlockSparse:
    """The gradient of `conv` for its weight, of the kept blocks only.

    dw[t, c, k] = sum over n and o of x[n, o * stride - padding + t * dilation, c] * dy[n, o, k].

    Parameters
    ----------
    x : array, (batch, ..., in_features)
    dy : array, (batch, ..., out_features), in the place and of the dtype of x
    w : BlockSparse
        Says the layout, the block size and the shape; its values are not read.
    kernel_size, stride, padding, dilation, kernel, precision : as in `conv`

    Returns
    -------
    BlockSparse, with the layout of w, on x's device

    Raises TypeError and ValueError as `conv` does.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> w = ns.BlockSparse(np.zeros((3, 4, 4)), np.ones((3, 1)))
    >>> x, dy = np.ones((1, 7, 4)), np.ones((1, 5, 4))
    >>> ns.conv_weight_grad(x, dy, w, kernel_size=3).values[0, 0, 0]
    np.float64(5.0)
    """
    x, dy = operand(x, "x"), operand(dy, "dy")
    window = conv_window(space_of(x), kernel_size, stride, padding, dilation)
    return conv_weight_grad_in(x, dy, w, window, kernel, precision)


def conv_in(x: Any, w: Any, window: Window, kernel: str, precision: str | None) -> Any:
    """`conv` of an array of ours, in a window."""
    check_weight(w)
    if is_away(x, w):
        return conv_in(to_device(x), w, window, kernel, precision).numpy()
    precision, in_features = checked_precision(precision), x.shape[-1]
    check_features(w, window, in_features)
    shape = (x.shape[0], *small_space(window, x.ndim - 2), w.shape[1])
    if is_product(window, kernel, w):
        return matmul(x, only_tap(w, in_features), precision=precision)
    y = empty_like(shape, x)
    of = choose("forward", kernel, x, w, precision, window, in_features)
    of.forward(as_pixels(x), w.values, index_beside(w.layout, x), window, as_pixels(y), precision)
    return y


def conv_transpose_in(
    x: Any,
    w: Any,
    window: Window,
    axes: int,
    out_features: int | None,
    kernel: str,
    precision: str | None,
) -> Any:
    """`conv_transpose` of an array of ours, in the window of its convolution."""
    check_weight(w)
    if is_away(x, w):
        x, how = to_device(x), (out_features, kernel, precision)
        return conv_transpose_in(x, w, window, axes, *how).numpy()
    precision = checked_precision(precision)
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"x takes {w.shape[1]} features with this w, got {x.shape[-1]}")
    rows = in_blocks_of(w.layout.shape[0], window) * w.block_size
    out_features = rows if out_features is None else out_features
    check_features(w, window, out_features, "out_features")
    if is_product(window, kernel, w):
        return matmul(x, only_tap(w, out_features).T, precision=precision)
    dx = empty_like((x.shape[0], *window.big[3 - axes :], out_features), x)
    of = choose("input_grad", kernel, x, w, precision, window, out_features)
    of.input_grad(
        as_pixels(x), w.values, index_beside(w.layout, x), window, as_pixels(dx), precision
    )
    return dx


def conv_weight_grad_in(
    x: Any, dy: Any, w: Any, window: Window, kernel: str, precision: str | None
) -> BlockSparse:
    """`conv_weight_grad` of arrays of ours, in a window."""
    check_weight(w)
    precision = checked_precision(precision)
    if isinstance(x, DeviceArray) != isinstance(dy, DeviceArray):
        raise ValueError("x and dy take one device, got one on the CPU and one on a GPU")
    if x.dtype != dy.dtype:
        raise TypeError(f"x and dy take one dtype, got {x.dtype} and {dy.dtype}")
    check_features(w, window, x.shape[-1])
    expected = (x.shape[0], *small_space(window, x.ndim - 2), w.shape[1])
    if dy.shape != expected:
        raise ValueError(f"dy takes the shape {expected} with this x and w, got {dy.shape}")
    size, layout = w.block_size, w.layout
    if is_product(window, kernel, w):
        only = sddmm(as_rows(x).T, as_rows(dy), layout, block_size=size, precision=precision)
        return w.with_values(only.values)
    values = empty_like((layout.n_blocks, size, size), x)
    of = choose("weight_grad", kernel, x, w, precision, window, x.shape[-1])
    of.weight_grad(as_pixels(x), as_pixels(dy), index_beside(layout, x), window, values, precision)
    return w.with_values(values)


def is_product(window: Window, kernel: str, w: BlockSparse) -> bool:
    """Whether the ladder of matrix products serves it: convolutions take more block sizes."""
    return window.is_identity and kernel == "auto" and w.block_size in BLOCK_SIZES


def choose(
    product: str,
    kernel: str,
    x: Any,
    w: BlockSparse,
    precision: str,
    window: Window,
    in_features: int,
) -> Any:
    """The rung that serves: the named one, or the last that does. ValueError where none does."""
    place = "cuda" if isinstance(x, DeviceArray) else "cpu"
    if kernel != "auto" and kernel not in list(RUNGS):
        raise ValueError(f'kernel takes "auto" or one of {list(RUNGS)}, got {kernel!r}')
    names = [name for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
    call = window, in_features, w.shape[1]
    return chosen(
        names if kernel == "auto" else [kernel],
        *(product, w.block_size, x.dtype, place, x.shape[0], precision, *call),
    )
