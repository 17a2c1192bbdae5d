"""Losses."""

from __future__ import annotations

from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, once, record
from numbsparse.nn.functional.arithmetic import data_of, subtract
from numbsparse.nn.functional.shape import mean, reshape


def cross_entropy(logits: Tensor, targets: Any) -> Tensor:
    """The mean of -log softmax(logits)[target], in nats.

    Parameters
    ----------
    logits : Tensor, (..., classes)
    targets : array of integers, (...), in the place of the logits
        On a GPU a target out of range gives NaN; on the CPU it raises ValueError.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> logits = ns.Tensor([[0.0, 0.0], [0.0, 5.0]])
    >>> round(F.cross_entropy(logits, np.array([0, 1])).item(), 4)  # (log 2 + log(1 + e^-5)) / 2
    0.3499
    """
    rows = reshape(logits, (-1, logits.shape[-1]))
    targets = ops.reshape(data_of(targets), (rows.shape[0],))
    losses, probabilities = ops.cross_entropy(rows.data, targets)
    per_row = record(
        losses, (rows, once(lambda dy, y: ops.cross_entropy_grad(probabilities, targets, dy)))
    )
    return mean(per_row)


def mse_loss(prediction: Tensor, target: Any) -> Tensor:
    """The mean of (prediction - target)^2.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.mse_loss(Tensor([1.0, 2.0]), Tensor([0.0, 4.0])).item()
    2.5
    """
    error = subtract(prediction, target)
    return mean(error * error)
