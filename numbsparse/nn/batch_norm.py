"""BatchNorm."""

from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor
from numbsparse.dtypes import float_dtype
from numbsparse.nn import functional
from numbsparse.nn.module import Module, Parameter
from numbsparse.ops.operands import together
from numbsparse.patterns.checks import integer, number


class BatchNorm(Module):
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
        super().__init__()
        features, dtype = integer("features", features), float_dtype(dtype)
        self.eps, self.momentum = number("eps", eps), number("momentum", momentum, most=1)
        self.weight = Parameter(np.ones(features, dtype))
        self.bias = Parameter(np.zeros(features, dtype))
        self.running_mean: Tensor
        self.running_variance: Tensor
        self.register_buffer("running_mean", np.zeros(features, dtype))
        self.register_buffer("running_variance", np.ones(features, dtype))

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        features = self.weight.shape[0]
        if x.ndim < 2 or x.shape[-1] != features:
            raise ValueError(f"x takes the shape (..., {features}), got {x.shape}")
        together(x=x.data, weight=self.weight.data)
        if self.training:
            mean, centred, variance = self._of_batch(x)
        else:
            mean, variance = self.running_mean, self.running_variance
            centred = x - mean
        return centred * (self.weight / functional.sqrt(variance + self.eps)) + self.bias

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
        return f"{self.weight.shape[0]}, eps={self.eps}, momentum={self.momentum}"
