"""LayerNorm and BatchNorm."""

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor
from numbsparse.dtypes import float_dtype
from numbsparse.nn import functional
from numbsparse.nn.functional.layers import with_bias
from numbsparse.nn.module import Module, Parameter
from numbsparse.ops.operands import together
from numbsparse.patterns.checks import integer, number


class _Norm(Module):
    """What both have in common: a weight and a bias for each feature."""

    def __init__(self, features: int, eps: float, dtype: Any):
        super().__init__()
        features, dtype = integer("features", features), float_dtype(dtype)
        self.eps = number("eps", eps)
        self.weight = Parameter(np.ones(features, dtype))
        self.bias = Parameter(np.zeros(features, dtype))

    def _checked(self, x: Any, axes: int) -> Tensor:
        """x, of so many axes at least, refused where it does not end with the features."""
        x = as_tensor(x)
        if x.ndim < axes or x.shape[-1:] != self.weight.shape:
            raise ValueError(f"x takes the shape (..., {self.weight.shape[0]}), got {x.shape}")
        together(x=x.data, weight=self.weight.data)
        return x

    def describe(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis of length `features`.

    Ba, Kiros and Hinton, "Layer Normalization", 2016.

    >>> import numpy as np, numbsparse as ns
    >>> ns.nn.LayerNorm(3)(ns.Tensor(np.array([[1, 2, 3]], np.float32)))
    Tensor([[-1.2247356,  0.       ,  1.2247356]], dtype=float32)
    """

    def __init__(self, features: int, *, eps: float = 1e-5, dtype: Any = np.float32):
        super().__init__(features, eps, dtype)

    def forward(self, x: Any) -> Tensor:
        return functional.layer_norm(self._checked(x, 1), self.weight, self.bias, self.eps)


class BatchNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * weight + bias, for each feature, the last axis.

    In training, mean and variance are those of the batch, over all other axes, and running ones
    follow them: running = (1 - momentum) * running + momentum * batch, of the unbiased variance. In
    evaluation the running ones are used. They are buffers, saved and moved with the parameters, and
    not trained. Within `nn.recompute`, which runs a layer twice, they follow each batch twice.

    Parameters
    ----------
    features : int
    eps : float, at least 0
    momentum : float, from 0 to 1
    dtype : float32 or float64 (float16 or bfloat16 on a GPU)

    Raises TypeError or ValueError for parameters that are none of these, and for inputs of other
    features or of a single value for each in training.

    Examples
    --------
    >>> import numpy as np
    >>> from numbsparse import nn
    >>> x = np.random.default_rng(0).normal(3.0, 2.0, (4, 8, 8, 5)).astype(np.float32)
    >>> y = nn.BatchNorm(5)(x).numpy()
    >>> bool(abs(y.mean((0, 1, 2))).max() < 1e-5), bool(abs(y.std((0, 1, 2)) - 1).max() < 1e-4)
    (True, True)

    Ioffe and Szegedy, "Batch Normalization", 2015.
    """

    def __init__(
        self, features: int, *, eps: float = 1e-5, momentum: float = 0.1, dtype: Any = np.float32
    ):
        super().__init__(features, eps, dtype)
        self.momentum = number("momentum", momentum, most=1)
        self.running_mean: Tensor
        self.running_variance: Tensor
        self.register_buffer("running_mean", np.zeros_like(self.bias.data))
        self.register_buffer("running_variance", np.ones_like(self.weight.data))

    def forward(self, x: Any) -> Tensor:
        x = self._checked(x, 2)
        if self.training:
            mean, centred, variance = self._of_batch(x)
        else:
            mean, variance = self.running_mean, self.running_variance
            centred = x - mean
        scale = self.weight / functional.sqrt(variance + self.eps)
        return with_bias(centred * scale, self.bias)

    def _of_batch(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(mean, x - mean, variance) of the batch, which the running ones follow."""
        axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
        if count < 2:
            raise ValueError(
                f"x takes at least two values of each feature in training, got {count}"
            )
        mean = functional.mean(x, axes)
        centred = x - mean
        variance = functional.mean(centred * centred, axes)
        self._follow(self.running_mean.data, mean.data, 1.0)
        self._follow(self.running_variance.data, variance.data, count / (count - 1))
        return mean, centred, variance

    def _follow(self, running: Any, batch: Any, unbiased: float) -> None:
        """running = (1 - momentum) * running + momentum * unbiased * batch, in place."""
        kept = ops.multiply(running, 1 - self.momentum)
        ops.copy_into(running, ops.add(kept, ops.multiply(batch, self.momentum * unbiased)))

    def describe(self) -> str:
        return f"{super().describe()}, momentum={self.momentum}"
