"""Block-sparse convolutions: check the operands, choose a kernel, allocate, launch."""

from typing import Any

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, to_device
from numbsparse.kernels.conv import RUNGS, Window, chosen
from numbsparse.ops.conv_operands import (
    as_pixels,
    as_rows,
    check_features,
    check_weight,
    is_away,
    only_tap,
    small_space,
)
from numbsparse.ops.conv_window import in_blocks_of
from numbsparse.ops.create import empty_beside
from numbsparse.ops.index import index_beside
from numbsparse.ops.matmul import matmul
from numbsparse.ops.operands import check_form, check_pair
from numbsparse.ops.precision import checked_precision
from numbsparse.ops.sddmm import sddmm
from numbsparse.patterns.checks import BLOCK_SIZES


def conv(x: Any, w: Any, window: Window, kernel: str, precision: str | None) -> Any:
    """See `numbsparse.conv`: of an array of ours, in a window."""
    check_weight(w)
    if is_away(x, w):
        return conv(to_device(x), w, window, kernel, precision).numpy()
    precision, in_features = checked_precision(precision), x.shape[-1]
    check_features(w, window, in_features)
    shape = (x.shape[0], *small_space(window, x.ndim - 2), w.shape[1])
    if is_product(window, kernel, w):
        return matmul(x, only_tap(w, in_features), precision=precision)
    y = empty_beside(shape, x)
    of = choose("forward", kernel, x, w, precision, window, in_features)
    of.forward(as_pixels(x), w.values, index_beside(w.layout, x), window, as_pixels(y), precision)
    return y


def conv_transpose(
    x: Any,
    w: Any,
    window: Window,
    axes: int,
    out_features: int | None,
    kernel: str,
    precision: str | None,
) -> Any:
    """See `numbsparse.conv_transpose`: of an array of ours, in the window of its convolution."""
    check_weight(w)
    if is_away(x, w):
        x, how = to_device(x), (out_features, kernel, precision)
        return conv_transpose(x, w, window, axes, *how).numpy()
    precision = checked_precision(precision)
    if x.shape[-1] != w.shape[1]:
        raise ValueError(f"x takes {w.shape[1]} features with this w, got {x.shape[-1]}")
    rows = in_blocks_of(w.layout.shape[0], window) * w.block_size
    out_features = rows if out_features is None else out_features
    check_features(w, window, out_features, "out_features")
    if is_product(window, kernel, w):
        return matmul(x, only_tap(w, out_features).T, precision=precision)
    dx = empty_beside((x.shape[0], *window.big[3 - axes :], out_features), x)
    of = choose("input_grad", kernel, x, w, precision, window, out_features)
    of.input_grad(
        as_pixels(x), w.values, index_beside(w.layout, x), window, as_pixels(dx), precision
    )
    return dx


def conv_weight_grad(
    x: Any, dy: Any, w: Any, window: Window, kernel: str, precision: str | None
) -> BlockSparse:
    """See `numbsparse.conv_weight_grad`: of arrays of ours, in a window."""
    check_weight(w)
    precision = checked_precision(precision)
    check_pair("x", x, "dy", dy)
    check_features(w, window, x.shape[-1])
    check_form("dy", dy, (x.shape[0], *small_space(window, x.ndim - 2), w.shape[1]), x.dtype)
    size, layout = w.block_size, w.layout
    if is_product(window, kernel, w):
        only = sddmm(as_rows(x).T, as_rows(dy), layout, block_size=size, precision=precision)
        return w.with_values(only.values)
    values = empty_beside((layout.n_blocks, size, size), x)
    of = choose("weight_grad", kernel, x, w, precision, window, x.shape[-1])
    of.weight_grad(as_pixels(x), as_pixels(dy), index_beside(layout, x), window, values, precision)
    return w.with_values(values)


def is_product(window: Window, kernel: str, w: BlockSparse) -> bool:
    """Whether the ladder of matrix products serves it: convolutions take more block sizes."""
    return (
        window.is_identity
        and isinstance(kernel, str)
        and kernel == "auto"
        and w.block_size in BLOCK_SIZES
    )


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
    if not isinstance(kernel, str) or kernel not in ("auto", *RUNGS):
        raise ValueError(f'kernel takes "auto" or one of {list(RUNGS)}, got {kernel!r}')
    names = [name for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
    call = window, in_features, w.shape[1]
    return chosen(
        names if kernel == "auto" else [kernel],
        w.layout.n_blocks,
        *(product, w.block_size, x.dtype, place, x.shape[0], precision, *call),
    )
