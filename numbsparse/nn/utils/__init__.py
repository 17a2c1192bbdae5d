"""Helpers around layers and their gradients."""

from numbsparse.nn.utils.clip import clip_grad_norm
from numbsparse.nn.utils.group_lasso import GroupLasso
from numbsparse.nn.utils.hard_concrete import HardConcrete
from numbsparse.nn.utils.pruning import GradualPruning, compact, prune
from numbsparse.nn.utils.weight_norm import weight_norm

__all__ = [
    "GradualPruning",
    "GroupLasso",
    "HardConcrete",
    "clip_grad_norm",
    "compact",
    "prune",
    "weight_norm",
]
