"""The network of PixelCNN++, dense, and one of sparse convolutions as large but deeper or wider.

Two streams of convolutions run over the image. What the vertical one says of a pixel depends on the
rows above it; the horizontal one also sees the pixel's own row, to its left, and looks at the
vertical one. Both are shifted by leaving out taps: a 3 x 3 kernel of which 6 or 4 are kept. Each
stream goes down to smaller images and up again, and on the way up sees what it was on the way down.

Salimans, Karpathy, Chen and Kingma, "PixelCNN++", 2017, section 2.4 and figure 2. That sparse
convolutions buy depth at equal parameters: S. Gray, A. Radford, D. P. Kingma, "GPU Kernels for
Block-Sparse Weights", 2017.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from pixel_loss import PER_MIXTURE
from pixel_wiring import Wiring

import numbsparse as ns
from numbsparse import nn, patterns
from numbsparse.nn import functional as F

CHANNELS = 4  # red, green, blue, and 1 inside the image, by which its edge is known

# The taps that are kept. Rows and columns of pixels, the middle one the pixel's own.
ABOVE = np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]])
BEFORE = patterns.causal((3, 3), centre=False)
DOWN = np.array([[1, 1, 1], [1, 1, 1], [0, 0, 0]])
RIGHT = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]])
ONE = np.array([[1]])


class Convolution(nn.Module):
    """A weight-normalised convolution, whose outputs `begin` makes start with a spread of `spread`.

    Salimans and Kingma, "Weight Normalization", 2016, section 3.
    """

    def __init__(self, convolution: nn.Module, spread: float = 1.0):
        super().__init__()
        self.convolution: Any = nn.utils.weight_norm(convolution)
        self.spread, self.begins = spread, False

    def forward(self, x: ns.Tensor) -> ns.Tensor:
        if self.begins:
            self._begin(self.convolution(x))
        return self.convolution(x)

    def _begin(self, y: ns.Tensor) -> None:
        """Choose lengths and bias by what comes out now."""
        own, wide = self.convolution, y if y.dtype == np.float64 else y.astype(np.float32)
        mean = F.mean(wide, axis=(0, 1, 2))
        variance = F.mean((wide - mean) ** 2, axis=(0, 1, 2)).numpy().astype(np.float64)
        factor = self.spread / np.sqrt(np.maximum(variance, 1e-6))
        if isinstance(own, nn.ConvTranspose2d):  # its lengths are those of inputs
            factor = np.full_like(factor, factor.mean())
        lengths = own.weight_g.numpy().astype(np.float64)
        set_values(own.weight_g, lengths * factor[: len(lengths)])
        set_values(own.bias, (own.bias.numpy() - mean.numpy()) * factor)


def set_values(parameter: ns.Tensor, values: np.ndarray) -> None:
    values = values.astype(parameter.dtype)
    parameter.data = ns.to_device(values) if parameter.place == "cuda" else values


class Make:
    """Makes the convolutions of a network, each with its pattern and from one source of chance."""

    def __init__(self, wiring: Wiring, dtype: str, precision: str, seed: int):
        self.wiring = wiring
        rng = np.random.default_rng(seed)
        self.how: dict[str, Any] = {"dtype": dtype, "precision": precision, "seed": rng}
        self.how["block_size"] = wiring.block_size

    def dense(self, a: int, b: int, taps: np.ndarray, stride: int = 1) -> Convolution:
        """Of `a` features to `b`, of which every one sees every one."""
        return self._masked(a, b, taps, stride, None, 1.0)

    def wired(self, a: int, b: int, taps: np.ndarray, spread: float = 1.0) -> Convolution:
        """The same, by the wiring's pattern."""
        return self._masked(a, b, taps, 1, self.wiring.pattern(a, b, taps), spread)

    def grow(self, features: int, taps: np.ndarray) -> Convolution:
        """To images of twice the size. A pixel sees what is above it, and to its left or around."""
        width = 3 if taps is DOWN else 2
        sizes: Any = {"stride": 2, "padding": ((0, 0), (width - 2, 0))}
        return Convolution(nn.ConvTranspose2d(features, features, (2, width), **sizes, **self.how))

    def _masked(
        self, a: int, b: int, taps: np.ndarray, stride: int, layout: Any, spread: float
    ) -> Convolution:
        sizes: Any = {"stride": stride, "padding": tuple(n // 2 for n in taps.shape)}
        kept: Any = {"layout": layout, "taps": taps}
        return Convolution(nn.Conv2d(a, b, taps.shape, **sizes, **kept, **self.how), spread)


class Gated(nn.Module):
    """x + a * sigmoid(b), of convolutions a and b of x, and of other features beside it."""

    def __init__(
        self,
        make: Make,
        features: int,
        beside: int,
        taps: np.ndarray,
        dropout: float,
        seeds: np.random.Generator,
    ):
        super().__init__()
        self.first = make.wired(2 * features, features, taps)
        self.beside = make.wired(2 * beside, features, ONE) if beside else None
        self.dropout = nn.Dropout(dropout, seed=int(seeds.integers(2**31)))
        self.second = make.wired(2 * features, 2 * features, taps, spread=0.1)

    def forward(self, x: ns.Tensor, beside: ns.Tensor | None = None) -> ns.Tensor:
        y = self.first(F.concat_elu(x))
        if self.beside is not None and beside is not None:
            y = y + self.beside(F.concat_elu(beside))
        return x + F.glu(self.second(self.dropout(F.concat_elu(y))))


class Stream(nn.Module):
    """Down to smaller images and up again, each block on the way up beside one on the way down.

    `others` are the features of another stream that the blocks see too, in their order.
    """

    def __init__(
        self, make: Make, first: np.ndarray, taps: np.ndarray, options: Namespace, others: int
    ):
        super().__init__()
        n, stages, blocks = options.filters, options.stages, options.blocks
        seeds = np.random.default_rng([options.seed, others])

        def gated(count: int, beside: int) -> nn.Sequential:
            how: Any = taps, options.dropout, seeds
            return nn.Sequential(*(Gated(make, n, beside, *how) for _ in range(count)))

        self.first = make.dense(CHANNELS, n, first)
        self.down = [gated(blocks, others) for _ in range(stages)]
        self.shrink = [make.dense(n, n, taps, stride=2) for _ in range(stages - 1)]
        self.up = [gated(blocks + (i > 0), n + others) for i in range(stages)]
        self.grow = [make.grow(n, taps) for _ in range(stages - 1)]

    def forward(
        self, x: ns.Tensor, others: Sequence[ns.Tensor] = ()
    ) -> tuple[ns.Tensor, list[ns.Tensor]]:
        """The last features, and those after each block."""
        h = self.first(x)
        after, other, kept = [], iter(others), [h]
        for i, blocks in enumerate(self.down):
            if i:
                h = self.shrink[i - 1](h)
                kept.append(h)
            for block in blocks:
                h = block(h, next(other, None))
                kept.append(h)
                after.append(h)
        h = kept.pop()
        for i, blocks in enumerate(self.up):
            h = self.grow[i - 1](h) if i else h
            for block in blocks:
                beside = [*(y for y in (next(other, None),) if y is not None), kept.pop()]
                h = block(h, F.concatenate(beside, axis=-1) if len(beside) > 1 else beside[0])
                after.append(h)
        return h, after


class PixelCNN(nn.Module):
    """Images (n, height, width, 4) to what `pixel_loss` takes of each pixel, (pixels, outputs)."""

    def __init__(self, options: Namespace, wiring: Wiring):
        super().__init__()
        make = Make(wiring, options.dtype, options.precision, options.seed)
        self.filters, self.blocks, self.wiring = options.filters, options.blocks, wiring
        self.dtype = options.dtype
        self.vertical = Stream(make, ABOVE, DOWN, options, others=0)
        self.across = Stream(make, BEFORE, RIGHT, options, others=options.filters)
        self.output = make.dense(options.filters, PER_MIXTURE * options.mixtures, ONE)

    def forward(self, x: ns.Tensor) -> ns.Tensor:
        return self.along(x, self.above(x))

    def above(self, x: ns.Tensor) -> list[ns.Tensor]:
        """The vertical stream's features, which no pixel of a row changes for its own row."""
        return self.vertical(x.astype(self.dtype))[1]

    def along(self, x: ns.Tensor, above: Sequence[ns.Tensor]) -> ns.Tensor:
        """The rest of the network, in float32 at the end."""
        y = self.output(F.elu(self.across(x.astype(self.dtype), above)[0]))
        y = y.reshape(-1, y.shape[-1])
        return y if y.dtype == np.float64 else y.astype(np.float32)


def begin(model: PixelCNN, x: ns.Tensor) -> None:
    """Give every convolution, one after the other, outputs of the wanted spread on this batch."""
    convolutions = [m for _, m in model.named_modules() if isinstance(m, Convolution)]
    for convolution in convolutions:
        convolution.begins = True
    model.eval()
    with ns.no_grad():
        model(x)
    model.train()
    for convolution in convolutions:
        convolution.begins = False


def make_model(options: Namespace, kind: str) -> PixelCNN:
    """The dense network that the options describe, or the sparse one with as many parameters."""
    if kind == "dense":
        return PixelCNN(options, Wiring(None, options.block_size, options.seed))
    size, larger = options.block_size, Namespace(**vars(options))
    larger.blocks = max(round(options.deeper * options.blocks), 1)
    larger.filters = max(round(options.wider * options.filters / size), 1) * size
    # The least of every pattern, which is quickly made, tells what the patterns may have.
    least = PixelCNN(larger, Wiring(0.0, size, options.seed))
    dense = PixelCNN(options, Wiring(0.0, size, options.seed))
    target = dense.n_parameters() - dense.wiring.kept + dense.wiring.weights
    density = (target - least.n_parameters() + least.wiring.kept) / least.wiring.weights
    if not least.wiring.kept / least.wiring.weights <= density <= 1:
        raise ValueError(
            f"--deeper {options.deeper:g} and --wider {options.wider:g} take a density of "
            f"{density:.3g} for as many parameters as the dense model, where the patterns have "
            f"{least.wiring.kept / least.wiring.weights:.3g} to 1"
        )
    return PixelCNN(larger, Wiring(density, size, options.seed))
