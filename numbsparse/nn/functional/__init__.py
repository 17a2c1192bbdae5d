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
from numbsparse.nn.functional.cell import repeated_cell
from numbsparse.nn.functional.columns import column_norms, scale_columns
from numbsparse.nn.functional.conv import conv, conv_transpose, conv_weight_grad
from numbsparse.nn.functional.layers import embedding, layer_norm, linear
from numbsparse.nn.functional.loss import cross_entropy, mse_loss
from numbsparse.nn.functional.lstm import lstm, lstm_step_by_step
from numbsparse.nn.functional.products import matmul, sddmm
from numbsparse.nn.functional.repeated import repeated_norm, repeated_product
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
    "column_norms",
    "concatenate",
    "conv",
    "conv_transpose",
    "conv_weight_grad",
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
    "lstm",
    "lstm_step_by_step",
    "matmul",
    "mean",
    "mse_loss",
    "multiply",
    "negative",
    "power",
    "relu",
    "repeated_cell",
    "repeated_norm",
    "repeated_product",
    "reshape",
    "scale_columns",
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
