"""Functions of arrays, without gradients: NumPy on the CPU, kernels on a GPU.

All arrays of one call live in one place, NumPy's or the GPU's (DeviceArray), and have one dtype;
so does the result. Anything else is refused before it runs.
"""

from numbsparse.ops.activations import gelu, gelu_grad, relu, relu_grad, sigmoid
from numbsparse.ops.create import full, full_like, zeros, zeros_like
from numbsparse.ops.dropout import dropout_mask
from numbsparse.ops.elementwise import (
    add,
    broadcast_to,
    cast,
    copy,
    copy_into,
    divide,
    exp,
    log,
    maximum,
    multiply,
    negative,
    power,
    sqrt,
    subtract,
    tanh,
)
from numbsparse.ops.embedding import sum_rows, take_rows
from numbsparse.ops.matmul import index_beside, matmul, sddmm
from numbsparse.ops.normalize import layer_norm, layer_norm_grad
from numbsparse.ops.optimizer import (
    ADAM_NUMBERS,
    adam_numbers,
    adam_step,
    adam_step_with,
    global_norm,
    scale_to_norm,
    sgd_step,
    sgd_step_with,
)
from numbsparse.ops.precision import checked_precision, set_precision
from numbsparse.ops.reduce import max, mean, sum, sum_to
from numbsparse.ops.shape import concatenate, getitem, put, reshape, stack, transpose
from numbsparse.ops.softmax import (
    cross_entropy,
    cross_entropy_grad,
    log_softmax,
    log_softmax_grad,
    softmax,
    softmax_grad,
)

__all__ = [
    "ADAM_NUMBERS",
    "adam_numbers",
    "adam_step",
    "adam_step_with",
    "add",
    "broadcast_to",
    "cast",
    "checked_precision",
    "concatenate",
    "copy",
    "copy_into",
    "cross_entropy",
    "cross_entropy_grad",
    "divide",
    "dropout_mask",
    "exp",
    "full",
    "full_like",
    "gelu",
    "gelu_grad",
    "getitem",
    "global_norm",
    "index_beside",
    "layer_norm",
    "layer_norm_grad",
    "log",
    "log_softmax",
    "log_softmax_grad",
    "matmul",
    "max",
    "maximum",
    "mean",
    "multiply",
    "negative",
    "power",
    "put",
    "relu",
    "relu_grad",
    "reshape",
    "scale_to_norm",
    "sddmm",
    "set_precision",
    "sgd_step",
    "sgd_step_with",
    "sigmoid",
    "softmax",
    "softmax_grad",
    "sqrt",
    "stack",
    "subtract",
    "sum",
    "sum_rows",
    "sum_to",
    "take_rows",
    "tanh",
    "transpose",
    "zeros",
    "zeros_like",
]
