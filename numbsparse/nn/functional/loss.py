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
    """
    rows = reshape(logits, (-1, logits.shape[-1]))
    targets = ops.reshape(data_of(targets), (rows.shape[0],))
    losses, probabilities = ops.cross_entropy(rows.data, targets)
    per_row = record(
        losses, (rows, once(lambda dy, y: ops.cross_entropy_grad(probabilities, targets, dy)))
    )
    return mean(per_row)


def mse_loss(prediction: Tensor, target: Any) -> Tensor:
    """The mean of (prediction - target)^2."""
    error = subtract(prediction, target)
    return mean(error * error)
