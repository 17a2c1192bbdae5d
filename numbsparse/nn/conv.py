"""Convolutions: a sparse one is a convolution with a layout."""

from math import prod
from typing import Any

import numpy as np

from numbsparse import ops, patterns
from numbsparse.autograd import Tensor, as_tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import float_dtype
from numbsparse.layout import Layout, as_layout
from numbsparse.nn import functional, init
from numbsparse.nn.functional.layers import check_features, with_bias
from numbsparse.nn.linear import layout_for
from numbsparse.nn.module import MatrixParameter, Module, Parameter
from numbsparse.ops.conv_window import check_padding, extra_sizes, sizes
from numbsparse.patterns.checks import any_generator, flag, integer
from numbsparse.patterns.taps import as_kept


class _Conv(Module):
    """What the convolutions have in common; `axes` of space."""

    axes = 0
    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        *,
        bias: bool = True,
        layout: Any = None,
        taps: Any = None,
        block_size: int = 32,
        dtype: Any = np.float32,
        precision: str | None = None,
        seed: Any = None,
    ):
        super().__init__()
        self.in_channels = integer("in_channels", in_channels)
        self.out_channels = integer("out_channels", out_channels)
        self.kernel_size, self.stride, self.dilation = sizes(
            self.axes, kernel_size, stride, dilation
        )
        check_padding(self.axes, padding)
        self.padding, self.precision = padding, ops.own_precision(precision)
        rng, dtype = any_generator(seed), float_dtype(dtype)
        joined = self._layout(layout, taps, block_size)
        height, width = self.in_channels, self.out_channels
        if self.transposed:
            height, width = width, height
            inputs = init.column_fan_in(joined.T, block_size, width)  # of each tap
            inputs = inputs.reshape(prod(self.kernel_size), -1).sum(0)
            outputs = joined.index.block_rows % inputs.size
        else:
            inputs = init.column_fan_in(joined, block_size, height)
            outputs = joined.index.block_columns
        self.tap_features = height
        bound = 1 / np.sqrt(np.maximum(inputs, 1))  # of each block of outputs
        values = rng.uniform(-1, 1, (joined.n_blocks, block_size, block_size))
        values *= bound[outputs][:, None, None]
        shape = (joined.shape[0] * block_size, width)
        weight = BlockSparse(values.astype(dtype), joined, shape=shape)
        self.weight = MatrixParameter(weight.with_values(ops.inside(weight, height)))
        self.bias = None
        if flag("bias", bias):
            first = rng.uniform(-1, 1, out_channels) * np.repeat(bound, block_size)[:out_channels]
            self.bias = Parameter(first.astype(dtype))

    def _layout(self, layout: Any, taps: Any, block_size: int) -> Layout:
        """The layout of the weight: (taps * in_blocks, out_blocks), or of its transpose."""
        n_taps = prod(self.kernel_size)
        one = layout_for(self.in_channels, self.out_channels, None, block_size)
        pattern = one.pattern if layout is None else as_layout(layout).pattern
        if pattern.shape == (n_taps * one.shape[0], one.shape[1]) and n_taps > 1:
            if taps is not None:
                raise ValueError("taps takes None where the layout has rows for each tap")
            if not self.transposed:
                return Layout(pattern)
            return Layout(
                pattern.reshape(n_taps, *one.shape).swapaxes(1, 2).reshape(-1, one.shape[0])
            )
        layout_for(self.in_channels, self.out_channels, pattern, block_size)
        taps = None if taps is None else as_kept(taps, self.kernel_size, "taps")
        return Layout(
            patterns.taps(pattern.T if self.transposed else pattern, self.kernel_size, kept=taps)
        )

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if x.ndim != self.axes + 2 or x.shape[-1] != self.in_channels:
            raise ValueError(
                f"x takes {self.axes + 2} axes, (batch, *space, channels), {self.axes} of space "
                f"and {self.in_channels} channels, got {x.shape}"
            )
        check_features((self.out_channels,), self.weight.dtype, bias=self.bias)
        y = self._convolved(
            x,
            kernel_size=self.kernel_size,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            precision=self.precision,
        )
        return with_bias(y, self.bias)

    def _convolved(self, x: Tensor, **sizes: Any) -> Tensor:
        return functional.conv(x, self.weight, **sizes)

    def describe(self) -> str:
        weight = self.weight.data
        blocks = f"{weight.n_blocks} blocks of {weight.block_size}, density {weight.density:.3g}"
        return f"{in_words(self)}; {blocks}"


def in_words(conv: Any) -> str:
    """A convolution by its sizes; one of torch's too."""
    return (
        f"{conv.in_channels}, {conv.out_channels}, kernel_size={conv.kernel_size}, "
        f"stride={conv.stride}, padding={conv.padding!r}, dilation={conv.dilation}, "
        f"bias={conv.bias is not None}"
    )


class _ConvTranspose(_Conv):
    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        **options: Any,
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, **options)
        self.output_padding = extra_sizes(output_padding, self.stride, self.dilation)

    def _convolved(self, x: Tensor, **sizes: Any) -> Tensor:
        sizes |= {"output_padding": self.output_padding, "out_features": self.out_channels}
        return functional.conv_transpose(x, self.weight, **sizes)


class Conv1d(_Conv):
    """y = conv(x) + bias, x (batch, length, in_channels): see `numbsparse.conv`.

    Parameters as in `Conv2d`.

    >>> import numpy as np
    >>> from numbsparse import nn
    >>> nn.Conv1d(8, 16, 3, padding="same", block_size=8)(np.ones((2, 10, 8), np.float32)).shape
    (2, 10, 16)
    """

    axes = 1


class Conv2d(_Conv):
    """y = conv(x) + bias, x (batch, height, width, in_channels): see `numbsparse.conv`.

    Parameters
    ----------
    in_channels, out_channels : int
    kernel_size, stride, dilation : int, or one for each axis
    padding : int, one for each axis, or a (before, after) pair for each; "valid" or "same"
    bias : bool
    layout : Layout or pattern, (in_blocks, out_blocks), optional
        Which blocks of channels are joined, through every tap; None joins all. Or one of
        (taps * in_blocks, out_blocks), which says it for each tap. It takes the place of torch's
        `groups`: `numbsparse.patterns.block_diagonal` keeps groups apart.
    taps : array of bool, of the shape of the kernel, optional
        False where a tap is masked; see `numbsparse.patterns.causal`.
    block_size : int
        Channels that are not multiples of it are allowed.
    dtype : float32 or float64 (float16 or bfloat16 on a GPU)
    precision : "highest" or "high", optional
    seed : int or numpy.random.Generator, optional

    Attributes
    ----------
    weight : Parameter of a BlockSparse, as `numbsparse.conv` takes it
        Drawn uniformly within 1 / sqrt(fan-in); the fan-in counts kept blocks only.
    bias : Parameter, (out_channels,), or None

    Raises TypeError or ValueError that names the argument.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse import nn
    >>> layout = ns.patterns.banded(4, 4, width=1)
    >>> conv = nn.Conv2d(128, 128, 3, stride=2, padding=1, layout=layout, seed=0)
    >>> conv(np.ones((1, 8, 8, 128), np.float32)).shape
    (1, 4, 4, 128)
    """

    axes = 2


class Conv3d(_Conv):
    """y = conv(x) + bias, x (batch, depth, height, width, in_channels): see `numbsparse.conv`.

    Parameters as in `Conv2d`.

    >>> import numpy as np
    >>> from numbsparse import nn
    >>> conv = nn.Conv3d(8, 16, 3, padding="same", block_size=8, seed=0)
    >>> conv(np.ones((1, 2, 4, 4, 8), np.float32)).shape
    (1, 2, 4, 4, 16)
    """

    axes = 3


class ConvTranspose1d(_ConvTranspose):
    """y = conv_transpose(x) + bias, x (batch, length, in_channels).

    Parameters as in `ConvTranspose2d`.

    >>> import numpy as np
    >>> from numbsparse import nn
    >>> conv = nn.ConvTranspose1d(16, 8, 2, stride=2, block_size=8, seed=0)
    >>> conv(np.ones((1, 5, 16), np.float32)).shape
    (1, 10, 8)
    """

    axes = 1


class ConvTranspose2d(_ConvTranspose):
    """y = conv_transpose(x) + bias, x (batch, height, width, in_channels).

    Its weight is that of the convolution whose transpose it is: see `numbsparse.conv_transpose`.
    Parameters as in `Conv2d`, and `output_padding` after `padding`: how much larger the result is,
    an int or one for each axis, less than the stride. All that follows, `dilation` too, goes by
    name. `layout` is (in_blocks, out_blocks).

    Examples
    --------
    >>> import numpy as np
    >>> from numbsparse import nn
    >>> conv = nn.ConvTranspose2d(16, 8, 2, stride=2, block_size=8, seed=0)
    >>> conv(np.ones((1, 4, 4, 16), np.float32)).shape
    (1, 8, 8, 8)
    """

    axes = 2


class ConvTranspose3d(_ConvTranspose):
    """y = conv_transpose(x) + bias, x (batch, depth, height, width, in_channels).

    Parameters as in `ConvTranspose2d`.

    >>> import numpy as np
    >>> from numbsparse import nn
    >>> conv = nn.ConvTranspose3d(16, 8, 2, stride=2, block_size=8, seed=0)
    >>> conv(np.ones((1, 2, 2, 2, 16), np.float32)).shape
    (1, 4, 4, 4, 8)
    """

    axes = 3
