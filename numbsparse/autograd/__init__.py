"""Tensor and the tape. The engine knows no operation: only that each has a way back.

An operation is an ordinary function that ends in `record(result, (input, vjp), ...)`. A `vjp`
("vector-Jacobian product") takes the gradient of the result, and the result, both as Tensors, and
gives the gradient of that input. Written with differentiable functions, a vjp can itself be
differentiated: gradients of gradients need nothing else.

After D. Maclaurin, D. Duvenaud, R. P. Adams, "Autograd: Effortless gradients in NumPy", 2015.
"""

from numbsparse.autograd.contexts import Vjp, is_recording, no_grad, noting, recording, unwatched
from numbsparse.autograd.tape import (
    differentiable_grads,
    grad,
    grads_at,
    once,
    record,
    refuse_again,
)
from numbsparse.autograd.tensor import Tensor, as_data, as_tensor, unread
from numbsparse.autograd.watch import unchanged

__all__ = [
    "Tensor",
    "Vjp",
    "as_data",
    "as_tensor",
    "differentiable_grads",
    "grad",
    "grads_at",
    "is_recording",
    "no_grad",
    "noting",
    "once",
    "record",
    "recording",
    "refuse_again",
    "unchanged",
    "unread",
    "unwatched",
]
