"""Optimizers, clipping and learning-rate schedules. State lives where the parameters do."""

from numbsparse.nn.average import ExponentialMovingAverage
from numbsparse.nn.optim.adam import Adam, AdamW
from numbsparse.nn.optim.optimizer import Optimizer
from numbsparse.nn.optim.schedules import LambdaLR, cosine, warmup, warmup_cosine
from numbsparse.nn.optim.sgd import SGD
from numbsparse.nn.scaling import LossScaler

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ExponentialMovingAverage",
    "LambdaLR",
    "LossScaler",
    "Optimizer",
    "cosine",
    "warmup",
    "warmup_cosine",
]
