"""Layers in torch's names and order; each takes `layout` and `block_size` besides."""

from numbsparse.nn import functional, init, optim
from numbsparse.nn.activations import GELU, ReLU, Sigmoid, Tanh
from numbsparse.nn.checkpoint import load, save
from numbsparse.nn.dropout import Dropout
from numbsparse.nn.embedding import Embedding
from numbsparse.nn.linear import Linear
from numbsparse.nn.lstm import LSTM
from numbsparse.nn.module import Module, Parameter, Sequential
from numbsparse.nn.normalization import LayerNorm

__all__ = [
    "GELU",
    "LSTM",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Module",
    "Parameter",
    "ReLU",
    "Sequential",
    "Sigmoid",
    "Tanh",
    "functional",
    "init",
    "load",
    "optim",
    "save",
]
