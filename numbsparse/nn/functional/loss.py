"""Losses."""

from math import prod
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, as_tensor, fused, record
from numbsparse.nn.functional.activations import softmax
from numbsparse.nn.functional.arithmetic import add, cast, data_of, multiply, subtract
from numbsparse.nn.functional.shape import mean, reshape
from numbsparse.ops.operands import on_gpu, together


def cross_entropy(logits: Tensor, targets: Any) -> Tensor:
    """The mean of -log softmax(logits)[target], in nats.

    Parameters
    ----------
    logits : Tensor, (..., classes)
    targets : array or list of integers, (...), on the logits' device
        On a GPU a target out of range gives NaN; on the CPU it raises ValueError.

    Raises ValueError for targets of another shape, one-hot ones among them.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> from numbsparse.nn import functional as F
    >>> logits = ns.Tensor([[0.0, 0.0], [0.0, 5.0]])
    >>> round(F.cross_entropy(logits, np.array([0, 1])).item(), 4)  # (log 2 + log(1 + e^-5)) / 2
    0.3499
    """
    logits, targets = as_tensor(logits, "logits"), ops.operand(data_of(targets), "targets")
    if logits.ndim == 0 or 0 in logits.shape:
        takes = "the shape (..., classes), of one row and one class at least"
        raise ValueError(f"logits takes {takes}, got {logits.shape}")
    *outer, classes = logits.shape
    if targets.shape != tuple(outer):
        one_hot = ": of one-hot targets take the numbers of the classes, targets.argmax(-1)"
        raise ValueError(
            f"targets takes the shape {tuple(outer)} with logits of {logits.shape}, "
            f"got {targets.shape}{one_hot if targets.shape == logits.shape else ''}"
        )
    rows = reshape(logits, (prod(outer), classes))
    kept = as_tensor(ops.reshape(targets, (prod(outer),)), "targets")
    losses, probabilities = ops.cross_entropy(rows.data, kept.data)

    def again(dy: Tensor, y: Tensor) -> Tensor:
        ones = ops.full(y.shape, 1.0, y.dtype, y.device)
        nothing = ops.full(rows.shape, 0.0, rows.dtype, rows.device)
        off = add(softmax(rows), Tensor(ops.cross_entropy_grad(nothing, kept.data, ones)))
        by_row = multiply(cast(off, dy.dtype), reshape(dy, (*dy.shape, 1)))
        return cast(by_row, rows.dtype)

    vjp = fused(lambda dy, y: ops.cross_entropy_grad(probabilities, kept.data, dy), again)
    return mean(record(losses, (rows, vjp), held=[kept]))


def mse_loss(prediction: Tensor, target: Any) -> Tensor:
    """The mean of (prediction - target)^2; the target has the prediction's shape or is a number.

    >>> from numbsparse import Tensor
    >>> from numbsparse.nn import functional as F
    >>> F.mse_loss(Tensor([1.0, 2.0]), Tensor([0.0, 4.0])).item()
    2.5
    """
    prediction = as_tensor(prediction, "prediction")
    on_gpu(prediction.data, "prediction")
    if not isinstance(target, ops.NUMBERS):
        target = target if isinstance(target, Tensor) else ops.operand(target, "target")
        if target.shape != prediction.shape:
            raise ValueError(
                f"target takes the shape of the prediction, {prediction.shape}, or a number, "
                f"got {target.shape}"
            )
        together(prediction=prediction.data, target=data_of(target))
    if 0 in prediction.shape:
        raise ValueError(f"prediction takes one value at least, got the shape {prediction.shape}")
    error = subtract(prediction, target)
    return mean(error * error)
