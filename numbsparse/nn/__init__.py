"""Layers in torch's names and order; each also takes `layout` and `block_size`.

>>> import numpy as np, numbsparse as ns
>>> layout = ns.Layout(ns.patterns.random(4, 2, density=0.5, seed=0))
>>> model = ns.nn.Sequential(ns.nn.Linear(128, 64, layout=layout, seed=0), ns.nn.ReLU())
>>> model(np.ones((8, 128), np.float32)).shape
(8, 64)
"""

from numbsparse.nn import functional, init, optim, utils
from numbsparse.nn.activations import GELU, ReLU, Sigmoid, Tanh
from numbsparse.nn.checkpoint import load, save
from numbsparse.nn.containers import ModuleDict, ModuleList, Sequential
from numbsparse.nn.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from numbsparse.nn.dropout import Dropout
from numbsparse.nn.embedding import Embedding
from numbsparse.nn.linear import Linear
from numbsparse.nn.lstm import LSTM
from numbsparse.nn.module import Module, Parameter
from numbsparse.nn.multiplicative_lstm import MultiplicativeLSTM, NormalizedProduct
from numbsparse.nn.normalization import BatchNorm, LayerNorm
from numbsparse.nn.recompute import recompute

__all__ = [
    "GELU",
    "LSTM",
    "BatchNorm",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiplicativeLSTM",
    "NormalizedProduct",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Tanh",
    "functional",
    "init",
    "load",
    "optim",
    "recompute",
    "save",
    "utils",
]
