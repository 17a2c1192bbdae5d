"""Functions of arrays, without gradients: NumPy on the CPU, kernels on a GPU.

All arrays of one call live in one place, NumPy's or the GPU's (DeviceArray), and have one dtype;
so does the result. Anything else is refused before it runs. Of several GPUs a function runs on the
one where its arrays are.
"""

from types import FunctionType as _FunctionType
from types import ModuleType as _ModuleType

from numbsparse.kernels.lstm import GATES
from numbsparse.ops.activations import (
    concat_elu,
    concat_elu_grad,
    elu,
    elu_grad,
    gelu,
    gelu_grad,
    gelu_tanh,
    gelu_tanh_grad,
    glu,
    glu_grad,
    relu,
    relu_grad,
    sigmoid,
    softplus,
    stretched_sigmoid,
    stretched_sigmoid_grad,
    tanh,
)
from numbsparse.ops.algebra import block_norms, checked_norm, in_layout, placed, remap, row_norms
from numbsparse.ops.average import average_step, check_average
from numbsparse.ops.cell import cell, cell_grad
from numbsparse.ops.choice import aligned, begins_anywhere
from numbsparse.ops.columns import column_dots, scale_columns
from numbsparse.ops.conv import conv, conv_transpose, conv_weight_grad
from numbsparse.ops.conv_operands import space_of
from numbsparse.ops.conv_window import conv_window, known_window, transpose_window
from numbsparse.ops.create import full, full_like, zeros, zeros_like
from numbsparse.ops.dropout import draws_noted, draws_repeated, dropout_mask, logistic_noise
from numbsparse.ops.edge import inside
from numbsparse.ops.elementwise import (
    NUMBERS,
    add,
    add_into,
    broadcast_to,
    cast,
    copy,
    copy_into,
    divide,
    exp,
    expm1,
    log,
    maximum,
    multiply,
    negative,
    power,
    sqrt,
    subtract,
)
from numbsparse.ops.embedding import sum_rows, take_rows
from numbsparse.ops.gates import (
    all_blocks,
    all_of,
    block_dots,
    gate_numbers,
    gated,
    in_order,
    select_gated,
    ungated,
)
from numbsparse.ops.index import index_beside
from numbsparse.ops.loss_scale import (
    LEAST_SCALE,
    MOST_SCALE,
    guarded_adam_numbers,
    guarded_sgd_numbers,
    judge,
)
from numbsparse.ops.lstm import LSTMCells, LSTMTrace, lstm, lstm_grad, without_padding
from numbsparse.ops.lstm import check as check_lstm
from numbsparse.ops.matmul import GRADIENTS, matmul, multiplies_gates
from numbsparse.ops.normalize import (
    affine_norm,
    affine_norm_grad,
    affine_norm_sums,
    layer_norm,
    layer_norm_grad,
)
from numbsparse.ops.operands import HalfOnCPU, is_half, operand, state_dtype
from numbsparse.ops.operands import at_home as _at_home
from numbsparse.ops.optimizer import (
    ADAM_NUMBERS,
    SGD_NUMBERS,
    TAKEN,
    adam_numbers,
    adam_step,
    check_step,
    global_norm,
    scale_to_norm,
    sgd_step,
)
from numbsparse.ops.precision import checked_precision, own_precision
from numbsparse.ops.precision import set_precision as set_precision
from numbsparse.ops.reduce import max, mean, sum, sum_to
from numbsparse.ops.repeats import repeated, replayed, replayed_in, started
from numbsparse.ops.sddmm import check_factors, sddmm, sddmm_in_parts, sddmm_into, size_of_blocks
from numbsparse.ops.shape import concatenate, getitem, put, reshape, stack, transpose
from numbsparse.ops.softmax import (
    cross_entropy,
    cross_entropy_grad,
    log_softmax,
    log_softmax_grad,
    logsumexp,
    softmax,
    softmax_grad,
)

# Those that go to the GPU of their arrays by themselves, or take no memory and launch nothing.
_ANYWHERE = {
    "matmul", "sddmm", "check_average", "check_factors", "check_step", "checked_norm",
    "checked_precision", "conv_window", "getitem", "index_beside", "is_half", "known_window",
    "operand", "own_precision", "repeated", "replayed_in", "size_of_blocks", "space_of", "started",
    "state_dtype", "transpose", "transpose_window",
}  # fmt: skip

__all__ = [n for n, of in globals().items() if n[0] != "_" and not isinstance(of, _ModuleType)]

for _name in set(__all__) - _ANYWHERE:
    if isinstance(_value := globals()[_name], _FunctionType):
        globals()[_name] = _at_home(_value)
