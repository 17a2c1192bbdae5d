"""Linear: torch.nn.Linear with a layout."""

from typing import Any

import numpy as np
import torch
from torch.fx import Proxy

from numbsparse import ops, patterns
from numbsparse.nn.linear import layout_for
from numbsparse.torch import operators
from numbsparse.torch.layer import OneWeight


class Linear(OneWeight):
    """y = x @ weight + bias, as torch.nn.Linear, with a weight that is zero in whole blocks.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    device, dtype : as in torch.nn.Linear
    layout : Layout or pattern, (in_blocks, out_blocks), optional
        Which blocks of the weight are kept; None keeps all.
    block_size : int
        Features that are not multiples of it are allowed.
    precision : "highest" or "high", optional: see `numbsparse.set_precision`

    Attributes
    ----------
    weight : Parameter, (n_blocks, B, B), the kept blocks of a matrix (in_features, out_features)
    bias : Parameter, (out_features,), or None
    layout : Layout

    Raises ValueError if `layout` does not fit the features.

    Examples
    --------
    >>> import torch, numbsparse as ns, numbsparse.torch as nst
    >>> layer = nst.Linear(1024, 256, layout=ns.patterns.random(32, 8, 0.1, seed=0))
    >>> layer(torch.ones(5, 1024)).shape, layer.weight.shape
    (torch.Size([5, 256]), torch.Size([26, 32, 32]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        layout: Any = None,
        block_size: int = 32,
        precision: str | None = None,
    ) -> None:
        super().__init__(block_size, precision)
        self.in_features, self.out_features = in_features, out_features
        self.features = in_features, out_features
        self.hold_both(layout_for(*self.features, layout, block_size), bias, device, dtype)

    def shape_of(self, name: str) -> tuple[int, int]:
        return self.features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, Proxy):
            return self.in_graph(x)  # type: ignore[no-any-return]
        word, precision = self.handles["weight"].word, ops.checked_precision(self.precision)
        how = word, self.in_features, self.out_features, self.block_size, precision
        y, bias = operators.matmul((x, self.weight), how), self.bias
        if bias is None:
            return y  # type: ignore[no-any-return]
        return y + (bias if bias.dtype is y.dtype else bias.to(y.dtype))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, block_size={self.block_size}, layout={self.layout}"
        )

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        pattern: Any = None,
        *,
        density: float | None = None,
        block_size: int = 32,
        precision: str | None = None,
    ) -> "Linear":
        """A layer with the kept blocks of a dense one: of a pattern, or those of largest norm.

        Parameters
        ----------
        linear : torch.nn.Linear
        pattern : Layout or pattern, (in_blocks, out_blocks), or
        density : float, the share of blocks to keep, as `numbsparse.patterns.from_dense` does
        block_size, precision : as in Linear

        Raises TypeError for what is not a torch.nn.Linear, ValueError if not exactly one of pattern
        and density is given, or the pattern does not fit.

        >>> import torch, numbsparse.torch as nst
        >>> nst.Linear.from_linear(torch.nn.Linear(64, 128), density=0.25, block_size=32)
        Linear(in_features=64, out_features=128, bias=True, ...density 0.25))
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear takes a torch.nn.Linear, got {type(linear).__name__}")
        if (pattern is None) == (density is None):
            got = "neither" if density is None else "both"
            raise ValueError(f"exactly one of pattern and density must be given, got {got}")
        weight = linear.weight.detach()
        operators.check_dtype("linear", weight.dtype)
        if pattern is None:
            if weight.is_meta:
                raise ValueError(
                    "density takes a layer with values, got one on meta: give a pattern"
                )
            values = weight.T.to("cpu", torch.float32).numpy()
            pattern = patterns.from_dense(values, block_size, density=density)
            if not pattern.any():
                least = f"at least one of the {pattern.size} blocks of {linear}"
                raise ValueError(f"density takes {least}, got {density}: leave this layer out")
        sides = linear.in_features, linear.out_features
        layout = layout_for(*sides, pattern, block_size, "pattern")
        has_bias = linear.bias is not None
        how: Any = {"layout": layout, "block_size": block_size, "precision": precision}
        made: Any = cls(*sides, has_bias, weight.device, weight.dtype, **how)
        with torch.no_grad():
            made.weight.copy_(blocks_of(weight.T, layout, block_size))
            if has_bias:
                made.bias.copy_(linear.bias)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(getattr(linear, name).requires_grad)
        return made.train(linear.training)  # type: ignore[no-any-return]


def blocks_of(dense: torch.Tensor, layout: Any, size: int) -> torch.Tensor:
    """The kept blocks of a dense matrix, (n_blocks, B, B), zero beyond its edge."""
    in_blocks, out_blocks = layout.shape
    edge = (0, out_blocks * size - dense.shape[1], 0, in_blocks * size - dense.shape[0])
    padded = torch.nn.functional.pad(dense, edge)
    blocks = padded.reshape(in_blocks, size, out_blocks, size).transpose(1, 2)
    rows, columns = np.nonzero(layout.pattern)
    return blocks[torch.from_numpy(rows), torch.from_numpy(columns)]
