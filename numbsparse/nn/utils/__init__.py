"""Helpers around layers and their gradients."""

from numbsparse.nn.utils.absent import absent_norms
from numbsparse.nn.utils.clip import clip_grad_norm
from numbsparse.nn.utils.group_lasso import GroupLasso
from numbsparse.nn.utils.hard_concrete import HardConcrete
from numbsparse.nn.utils.prune_and_grow import PruneAndGrow
from numbsparse.nn.utils.pruning import GradualPruning, compact, prune
from numbsparse.nn.utils.rewiring import Rewiring
from numbsparse.nn.utils.weight_norm import weight_norm

__all__ = [
    "GradualPruning",
    "GroupLasso",
    "HardConcrete",
    "PruneAndGrow",
    "Rewiring",
    "absent_norms",
    "clip_grad_norm",
    "compact",
    "prune",
    "weight_norm",
]
