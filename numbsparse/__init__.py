"""numbsparse: block-sparse weights for neural networks, in pure Python, on CPUs and GPUs.

>>> import numpy as np, numbsparse as ns
>>> layout = ns.Layout(ns.patterns.random(8, 4, density=0.25, seed=0))  # which blocks are kept
>>> w = ns.BlockSparse(np.ones((layout.n_blocks, 16, 16), np.float32), layout)
>>> (np.ones((2, 128), np.float32) @ w).shape
(2, 64)
"""

from typing import TYPE_CHECKING

from numbsparse import nn, patterns, testing
from numbsparse.autograd import Tensor, grad, no_grad
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, compile_ahead, stream, synchronize, to_device
from numbsparse.draw import draw
from numbsparse.graph import graph
from numbsparse.layout import Layout
from numbsparse.nn import functional as _functional
from numbsparse.nn import load, save
from numbsparse.nn.functional import conv, conv_transpose, conv_weight_grad
from numbsparse.ops import set_precision
from numbsparse.signatures import Matmul as _Matmul
from numbsparse.signatures import Sddmm as _Sddmm
from numbsparse.tune import tune

if TYPE_CHECKING:  # a package that is called
    from numbsparse.device import Room as _Room

    device: _Room

matmul: _Matmul = _functional.matmul
sddmm: _Sddmm = _functional.sddmm

__version__ = "0.1.0"

__all__ = [
    "BlockSparse",
    "DeviceArray",
    "Layout",
    "Tensor",
    "compile_ahead",
    "conv",
    "conv_transpose",
    "conv_weight_grad",
    "device",
    "draw",
    "grad",
    "graph",
    "load",
    "matmul",
    "nn",
    "no_grad",
    "patterns",
    "save",
    "sddmm",
    "set_precision",
    "stream",
    "synchronize",
    "testing",
    "to_device",
    "tune",
]
