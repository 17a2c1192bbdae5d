"""The three convolutions; the gradient of each is another of them."""

from collections.abc import Callable
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, record, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import in_library_of
from numbsparse.nn.functional.arithmetic import data_of
from numbsparse.ops.operands import in_order


def conv(
    x: Any,
    w: Any,
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
    Pixels outside may be left out, or be 0 times w: NaN of an infinity, as in the gradients.

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
    how = kernel, ops.checked_precision(precision)
    sizes = ops.conv_window, kernel_size, stride, padding, dilation
    if isinstance(x, Tensor) or isinstance(w, Tensor):
        return _conv(x := _dense(x, "x"), w, _window(x, *sizes), how)
    return _in_order(x, lambda x: ops.conv(x, w, _window(x, *sizes), *how))


def conv_transpose(
    x: Any,
    w: Any,
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
    how = kernel, ops.checked_precision(precision)
    sizes = ops.transpose_window, kernel_size, stride, padding, output_padding, dilation
    if isinstance(x, Tensor) or isinstance(w, Tensor):
        return _transpose(x := _dense(x, "x"), w, _window(x, *sizes), out_features, how)
    of = out_features, *how
    return _in_order(x, lambda x: ops.conv_transpose(x, w, _window(x, *sizes), x.ndim - 2, *of))


def conv_weight_grad(
    x: Any,
    dy: Any,
    w: Any,
    *,
    kernel_size: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    kernel: str = "auto",
    precision: str | None = None,
) -> Any:
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
    how = kernel, ops.checked_precision(precision)
    sizes = ops.conv_window, kernel_size, stride, padding, dilation
    like = data_of(w)
    if isinstance(x, Tensor) or isinstance(dy, Tensor):
        return _weight_grad(x := _dense(x, "x"), _dense(dy, "dy"), like, _window(x, *sizes), how)
    return _in_order(
        x, lambda x: ops.conv_weight_grad(x, ops.operand(dy, "dy"), like, _window(x, *sizes), *how)
    )


@in_order
def _in_order(x: Any, compute: Callable[[Any], Any]) -> Any:
    """Of an array of any library, in order with that library's work."""
    result = compute(ops.operand(x, "x"))
    return result if isinstance(result, BlockSparse) else in_library_of(x, result)


def _dense(x: Any, argument: str) -> Any:
    return x if isinstance(x, Tensor) else ops.operand(x, argument)


def _window(x: Any, make: Any, *sizes: Any) -> Any:
    return ops.known_window(make, ops.space_of(data_of(x)), *sizes)


def _conv(x: Any, w: Any, window: Any, how: Any) -> Tensor:
    y = ops.conv(data_of(x), data_of(w), window, *how)
    x, w = as_tensor(x), as_tensor(w, "w")
    features, kept = x.shape[-1], unread(w)
    return record(
        y,
        (x, lambda dy, y: _transpose(dy, w, window, features, how)),
        (w, lambda dy, y: _weight_grad(x, dy, kept, window, how)),
    )


def _transpose(x: Any, w: Any, window: Any, out_features: Any, how: Any) -> Tensor:
    y = ops.conv_transpose(data_of(x), data_of(w), window, len(x.shape) - 2, out_features, *how)
    x, w = as_tensor(x), as_tensor(w, "w")
    kept = unread(w)
    return record(
        y,
        (x, lambda dy, y: _conv(dy, w, window, how)),
        (w, lambda dy, y: _weight_grad(dy, x, kept, window, how)),
    )


def _weight_grad(x: Any, dy: Any, like: Any, window: Any, how: Any) -> Tensor:
    dw = ops.conv_weight_grad(data_of(x), data_of(dy), like, window, *how)
    x, dy = as_tensor(x), as_tensor(dy, "dy")
    features = x.shape[-1]
    return record(
        dw,
        (x, lambda dw, w: _transpose(dy, dw, window, features, how)),
        (dy, lambda dw, w: _conv(x, dw, window, how)),
    )
