"""Differentiable functions: each forward next to its gradient.

They take Tensors and give Tensors, on the CPU and on a GPU alike; an operand of a product or of
arithmetic may be an array.
"""

from numbsparse.nn.functional import operators as _operators  # noqa: F401  Tensor's + - * / @ []
from numbsparse.nn.functional.activations import (
    abs,
    concat_elu,
    dropout,
    elu,
    gelu,
    glu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    relu,
    sigmoid,
    softmax,
    softplus,
    tanh,
)
from numbsparse.nn.functional.arithmetic import (
    add,
    cast,
    divide,
    exp,
    expm1,
    log,
    multiply,
    negative,
    power,
    sqrt,
    subtract,
)
from numbsparse.nn.functional.block_sparse import block_norms, remap
from numbsparse.nn.functional.cell import repeated_cell
from numbsparse.nn.functional.columns import column_norms, normalise_columns, scale_columns
from numbsparse.nn.functional.conv import conv, conv_transpose, conv_weight_grad
from numbsparse.nn.functional.gates import scale_blocks
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
    "abs",
    "add",
    "block_norms",
    "broadcast_to",
    "cast",
    "column_norms",
    "concat_elu",
    "concatenate",
    "conv",
    "conv_transpose",
    "conv_weight_grad",
    "cross_entropy",
    "divide",
    "dropout",
    "elu",
    "embedding",
    "exp",
    "expm1",
    "gelu",
    "getitem",
    "glu",
    "layer_norm",
    "linear",
    "log",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "lstm",
    "lstm_step_by_step",
    "matmul",
    "mean",
    "mse_loss",
    "multiply",
    "negative",
    "normalise_columns",
    "power",
    "relu",
    "remap",
    "repeated_cell",
    "repeated_norm",
    "repeated_product",
    "reshape",
    "scale_blocks",
    "scale_columns",
    "sddmm",
    "sigmoid",
    "softmax",
    "softplus",
    "split",
    "sqrt",
    "stack",
    "subtract",
    "sum",
    "tanh",
    "transpose",
    "unbind",
]
