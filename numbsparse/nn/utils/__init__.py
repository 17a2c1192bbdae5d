"""Helpers around layers and their gradients."""

from numbsparse.nn.utils.clip import clip_grad_norm
from numbsparse.nn.utils.weight_norm import weight_norm

__all__ = ["clip_grad_norm", "weight_norm"]
