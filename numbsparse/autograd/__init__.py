"""Tensor and the tape. The engine knows no operation: only that each has a way back.

An operation is an ordinary function that ends in `record(result, (input, vjp), ...)`. A `vjp`
("vector-Jacobian product") takes the gradient of the result, and the result, both as Tensors, and
gives the gradient of that input. Written with differentiable functions, a vjp can itself be
differentiated: gradients of gradients need nothing else.

After D. Maclaurin, D. Duvenaud, R. P. Adams, "Autograd: Effortless gradients in NumPy", 2015.
"""

from numbsparse.autograd.contexts import Vjp, is_recording, noting, recording, unwatched
from numbsparse.autograd.contexts import no_grad as no_grad
from numbsparse.autograd.tape import (
    also_from,
    differentiable_grads,
    fused,
    grads_at,
    record,
    refuse_again,
)
from numbsparse.autograd.tape import grad as grad
from numbsparse.autograd.tensor import Tensor as Tensor
from numbsparse.autograd.tensor import as_data, as_tensor, listed, tensors_of, unread
from numbsparse.autograd.watch import unchanged
