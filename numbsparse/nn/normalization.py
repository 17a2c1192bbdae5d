"""LayerNorm."""

from typing import Any

import numpy as np

from numbsparse.autograd import Tensor, as_tensor
from numbsparse.dtypes import float_dtype
from numbsparse.nn import functional
from numbsparse.nn.module import Module, Parameter
from numbsparse.ops.operands import together
from numbsparse.patterns.checks import integer, number


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis of length `features`.

    Ba, Kiros and Hinton, "Layer Normalization", 2016.

    >>> import numpy as np, numbsparse as ns
    >>> ns.nn.LayerNorm(3)(ns.Tensor(np.array([[1, 2, 3]], np.float32)))
    Tensor([[-1.2247356,  0.       ,  1.2247356]], dtype=float32)
    """

    def __init__(self, features: int, *, eps: float = 1e-5, dtype: Any = np.float32):
        super().__init__()
        features, dtype = integer("features", features), float_dtype(dtype)
        self.eps = number("eps", eps)
        self.weight = Parameter(np.ones(features, dtype))
        self.bias = Parameter(np.zeros(features, dtype))

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if x.shape[-1:] != self.weight.shape:
            raise ValueError(f"x takes the shape (..., {self.weight.shape[0]}), got {x.shape}")
        together(x=x.data, weight=self.weight.data)
        return functional.layer_norm(x, self.weight, self.bias, self.eps)

    def describe(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
