"""Activations, softmax and dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor, once, record
from numbsparse.nn.functional.arithmetic import multiply, subtract


def relu(x: Tensor) -> Tensor:
    """max(x, 0); the gradient at 0 is 0."""
    return record(ops.relu(x.data), (x, lambda dy, y: _relu_grad(x, dy)))


def _relu_grad(x: Tensor, dy: Tensor) -> Tensor:
    # Piecewise linear: the second derivative with respect to x is zero.
    return record(ops.relu_grad(x.data, dy.data), (dy, lambda g, y: _relu_grad(x, g)))


def gelu(x: Tensor) -> Tensor:
    """x * Phi(x), by the tanh form: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    return record(ops.gelu(x.data), (x, once(lambda dy, y: ops.gelu_grad(x.data, dy))))


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    return record(ops.tanh(x.data), (x, lambda dy, y: multiply(dy, subtract(1.0, multiply(y, y)))))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    return record(
        ops.sigmoid(x.data), (x, lambda dy, y: multiply(dy, multiply(y, subtract(1.0, y))))
    )


def softmax(x: Tensor) -> Tensor:
    """e^x / sum(e^x) along the last axis."""
    return record(ops.softmax(x.data), (x, once(lambda dy, y: ops.softmax_grad(y, dy))))


def log_softmax(x: Tensor) -> Tensor:
    """x - log(sum(e^x)) along the last axis."""
    return record(ops.log_softmax(x.data), (x, once(lambda dy, y: ops.log_softmax_grad(y, dy))))


def dropout(x: Any, rate: float, *, seed: int, call: int | Callable[[], int] = 0) -> Tensor:
    """Each value is zero with probability `rate`, and x / (1 - rate) otherwise.

    Which values is a function of (seed, call) and their position, the same on CPU and GPU.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"rate takes a probability from 0 to below 1, got {rate}")
    x = x if isinstance(x, Tensor) else Tensor(x)
    if rate == 0:
        return x
    return multiply(x, Tensor(ops.dropout_mask(x.shape, rate, seed, call, x.dtype, x.place)))
