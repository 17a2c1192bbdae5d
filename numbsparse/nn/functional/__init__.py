"""Differentiable functions: each forward next to its gradient.

They take Tensors and give Tensors, on the CPU and on a GPU alike; arrays are Tensors without a
gradient. Values are float32 or float64 on the CPU, float16, bfloat16 or float32 on a GPU. Results
have the shape of x where nothing else is said; operands of arithmetic broadcast as in NumPy.

All refuse by the argument's name, with what it got and what it takes: TypeError for what holds no
numbers, for another dtype, or for two of them; ValueError where shapes do not meet, there is no
such axis, a number is out of its range, or operands are in two places.
"""

from types import ModuleType as _ModuleType

from numbsparse.nn.functional import operators as _operators  # noqa: F401  Tensor's + - * / @ []
from numbsparse.nn.functional.activations import abs as abs
from numbsparse.nn.functional.activations import concat_elu as concat_elu
from numbsparse.nn.functional.activations import dropout as dropout
from numbsparse.nn.functional.activations import elu as elu
from numbsparse.nn.functional.activations import gelu as gelu
from numbsparse.nn.functional.activations import glu as glu
from numbsparse.nn.functional.activations import log_sigmoid as log_sigmoid
from numbsparse.nn.functional.activations import log_softmax as log_softmax
from numbsparse.nn.functional.activations import logsumexp as logsumexp
from numbsparse.nn.functional.activations import relu as relu
from numbsparse.nn.functional.activations import sigmoid as sigmoid
from numbsparse.nn.functional.activations import softmax as softmax
from numbsparse.nn.functional.activations import softplus as softplus
from numbsparse.nn.functional.activations import tanh as tanh
from numbsparse.nn.functional.arithmetic import add as add
from numbsparse.nn.functional.arithmetic import cast as cast
from numbsparse.nn.functional.arithmetic import divide as divide
from numbsparse.nn.functional.arithmetic import exp as exp
from numbsparse.nn.functional.arithmetic import expm1 as expm1
from numbsparse.nn.functional.arithmetic import log as log
from numbsparse.nn.functional.arithmetic import multiply as multiply
from numbsparse.nn.functional.arithmetic import negative as negative
from numbsparse.nn.functional.arithmetic import power as power
from numbsparse.nn.functional.arithmetic import remap as remap
from numbsparse.nn.functional.arithmetic import sqrt as sqrt
from numbsparse.nn.functional.arithmetic import subtract as subtract
from numbsparse.nn.functional.block_sparse import block_norms as block_norms
from numbsparse.nn.functional.cell import repeated_cell as repeated_cell
from numbsparse.nn.functional.columns import column_norms as column_norms
from numbsparse.nn.functional.columns import normalise_columns as normalise_columns
from numbsparse.nn.functional.columns import scale_columns as scale_columns
from numbsparse.nn.functional.conv import conv as conv
from numbsparse.nn.functional.conv import conv_transpose as conv_transpose
from numbsparse.nn.functional.conv import conv_weight_grad as conv_weight_grad
from numbsparse.nn.functional.gates import scale_blocks as scale_blocks
from numbsparse.nn.functional.layers import embedding as embedding
from numbsparse.nn.functional.layers import layer_norm as layer_norm
from numbsparse.nn.functional.layers import linear as linear
from numbsparse.nn.functional.loss import cross_entropy as cross_entropy
from numbsparse.nn.functional.loss import mse_loss as mse_loss
from numbsparse.nn.functional.lstm import lstm as lstm
from numbsparse.nn.functional.lstm import lstm_step_by_step as lstm_step_by_step
from numbsparse.nn.functional.products import matmul as matmul
from numbsparse.nn.functional.products import sddmm as sddmm
from numbsparse.nn.functional.repeated import repeated_norm as repeated_norm
from numbsparse.nn.functional.repeated import repeated_product as repeated_product
from numbsparse.nn.functional.shape import broadcast_to as broadcast_to
from numbsparse.nn.functional.shape import concatenate as concatenate
from numbsparse.nn.functional.shape import getitem as getitem
from numbsparse.nn.functional.shape import mean as mean
from numbsparse.nn.functional.shape import reshape as reshape
from numbsparse.nn.functional.shape import split as split
from numbsparse.nn.functional.shape import stack as stack
from numbsparse.nn.functional.shape import sum as sum
from numbsparse.nn.functional.shape import transpose as transpose
from numbsparse.nn.functional.shape import unbind as unbind

__all__ = [n for n, of in globals().items() if n[0] != "_" and not isinstance(of, _ModuleType)]
