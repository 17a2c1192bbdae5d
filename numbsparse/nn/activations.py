"""Activations as modules, for Sequential."""

from numbsparse.autograd import Tensor
from numbsparse.nn import functional
from numbsparse.nn.module import Module


class ReLU(Module):
    """max(x, 0).

    >>> import numbsparse as ns
    >>> ns.nn.ReLU()(ns.Tensor([-1.0, 2.0]))
    Tensor([0., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x)


class GELU(Module):
    """x * Phi(x); with approximate="tanh" the tanh form, as in `nn.functional.gelu`.

    >>> import numbsparse as ns
    >>> ns.nn.GELU()(ns.Tensor([-1.0, 0.0, 1.0]))
    Tensor([-0.15865525,  0.        ,  0.84134475])
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        functional.gelu(0.0, approximate)  # refused at once
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x, self.approximate)

    def describe(self) -> str:
        return "" if self.approximate == "none" else f"approximate={self.approximate!r}"


class Tanh(Module):
    """The hyperbolic tangent.

    >>> import numbsparse as ns
    >>> ns.nn.Tanh()(ns.Tensor([0.0, 1.0]))
    Tensor([0.        , 0.76159416])
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.tanh(x)


class Sigmoid(Module):
    """1 / (1 + e^-x).

    >>> import numbsparse as ns
    >>> ns.nn.Sigmoid()(ns.Tensor([0.0, 2.0]))
    Tensor([0.5       , 0.88079708])
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.sigmoid(x)
