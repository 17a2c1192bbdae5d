"""Optimizers, clipping and learning-rate schedules. State lives where the parameters do.

A wrong setting is a TypeError or ValueError that names it, when the optimizer is made and when it
is changed; a gradient of another shape, dtype or layout is one in `step`, before anything changes.
"""

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
