"""Softmax and log(sum(e^x)) along the last axis, and the cross-entropy loss.

Each row is shifted by its largest value first, so that no exponential overflows.
"""

from math import prod
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import empty
from numbsparse.ops.create import zeros_like
from numbsparse.ops.operands import (
    alike,
    check_beside,
    check_integers,
    check_range,
    contiguous,
    length_of,
    on_gpu,
)
from numbsparse.ops.shape import reshape


def softmax(x: Any) -> Any:
    """y = e^x / sum(e^x), along the last axis; NaN in a row that holds infinity or NaN, or whose
    values are all -infinity.

    >>> softmax(np.float32([[0, 0, 0, 0]]))
    array([[0.25, 0.25, 0.25, 0.25]], dtype=float32)
    """
    return _along_rows("softmax", x)


def log_softmax(x: Any) -> Any:
    """y = x - log(sum(e^x)), along the last axis; NaN in the same rows as softmax.

    >>> log_softmax(np.float32([[0, -np.inf], [0, np.inf]]))
    array([[  0., -inf],
           [ nan,  nan]], dtype=float32)
    """
    return _along_rows("log_softmax", x)


def logsumexp(x: Any) -> Any:
    """y = log(sum(e^x)), along the last axis, which y lacks; ValueError where it has no value.

    >>> logsumexp(np.float32([[0, 0], [1000, -1000]]))
    array([6.931472e-01, 1.000000e+03], dtype=float32)
    """
    gpu = on_gpu(x, "x")
    if length_of(x, "x") == 0:
        raise ValueError(f"x takes values along the last axis, got the shape {x.shape}")
    if gpu:
        y = empty(x.shape[:-1], x.dtype)
        kernels.softmax.logsumexp(reshape(x, (prod(x.shape[:-1]), x.shape[-1])), y.reshape(-1))
        return y
    largest = np.maximum.reduce(x, axis=-1, keepdims=True)
    shift = np.where(np.isfinite(largest), largest, 0)  # no infinity less infinity
    with np.errstate(divide="ignore"):  # log(0) is the right -infinity
        y = np.log(np.add.reduce(np.exp(x - shift), axis=-1))  # SciPy takes 15 times as long
    return contiguous(y + shift[..., 0])


def softmax_grad(y: Any, dy: Any) -> Any:
    """dx = y * (dy - sum(y * dy)), along the last axis, for y = softmax(x)."""
    if _alike_on_gpu(y, dy):
        return _on_gpu("softmax_grad", y, dy)
    dx = np.multiply(y, dy, order="C")
    dx -= y * np.add.reduce(dx, axis=-1, keepdims=True)
    return dx


def log_softmax_grad(y: Any, dy: Any) -> Any:
    """dx = dy - e^y * sum(dy), along the last axis, for y = log_softmax(x)."""
    if _alike_on_gpu(y, dy):
        return _on_gpu("log_softmax_grad", y, dy)
    dx = np.exp(y, order="C")
    dx *= -np.add.reduce(dy, axis=-1, keepdims=True)
    dx += dy
    return dx


def cross_entropy(logits: Any, targets: Any) -> tuple[Any, Any]:
    """The loss of each row (n, classes), as of `nn.functional.cross_entropy`, and softmax(logits).

    Losses are float32 for float16. The probabilities are what the gradient needs.

    >>> losses, probabilities = cross_entropy(np.float32([[0, 0]]), np.array([1]))
    >>> losses
    array([0.6931472], dtype=float32)
    """
    gpu = on_gpu(logits, "logits")
    _check_targets(logits, "logits", targets, gpu)
    if gpu:
        probabilities = empty(logits.shape, logits.dtype)
        losses = empty(targets.shape, np.float32)
        kernels.softmax.cross_entropy(logits, targets, losses, probabilities)
        return losses, probabilities
    check_range(targets, logits.shape[1], "targets")
    logs = log_softmax(logits)
    return -logs[np.arange(len(targets)), targets], np.exp(logs)


def cross_entropy_grad(probabilities: Any, targets: Any, dlosses: Any) -> Any:
    """dlogits[i] = (probabilities[i] - one_hot(targets[i])) * dlosses[i], (n, classes)."""
    gpu = on_gpu(probabilities, "probabilities")
    _check_targets(probabilities, "probabilities", targets, gpu)
    dtype = np.dtype(np.float32) if gpu else probabilities.dtype
    check_beside("dlosses", dlosses, targets.shape, dtype, "probabilities", probabilities)
    if gpu:
        dlogits = empty(probabilities.shape, probabilities.dtype)
        kernels.softmax.cross_entropy_grad(probabilities, targets, dlosses, dlogits)
        return dlogits
    check_range(targets, probabilities.shape[1], "targets")
    dlogits = np.multiply(probabilities, dlosses[:, None], order="C")
    dlogits[np.arange(len(targets)), targets] -= dlosses
    return dlogits


def _check_targets(logits: Any, argument: str, targets: Any, gpu: bool) -> None:
    check_integers(targets, "targets", argument, gpu)
    if logits.ndim != 2 or logits.shape[1] == 0 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"{argument} and targets take the shapes (n, classes), with a class, and (n,), "
            f"got {logits.shape} and {targets.shape}"
        )


def _along_rows(name: str, x: Any) -> Any:
    """A function of each row, by NumPy, or by the kernel of the same name."""
    gpu = on_gpu(x, "x")
    length_of(x, "x")
    if x.size == 0:
        return zeros_like(x)
    if gpu:
        return _on_gpu(name, x)
    with np.errstate(invalid="ignore"):  # infinity less infinity
        y = np.subtract(x, np.maximum.reduce(x, axis=-1, keepdims=True), order="C")
    exponentials = np.exp(y, out=y if name == "softmax" else None)
    total = np.add.reduce(exponentials, axis=-1, keepdims=True)
    return np.divide(y, total, out=y) if name == "softmax" else np.subtract(y, np.log(total), out=y)


def _alike_on_gpu(y: Any, dy: Any) -> bool:
    length_of(y, "y")
    return alike(y=y, dy=dy)


def _on_gpu(name: str, *operands: Any) -> Any:
    shape = operands[0].shape
    out = empty(shape, operands[0].dtype)
    rows = prod(shape[:-1]), shape[-1]
    getattr(kernels.softmax, name)(*(reshape(a, rows) for a in (*operands, out)))
    return out
