"""Weight normalisation over kept blocks only."""

from functools import cache
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.nn import functional
from numbsparse.nn.module import Module, Parameter
from numbsparse.patterns.checks import number


def weight_norm(module: Module, *, eps: float = 1e-12) -> Module:
    """Make a layer's weight g * v / ||v||, and train the length g and the direction v apart.

    The norm is that of each column of the block-sparse `weight`, (in_features, out_features), over
    its kept blocks: one length for each output of a Linear or a convolution, and one for each input
    channel of a transposed convolution, as in torch. The layer's `weight` becomes `weight_g`, a
    Parameter of (out_features,), and `weight_v`, a Parameter of a BlockSparse; `weight` is computed
    from both whenever it is asked for, at first with its old values; of 16-bit floats in float32.
    Gates come after that: blocks whose gate is zero count in the norm, and `compact` keeps them.

    Parameters
    ----------
    module : a Module with a block-sparse Parameter `weight`
    eps : float, at least 0
        Added to the squared norm.

    Returns
    -------
    module, changed in place

    Raises TypeError if it has no such weight, or has been normalised before; TypeError or
    ValueError for another eps.

    Examples
    --------
    >>> from numbsparse import nn
    >>> layer = nn.utils.weight_norm(nn.Linear(64, 32, bias=False, seed=0))
    >>> [name for name, _ in layer.named_parameters()]
    ['weight_v', 'weight_g']

    Salimans and Kingma, "Weight Normalization", 2016.
    """
    eps = number("eps", eps)
    weight = vars(module).get("weight") if isinstance(module, Module) else None
    if not isinstance(weight, Parameter) or not isinstance(weight.data, BlockSparse):
        raise TypeError(
            f"module takes a layer with a block-sparse parameter `weight`, "
            f"got a {type(module).__name__}"
        )
    wide = ops.state_dtype(weight.dtype)
    own = functional.cast(Tensor(weight.data), wide)
    lengths = functional.column_norms(own, eps, tap_features=module.tap_features)
    state: Any = module
    del state.weight
    state.weight_norm_eps = eps
    state.weight_v = weight
    state.weight_g = Parameter(functional.cast(lengths, weight.dtype).data)
    kind: Any = type(module)
    module.__class__ = _normalised(kind)
    return module


@cache
def _normalised(layer: Any) -> Any:
    """The layer's class with a `weight` that is computed."""

    def weight(self: Any) -> Tensor:
        eps, features = self.weight_norm_eps, self.tap_features
        return functional.normalise_columns(
            self.weight_v, self.weight_g, eps, tap_features=features
        )

    def reduce(self: Any) -> Any:  # pickle finds classes by their names
        return _empty, (layer,), vars(self)

    names = {"weight": property(weight), "__module__": layer.__module__, "__doc__": layer.__doc__}
    return type(layer.__name__, (layer,), names | {"__reduce__": reduce})


def _empty(layer: Any) -> Any:
    kind = _normalised(layer)
    return kind.__new__(kind)
