"""Helpers around layers and their gradients."""

from numbsparse.nn.utils.clip import clip_grad_norm
from numbsparse.nn.utils.pruning import GradualPruning, prune
from numbsparse.nn.utils.weight_norm import weight_norm

__all__ = ["GradualPruning", "clip_grad_norm", "prune", "weight_norm"]
