"""Activations as modules, for Sequential."""

from __future__ import annotations

from numbsparse.autograd import Tensor
from numbsparse.nn import functional
from numbsparse.nn.module import Module


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x)


class GELU(Module):
    """x * Phi(x), by the tanh form."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x)


class Tanh(Module):
    """The hyperbolic tangent."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.tanh(x)


class Sigmoid(Module):
    """1 / (1 + e^-x)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.sigmoid(x)
