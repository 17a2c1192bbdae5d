"""A whole model made sparse in one call."""

from collections.abc import Callable
from typing import Any

import torch

from numbsparse.dtypes import type_name
from numbsparse.nn.kept import naming
from numbsparse.patterns.checks import check_block_size
from numbsparse.torch.layer import check_module
from numbsparse.torch.linear import Linear

HOOKS = "_forward_", "_backward_", "_is_full_backward_"  # attributes that begin so
WITH_DENSE_WEIGHTS = {  # what says that these may compute so, where no gradient is asked for
    torch.nn.TransformerEncoder: "use_nested_tensor",
    torch.nn.TransformerEncoderLayer: "activation_relu_or_gelu",
}


def sparsify_(
    model: torch.nn.Module,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None = None,
    density: float | None = None,
    *,
    pattern: Callable[[int, int], Any] | None = None,
    block_size: int = 32,
    precision: str | None = None,
) -> None:
    """Replace each chosen torch.nn.Linear of a model by a block-sparse Linear.

    Their values are those of the dense layers at the kept blocks, their hooks the same. Parameters
    are new ones, so make the optimizer afterwards.

    Parameters
    ----------
    model : torch.nn.Module, changed in place
    filter_fn : function of a torch.nn.Linear and its full name, optional
        Whether to make it sparse; None takes all.
    density : float
        The share of each layer's blocks to keep, those of largest norm. Or:
    pattern : function of (in_blocks, out_blocks)
        Gives each layer's pattern, for a model that is yet to be trained.
    block_size, precision : as in Linear

    Raises
    ------
    ValueError
        If no layer is chosen, or the model is itself one, a chosen layer's weight is used elsewhere
        too or computed by a hook, or the density leaves it no block; then nothing was changed.

    Examples
    --------
    >>> import torch, numbsparse.torch as nst
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(),
    ...                           torch.nn.Linear(256, 64), torch.nn.Linear(64, 10))
    >>> nst.sparsify_(mlp, lambda module, name: name != "3", density=0.25)
    >>> [type(layer).__module__.partition(".")[0] for layer in mlp]
    ['numbsparse', 'torch', 'numbsparse', 'torch']
    """
    check_module(model)
    check_block_size(block_size)
    for argument, value in (("filter_fn", filter_fn), ("pattern", pattern)):
        if value is not None and not callable(value):
            raise TypeError(f"{argument} takes a function or None, got {type_name(value)}")
    chosen = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if type(module) is torch.nn.Linear and (filter_fn is None or filter_fn(module, name))
    }
    if not chosen:
        raise ValueError("filter_fn takes at least one torch.nn.Linear of the model, got none")
    if "" in chosen:
        raise ValueError("model takes a module that holds layers: see Linear.from_linear for one")
    _check_own(model, chosen)
    made: dict[torch.nn.Module, Linear] = {}  # a layer that stands in two places stays one
    how: Any = {"density": density, "block_size": block_size, "precision": precision}
    for name, linear in chosen.items():
        if linear not in made:
            sides = (-(-n // block_size) for n in (linear.in_features, linear.out_features))
            kept = None if pattern is None else pattern(*sides)
            with naming(name):
                made[linear] = Linear.from_linear(linear, kept, **how)
            hooks = {name: of for name, of in vars(linear).items() if name.startswith(HOOKS)}
            made[linear].__dict__.update(hooks)
    for name, linear in chosen.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made[linear])
    for kind, flag in WITH_DENSE_WEIGHTS.items():
        for module in model.modules():
            if isinstance(module, kind) and any(isinstance(m, Linear) for m in module.modules()):
                setattr(module, flag, False)


def _check_own(model: torch.nn.Module, chosen: dict[str, torch.nn.Linear]) -> None:
    """Refuse layers whose weight a hook computes, or another module has too, as an embedding."""
    for name, linear in chosen.items():
        if torch.Tensor in (type(linear.weight), type(linear.bias)):  # which is no Parameter
            got = f"{name} has a weight or bias that a hook computes"
            raise ValueError(f"{got}, as weight_norm and prune do: remove the hook first")
    owners = {linear.weight: (name, linear) for name, linear in chosen.items()}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            of, owner = owners.get(parameter, (name, module))
            if owner is not module:
                raise ValueError(f"{of} shares its weight with {name}: leave both out by filter_fn")
