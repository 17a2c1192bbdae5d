"""Differentiable functions: each forward beside its gradient.

They take Tensors (or arrays, which they wrap) and give Tensors, on the CPU and on a GPU alike.
"""

from numbsparse.nn.functional import operators as _operators  # noqa: F401  Tensor's + - * / @ []
from numbsparse.nn.functional.activations import (
    dropout,
    gelu,
    log_softmax,
    relu,
    sigmoid,
    softmax,
    tanh,
)
from numbsparse.nn.functional.arithmetic import (
    add,
    cast,
    divide,
    exp,
    log,
    multiply,
    negative,
    power,
    sqrt,
    subtract,
)
from numbsparse.nn.functional.layers import embedding, layer_norm, linear
from numbsparse.nn.functional.loss import cross_entropy, mse_loss
from numbsparse.nn.functional.products import matmul, sddmm
from numbsparse.nn.functional.shape import (
    broadcast_to,
    concatenate,
    getitem,
    mean,
    reshape,
    split,
    stack,
    sum,
    transpose,
    unbind,
)

__all__ = [
    "add",
    "broadcast_to",
    "cast",
    "concatenate",
    "cross_entropy",
    "divide",
    "dropout",
    "embedding",
    "exp",
    "gelu",
    "getitem",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "mean",
    "mse_loss",
    "multiply",
    "negative",
    "power",
    "relu",
    "reshape",
    "sddmm",
    "sigmoid",
    "softmax",
    "split",
    "sqrt",
    "stack",
    "subtract",
    "sum",
    "tanh",
    "transpose",
    "unbind",
]
