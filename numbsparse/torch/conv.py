"""torch.nn.Conv1d to Conv3d with a layout, and the operators that they are made of."""

from functools import lru_cache
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.fx import Proxy

from numbsparse import ops, patterns
from numbsparse.kernels.conv import Window
from numbsparse.layout import Layout
from numbsparse.nn.conv import in_words
from numbsparse.nn.linear import layout_for
from numbsparse.ops.conv_window import check_padding, sizes
from numbsparse.patterns.checks import integer
from numbsparse.patterns.taps import as_kept
from numbsparse.torch.handles import layout_of
from numbsparse.torch.layer import OneWeight
from numbsparse.torch.operators import (
    array_of,
    check_dense,
    family,
    given_back,
    matrix,
    of_blocks,
)

# Operators take images channels last and how = layout, rows, columns (the features of both), size,
# window (its 18 numbers), precision.


@lru_cache(maxsize=256)
def _window(*numbers: int) -> Window:
    return Window(*(numbers[i : i + 3] for i in range(0, 18, 3)))  # type: ignore[arg-type]


def _numbers(space: tuple[int, ...], *sizes: Any) -> tuple[int, ...]:
    if is_compiling():  # which warns of what is kept
        return sum(ops.conv_window(space, *sizes), ())
    return sum(ops.known_window(ops.conv_window, space, *sizes), ())


def _weight(values: Any, layout: str, columns: int) -> Any:
    return matrix(values, layout, layout_of(layout).shape[0] * values.shape[1], columns)


def _conv(x: Any, w: Any, *how: Any, out: Any = None) -> Any:
    layout, _, columns, _, window, precision = how
    of = array_of(x, "x"), _weight(w, layout, columns), _window(*window), "auto", precision
    return given_back(ops.conv(*of, _memory(out)), x)


def _transpose(y: Any, w: Any, *how: Any, out: Any = None) -> Any:
    layout, rows, columns, _, window, precision = how
    of = array_of(y, "y"), _weight(w, layout, columns), _window(*window), y.dim() - 2, rows
    return given_back(ops.conv_transpose(*of, "auto", precision, _memory(out)), y)


def _weight_grad(x: Any, y: Any, *how: Any, out: Any = None) -> Any:
    layout, _, columns, size, window, precision = how
    # Of this weight no values are read: they are memory that nothing touches.
    nothing = _weight(torch.empty(layout_of(layout).n_blocks, size, size), layout, columns)
    of = array_of(x, "x"), array_of(y, "y"), nothing, _window(*window), "auto", precision
    return given_back(ops.conv_weight_grad(*of, _memory(out)).values, x)


def _memory(out: Any) -> Any:
    return None if out is None else array_of(out, "out")


def _of_y(x: Any, w: Any, *how: Any) -> Any:
    return x.shape[0], *how[4][8 - x.dim() : 6], how[2]


def _of_x(y: Any, w: Any, *how: Any) -> Any:
    return y.shape[0], *how[4][5 - y.dim() : 3], how[1]


def _joined(convolve: Any, images: Any, *of: Any) -> Any:
    """One call for a batch of batches of images."""
    return convolve(images.flatten(0, 1), *of).unflatten(0, images.shape[:2])


conv, conv_transpose, conv_weight_grad = family(
    "conv conv_transpose conv_weight_grad",
    "int rows, int columns, int block_size, SymInt[] window",
    (_conv, _transpose, _weight_grad),
    (_of_y, _of_x, of_blocks),
    _joined,
    ({"shape": _of_y}, {"shape": _of_x}, {"shape": of_blocks}),
)


class _Conv(OneWeight):
    """What the convolutions have in common; `axes` of space."""

    axes = 0

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        layout: Any = None,
        taps: Any = None,
        block_size: int = 32,
        precision: str | None = None,
    ) -> None:
        super().__init__(block_size, precision)
        if integer("groups", groups) != 1:
            raise ValueError(
                f"groups takes 1, got {groups}: numbsparse.patterns.block_diagonal as the layout "
                "keeps groups apart"
            )
        if not isinstance(padding_mode, str) or padding_mode != "zeros":
            raise ValueError(f'padding_mode takes "zeros", got {padding_mode!r}')
        self.in_channels = integer("in_channels", in_channels)
        self.out_channels = integer("out_channels", out_channels)
        kernel, self.stride, self.dilation = sizes(self.axes, kernel_size, stride, dilation)
        check_padding(self.axes, padding)
        self.kernel_size, self.padding = kernel, padding
        self.features = in_channels, out_channels
        channels = layout_for(*self.features, layout, block_size)
        taps = None if taps is None else as_kept(taps, kernel, "taps")
        of_taps = Layout(patterns.taps(channels.pattern, kernel, kept=taps))
        self.hold_both(of_taps, bias, device, dtype)

    def shape_of(self, name: str) -> tuple[int, int]:
        return self.layout.shape[0] * self.block_size, self.out_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, in_channels, *space) or without a batch -> y, likewise."""
        if isinstance(x, Proxy):
            return self.in_graph(x)  # type: ignore[no-any-return]
        check_dense("x", x)
        if x.dim() == self.axes + 1:
            return _Conv.forward(self, x[None])[0]  # and not by hooks, which run once
        if x.dim() != self.axes + 2 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"x takes the shape (batch, {self.in_channels}, *space) with {self.axes} axes of "
                f"space, got {tuple(x.shape)}"
            )
        sizes = self.kernel_size, self.stride, self.padding, self.dilation
        numbers = _numbers(tuple(x.shape[2:]), *sizes)
        sides = (self.in_channels, self.out_channels, self.block_size)
        how = (self.handles["weight"].word, *sides, numbers, ops.checked_precision(self.precision))
        y = conv((x.movedim(1, -1), self.weight), how)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.movedim(-1, 1)

    def extra_repr(self) -> str:
        return f"{in_words(self)}, block_size={self.block_size}, layout={self.layout}"


class Conv1d(_Conv):
    """torch.nn.Conv1d with a layout, x (batch, in_channels, length): see `Conv2d`.

    >>> import torch, numbsparse.torch as nst
    >>> nst.Conv1d(8, 16, 3, padding="same", block_size=8)(torch.ones(2, 8, 10)).shape
    torch.Size([2, 16, 10])
    """

    axes = 1


class Conv2d(_Conv):
    """torch.nn.Conv2d with a layout: y = conv(x) + bias, x (batch, in_channels, height, width).

    Images are computed channels last: those in `torch.channels_last` are not copied, and results
    are channels last.

    Parameters
    ----------
    in_channels, out_channels, kernel_size, stride, padding, dilation, bias, device, dtype
        As in torch.nn.Conv2d; padding may be a (before, after) pair for each axis too, and "same"
        goes with a stride.
    groups, padding_mode : only 1 and "zeros"
    layout : Layout or pattern, (in_blocks, out_blocks), optional
        Which blocks of channels are joined, through every tap; None joins all.
    taps : array of bool, of the shape of the kernel, optional
        False where a tap is masked; see `numbsparse.patterns.causal`.
    block_size : int
        Channels that are not multiples of it are allowed.
    precision : "highest" or "high", optional

    Attributes
    ----------
    weight : Parameter, (n_blocks, B, B), as `numbsparse.conv` takes it
    layout : Layout, (taps * in_blocks, out_blocks)
    bias : Parameter, (out_channels,), or None

    Raises TypeError or ValueError that names the argument.

    Examples
    --------
    >>> import torch, numbsparse as ns, numbsparse.torch as nst
    >>> conv = nst.Conv2d(128, 128, 3, 2, 1, layout=ns.patterns.banded(4, 4, width=1))
    >>> conv(torch.ones(1, 128, 8, 8)).shape
    torch.Size([1, 128, 4, 4])
    """

    axes = 2


class Conv3d(_Conv):
    """torch.nn.Conv3d with a layout, x (batch, in_channels, depth, height, width): see `Conv2d`.

    >>> import torch, numbsparse.torch as nst
    >>> conv = nst.Conv3d(8, 16, 3, padding="same", block_size=8)
    >>> conv(torch.ones(1, 8, 2, 4, 4)).shape
    torch.Size([1, 16, 2, 4, 4])
    """

    axes = 3
