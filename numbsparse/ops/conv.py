"""Block-sparse convolutions: check the operands, choose a kernel, allocate, launch.

What follows from shapes, dtypes and the window is worked out once, and kept with the layout; on a
GPU launches on the same memory are kept too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, runtime, to_device
from numbsparse.kernels.conv import RUNGS, Window, chosen
from numbsparse.layout import Layout
from numbsparse.ops.conv_operands import (
    as_pixels,
    as_rows,
    check_features,
    check_weight,
    is_away,
    only_tap,
    small_space,
    whole,
)
from numbsparse.ops.conv_window import in_blocks_of
from numbsparse.ops.create import empty_beside
from numbsparse.ops.index import index_beside
from numbsparse.ops.matmul import matmul
from numbsparse.ops.operands import ARRAYS, check_form, check_pair
from numbsparse.ops.precision import checked_precision
from numbsparse.ops.repeats import remember, replayed
from numbsparse.ops.sddmm import sddmm, sddmm_into
from numbsparse.patterns.checks import BLOCK_SIZES


def conv(
    x: Any, w: Any, window: Window, kernel: str, precision: str | None, out: Any = None
) -> Any:
    """See `numbsparse.conv`: of an array of ours, in a window; into `out`, where it is given."""
    check_weight(w)
    how = window, kernel, checked_precision(precision)
    case, call = _known("forward", x, w.values, w, *how)
    if call is None:
        if is_away(x, w):
            return conv(to_device(x), w, *how).numpy()
        check_features(w, window, x.shape[-1])
        shape = (x.shape[0], *small_space(window, x.ndim - 2), w.shape[1])
        call = _prepared("forward", x, w, how, x.shape[-1], shape, case)
    if call.compute is None:
        return matmul(x, only_tap(w, x.shape[-1]), out=out, precision=how[2])
    return call.run(x, w.values, w.layout, out)


def conv_transpose(
    x: Any,
    w: Any,
    window: Window,
    axes: int,
    out_features: int | None,
    kernel: str,
    precision: str | None,
    out: Any = None,
) -> Any:
    """See `numbsparse.conv_transpose`: of an array of ours, in the window of its convolution."""
    check_weight(w)
    how = window, kernel, checked_precision(precision)
    case, call = _known("input_grad", x, w.values, w, *how, type(out_features), str(out_features))
    if call is None:
        if is_away(x, w):
            x = to_device(x)
            return conv_transpose(x, w, window, axes, out_features, *how[1:]).numpy()
        if x.shape[-1] != w.shape[1]:
            raise ValueError(f"x takes {w.shape[1]} features with this w, got {x.shape[-1]}")
        rows = in_blocks_of(w.layout.shape[0], window) * w.block_size
        features = rows if out_features is None else out_features
        check_features(w, window, features, "out_features")
        shape = (x.shape[0], *window.big[3 - axes :], features)
        call = _prepared("input_grad", x, w, how, features, shape, case)
    if call.compute is None:
        return matmul(x, only_tap(w, call.shape[-1]).T, out=out, precision=how[2])
    return call.run(x, w.values, w.layout, out)


def conv_weight_grad(
    x: Any, dy: Any, w: Any, window: Window, kernel: str, precision: str | None, out: Any = None
) -> BlockSparse:
    """See `numbsparse.conv_weight_grad`: of arrays of ours, in a window."""
    check_weight(w)
    how = window, kernel, checked_precision(precision)
    case, call = _known("weight_grad", x, dy, w, *how)
    size, layout = w.block_size, w.layout
    if call is None:
        check_pair("x", x, "dy", dy)
        check_features(w, window, x.shape[-1])
        check_form("dy", dy, (x.shape[0], *small_space(window, x.ndim - 2), w.shape[1]), x.dtype)
        shape = (layout.n_blocks, size, size)
        call = _prepared("weight_grad", x, w, how, x.shape[-1], shape, case)
    if call.compute is not None:
        return w.with_values(call.run(x, dy, layout, out))
    a, b = as_rows(x).T, as_rows(dy)
    if out is not None:
        return sddmm_into(out, a, b, layout, precision=how[2])
    return w.with_values(sddmm(a, b, layout, block_size=size, precision=how[2]).values)


class Call(NamedTuple):
    """A convolution that was checked, of operands of such shapes.

    Attributes
    ----------
    shape : of the result
    compute : what a rung computes it with; None: it is a product of the ladder
    again : the same as a function of the three arrays alone, where a rung has one
    what : (product, window, precision), and whether launches are kept
    """

    shape: tuple[int, ...]
    compute: Callable[..., None] | None
    again: Callable[..., None] | None
    what: tuple[str, Window, str, bool]

    def run(self, a: Any, b: Any, layout: Layout, out: Any = None) -> Any:
        """The result, in `out` where that is given."""
        y = empty_beside(self.shape, a) if out is None else out
        product, window, precision, kept = self.what

        def work() -> None:
            of_weight = product == "weight_grad"
            operands = as_pixels(a), as_pixels(b) if of_weight else whole(b)
            result = y if of_weight else as_pixels(y)
            if self.again is not None:
                self.again(*operands, result)
            elif self.compute is not None:
                index = index_beside(layout, a)
                self.compute(*operands, index, window, result, precision)

        if kept and isinstance(a, DeviceArray):
            replayed(layout, (self.compute, window, precision), (a, b, y), work)
        else:
            work()
        return y


def _known(product: str, a: Any, b: Any, w: BlockSparse, *how: Any) -> tuple[Any, Call | None]:
    """What such a call follows from, None if it is not kept; and the call, if it is known."""
    kind, layout = type(a), w.stored_layout
    ours = kind is type(b) and kind in ARRAYS and type(layout) is Layout
    if not ours or type(how[1]) is not str or runtime.several_devices:
        return None, None
    case = product, kind, a.shape, b.shape, a.dtype, b.dtype, w.shape, w.values.shape, how
    return case, layout.index.calls.get(case)


def _prepared(
    product: str, x: Any, w: BlockSparse, how: Any, features: int, shape: tuple[int, ...], case: Any
) -> Call:
    """The call by the named rung, or the last that serves; remembered, where there is a case.

    `features` are those of the larger images. Raises ValueError where no rung serves.
    """
    window, kernel, precision = how
    if not isinstance(kernel, str) or kernel not in ("auto", *RUNGS):
        raise ValueError(f'kernel takes "auto" or one of {list(RUNGS)}, got {kernel!r}')
    size, layout, compute, again = w.block_size, w.layout, None, None
    # Convolutions take more block sizes than the ladder of matrix products.
    if not (window.is_identity and kernel == "auto" and size in BLOCK_SIZES):
        place = "cuda" if isinstance(x, DeviceArray) else "cpu"
        names = [name for name in RUNGS if RUNGS[name] == place and name != "k0_reference"]
        names = names if kernel == "auto" else [kernel]
        served = product, size, x.dtype, place, x.shape[0], precision, window, features, w.shape[1]
        of = chosen(names, layout.n_blocks, *served)
        compute = getattr(of, product)
        if case is not None and hasattr(of, "again"):
            values = w.values if product != "weight_grad" else np.empty(shape, x.dtype)
            again = of.again(product, as_pixels(x).shape, values, layout.index, window)
    call = Call(shape, compute, again, (product, window, precision, case is not None))
    if case is not None:
        remember(layout.index, case, call)
    return call
