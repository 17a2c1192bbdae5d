"""BlocksparseConv: see `numbsparse.compat.blocksparse`."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from numbsparse.autograd import Tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.compat.blocksparse.arrays import check_shape, run
from numbsparse.device import moved
from numbsparse.layout import Layout
from numbsparse.nn import functional
from numbsparse.nn.functional.columns import with_blocks
from numbsparse.nn.functional.shape import sum_rows, take_rows
from numbsparse.ops import conv_window
from numbsparse.patterns import from_bck, taps
from numbsparse.patterns.checks import integer, word


class BlocksparseConv:
    """The convolution with filters that join some channels, as openai/blocksparse names it.

    y[n, k, o] = sum of x[n, c, o * stride - padding + t * dilation] * f[k, c, t], over the taps t
    and the channels c that are in a block with k. `numbsparse.conv` computes it.

    Parameters
    ----------
    BCK : sequence of pairs of sequences, for each block its channels in and its channels out
        As `numbsparse.patterns.from_bck` takes them; each channel from 0 on is in some block.
    TRS, DHW : one to three numbers, the sizes of the filter and of the images
    MPQ : the sizes of the results, optional: they follow from the others, and are only checked
    strides, dilates : as many numbers
    padding : as many numbers, before and after; "VALID", or "SAME", half of the filter's width

    Attributes
    ----------
    C, K, blocks, sizeF : channels in and out, blocks, values of all filters
    BCK, TRS, DHW, MPQ, strides, dilates, padding : as given, with three numbers each

    Raises TypeError or ValueError that names the argument; a call for other shapes, and for tensors
    of torch that require gradients.

    Examples
    --------
    >>> import numpy as np
    >>> from numbsparse.compat.blocksparse.conv import BlocksparseConv
    >>> halves = [(range(8), range(16)), (range(8, 16), range(16, 32))]
    >>> conv = BlocksparseConv(halves, TRS=(3, 3), DHW=(10, 10), strides=(2, 2))
    >>> conv.f_shape(), conv.i_shape(5), conv.o_shape(5)
    ([2, 16, 8, 3, 3], [5, 16, 1, 10, 10], [5, 32, 1, 5, 5])
    >>> conv(np.ones(conv.f_shape()), np.ones(conv.i_shape(5)))[0, 0, 0, 1, 1]
    np.float64(72.0)
    """

    def __init__(
        self,
        BCK: Any,
        TRS: Sequence[int],
        DHW: Sequence[int],
        MPQ: Sequence[int] | None = None,
        strides: Sequence[int] = (1, 1, 1),
        dilates: Sequence[int] = (1, 1, 1),
        padding: Any = "SAME",
    ) -> None:
        try:
            self.BCK = [(list(cs), list(ks)) for cs, ks in BCK]
        except (TypeError, ValueError):
            self.BCK = []
        if not self.BCK:
            raise TypeError(f"BCK takes pairs of lists of channels, got {BCK!r}")
        self.C, self.K = (len({c for pair in self.BCK for c in pair[side]}) for side in (0, 1))
        found = from_bck(self.BCK, self.C, self.K)
        self._size, self._in, self._out = found.block_size, found.in_order, found.out_order
        self.TRS, self.DHW = _three("TRS", TRS), _three("DHW", DHW)
        self._filter = self.TRS[-len(TRS) :]
        self.strides, self.dilates = _three("strides", strides), _three("dilates", dilates)
        spread = [(s - 1) * d + 1 for s, d in zip(self.TRS, self.dilates, strict=True)]
        named = {"SAME": [s // 2 for s in spread], "VALID": [0, 0, 0]}
        is_word = isinstance(padding, str)
        padding = named[word("padding", padding, named)] if is_word else padding
        self.padding = _three("padding", padding, 0)
        window = conv_window(tuple(self.DHW), self.TRS, self.strides, self.padding, self.dilates)
        self.MPQ = list(window.small)
        if MPQ is not None and _three("MPQ", MPQ) != self.MPQ:
            raise ValueError(f"MPQ takes {self.MPQ} with these sizes, got {MPQ}")
        self._layout = Layout(taps(found.pattern, tuple(self.TRS)))
        self._places = np.concatenate([self._places_of(*pair) for pair in self.BCK])
        self.blocks, self.sizeF = len(self.BCK), self._places.size
        lengths = [len(cs) * prod(self.TRS) for cs, ks in self.BCK for _ in ks]
        self._filters = np.repeat(np.arange(len(lengths)), lengths)  # which one a value is in

    def _places_of(self, cs: list[int], ks: list[int]) -> np.ndarray:
        """Where among the matrix's stored values those of a filter (k, c, taps) are."""
        size, tap = self._size, np.arange(prod(self.TRS))
        c = np.argsort(self._in)[cs][:, None]
        k = np.argsort(self._out)[ks][:, None, None]
        blocks = self._layout.find(tap * (self.C // size) + c // size, k // size)
        return ((blocks * size + c % size) * size + k % size).reshape(-1)

    def i_shape(self, N: int) -> list[int]:
        """The shape of N images."""
        return [N, self.C, *self.DHW]

    def o_shape(self, N: int) -> list[int]:
        """The shape of N results."""
        return [N, self.K, *self.MPQ]

    def f_shape(self, block: int | None = None) -> list[int]:
        """The shape of a block's filter; of all, in a row where blocks differ in size."""
        shapes = [[len(ks), len(cs), *self._filter] for cs, ks in self.BCK]
        if block is not None:
            return shapes[integer("block", block, 0, self.blocks - 1)]
        return [self.blocks, *shapes[0]] if shapes.count(shapes[0]) == self.blocks else [self.sizeF]

    def __call__(self, f: Any, x: Any) -> Any:
        """The convolution of images (N, C, D, H, W) with filters of f_shape()."""
        check_shape("f", f, self.f_shape())
        check_shape("x", x, self.i_shape(*getattr(x, "shape", ())[:1] or (0,)))
        return run(self._compute, f, x)

    def _compute(self, filters: Tensor, images: Tensor) -> Tensor:
        size, n_blocks = self._size, self._layout.n_blocks
        row = filters.reshape((-1, 1))
        values = sum_rows(row, _beside(row, self._places), n_blocks * size**2)
        values = values.reshape((n_blocks, size, size))
        w = with_blocks(BlockSparse(values.data, self._layout), values)
        x = _in_order(images.transpose((1, 0, 2, 3, 4)), self._in).transpose((1, 2, 3, 4, 0))
        how: Any = {"stride": self.strides, "padding": self.padding, "dilation": self.dilates}
        y = functional.conv(x, w, kernel_size=self.TRS, **how)
        y = _in_order(y.transpose((4, 0, 1, 2, 3)), np.argsort(self._out))
        return y.transpose((1, 0, 2, 3, 4))

    def l2_normalize(self, f: Any, gain: Any = None, epsilon: float = 1e-12) -> Any:
        """Each filter f[k], within its block, times gain / sqrt(epsilon + its sum of squares).

        `gain` has a number for each k of each block, block by block, or is None.
        """
        check_shape("f", f, self.f_shape())

        def compute(filters: Tensor, gain: Tensor | None) -> Tensor:
            row = filters.reshape((-1, 1))
            of = _beside(row, self._filters)
            scale = (sum_rows(row * row, of, int(self._filters[-1]) + 1) + epsilon) ** -0.5
            scale = scale if gain is None else scale * gain.reshape((-1, 1))
            return (row * take_rows(scale, of)).reshape(filters.shape)

        return run(compute, f, gain)


def _three(argument: str, sizes: Sequence[int], fill: int = 1) -> list[int]:
    """One to three whole numbers, from `fill` on, which is that of the axes in front."""
    is_list = isinstance(sizes, Sequence) or getattr(sizes, "ndim", 0) == 1
    if not is_list or not 1 <= len(sizes) <= 3:
        raise TypeError(f"{argument} takes one to three whole numbers, got {sizes!r}")
    return [fill] * (3 - len(sizes)) + [integer(argument, n, fill) for n in sizes]


def _in_order(x: Tensor, order: np.ndarray) -> Tensor:
    """x[order]."""
    if (order == np.arange(order.size)).all():
        return x
    return take_rows(x.reshape((order.size, -1)), _beside(x, order)).reshape(x.shape)


def _beside(x: Tensor, indices: np.ndarray) -> Any:
    return moved(indices, x.device)
