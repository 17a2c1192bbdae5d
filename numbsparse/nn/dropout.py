"""Dropout."""

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor
from numbsparse.nn import functional
from numbsparse.nn.module import Module
from numbsparse.patterns.checks import integer, number


class Draws(Module):
    """The base of modules that draw by a seed, and by how often they were called."""

    saved = ("seed", "calls")
    seed: int
    calls = 0

    def next_call(self) -> int:
        """The number of a call, each one higher than the last."""
        self.calls += 1
        return self.calls

    def check_saved(self, name: str, value: Any, argument: str) -> None:
        integer(argument, value, least=0, most=2**63 - 1)  # more calls than that are not made


class Dropout(Draws):
    """In training, each value becomes 0 with probability `p`, and x / (1 - p) otherwise.

    The mask depends on `seed` and on how often the module was called, which the state dict keeps:
    a resumed training drops what the first one would have. Srivastava et al., "Dropout", 2014.

    >>> import numpy as np, numbsparse as ns
    >>> dropout = ns.nn.Dropout(0.5, seed=0)
    >>> x = ns.Tensor(np.ones(6))
    >>> dropout(x)
    Tensor([2., 2., 0., 2., 2., 0.])
    >>> dropout.eval()(x)
    Tensor([1., 1., 1., 1., 1., 1.])
    """

    stream = 0  # the rank, where several train on a part of the batch each: see DataParallel

    def __init__(self, p: float = 0.5, *, seed: int | None = None):
        super().__init__()
        self.p = number("p", p, below=1)
        drawn = np.random.default_rng().integers(2**31) if seed is None else seed
        self.check_saved("seed", drawn, "seed")
        self.seed = int(drawn)  # NumPy's do not reach 2**64

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if not self.training or self.p == 0:
            return x
        return functional.dropout(x, self.p, seed=self.own_seed, call=self.next_call)

    def mask(self, shape: tuple[int, ...], beside: Tensor) -> Any:
        """What a call multiplies values by, an array of the dtype of `beside`; None for ones."""
        if not self.training or self.p == 0:
            return None
        how = self.own_seed, self.next_call, beside.dtype, beside.device
        return ops.dropout_mask(shape, self.p, *how)

    @property
    def own_seed(self) -> int:
        """The seed that this process draws by."""
        return (self.seed + (self.stream << 32)) % 2**64

    def describe(self) -> str:
        return f"p={self.p}"
