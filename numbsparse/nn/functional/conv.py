"""The three convolutions; the gradient of each is another of them."""

from __future__ import annotations

from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, record, unread
from numbsparse.nn.functional.arithmetic import data_of, edges


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
    sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    if not (isinstance(x, Tensor) or isinstance(w, Tensor)):
        return ops.conv(x, w, **sizes, kernel=kernel, precision=precision)
    x = _dense(x, "x")
    window = ops.conv_window(ops.space_of(data_of(x)), **sizes)
    return _conv(x, w, window, (kernel, ops.checked_precision(precision)))


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
    sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    sizes |= {"output_padding": output_padding}
    if not (isinstance(x, Tensor) or isinstance(w, Tensor)):
        how: Any = {"out_features": out_features, "kernel": kernel, "precision": precision}
        return ops.conv_transpose(x, w, **sizes, **how)
    x = _dense(x, "x")
    window = ops.transpose_window(ops.space_of(data_of(x)), **sizes)
    return _transpose(x, w, window, out_features, (kernel, ops.checked_precision(precision)))


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
    sizes = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    if not (isinstance(x, Tensor) or isinstance(dy, Tensor)):
        return ops.conv_weight_grad(x, dy, data_of(w), **sizes, kernel=kernel, precision=precision)
    x, dy = _dense(x, "x"), _dense(dy, "dy")
    window = ops.conv_window(ops.space_of(data_of(x)), **sizes)
    return _weight_grad(x, dy, data_of(w), window, (kernel, ops.checked_precision(precision)))


conv.__doc__ = ops.conv.__doc__
conv_transpose.__doc__ = ops.conv_transpose.__doc__
conv_weight_grad.__doc__ = ops.conv_weight_grad.__doc__


def _dense(x: Any, argument: str) -> Any:
    return x if isinstance(x, Tensor) else ops.operand(x, argument)


def _conv(x: Any, w: Any, window: Any, how: Any) -> Tensor:
    x, w = as_tensor(x), as_tensor(w)
    features, kept = x.shape[-1], unread(w)
    return record(
        ops.conv_in(data_of(x), data_of(w), window, *how),
        *edges(
            (x, lambda dy, y: _transpose(dy, w, window, features, how)),
            (w, lambda dy, y: _weight_grad(x, dy, kept, window, how)),
        ),
    )


def _transpose(x: Any, w: Any, window: Any, out_features: Any, how: Any) -> Tensor:
    x, w = as_tensor(x), as_tensor(w)
    axes, kept = len(x.shape) - 2, unread(w)
    return record(
        ops.conv_transpose_in(data_of(x), data_of(w), window, axes, out_features, *how),
        *edges(
            (x, lambda dy, y: _conv(dy, w, window, how)),
            (w, lambda dy, y: _weight_grad(dy, x, kept, window, how)),
        ),
    )


def _weight_grad(x: Any, dy: Any, like: Any, window: Any, how: Any) -> Tensor:
    x, dy = as_tensor(x), as_tensor(dy)
    features = x.shape[-1]
    return record(
        ops.conv_weight_grad_in(data_of(x), data_of(dy), like, window, *how),
        *edges(
            (x, lambda dw, w: _transpose(dy, dw, window, features, how)),
            (dy, lambda dw, w: _conv(x, dw, window, how)),
        ),
    )
