"""Layers in torch's names and order; each also takes `layout` and `block_size`."""

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
