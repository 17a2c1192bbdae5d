"""Trained values between the models of this room and those of `numbsparse.nn`."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import as_array, check_kind
from numbsparse.nn.kept import check_state
from numbsparse.patterns import dense
from numbsparse.patterns.checks import check_block_size
from numbsparse.torch.layer import SUFFIX, SparseModule, check_module
from numbsparse.torch.lstm import LSTM
from numbsparse.torch.operators import given_back

DENSE = "dense"  # in place of the layout: a weight of torch.nn.Linear, (out_features, in_features)


def to_nn_state_dict(model: torch.nn.Module, *, block_size: int = 32) -> dict[str, Any]:
    """The state dict of a model of torch, as the same model of `numbsparse.nn` takes it.

    Weights of sparse layers become matrices, with their layouts, on the CPU; so do those of
    torch.nn.Linear, with all blocks; all else becomes arrays. Names are torch's, but an LSTM's
    "weight_hh_l0" is called "layers.0.weight_hh". What is shared comes once, under its first name.
    Nothing shares memory with the model.

    Parameters
    ----------
    model : torch.nn.Module
    block_size : int
        Of what torch.nn.Linear becomes, as in `numbsparse.nn.Linear`.

    Returns
    -------
    dict of BlockSparse matrices of numbsparse and NumPy arrays, which `numbsparse.save` takes too

    Examples
    --------
    >>> import numpy as np, torch, numbsparse as ns, numbsparse.torch as nst
    >>> theirs = nst.Linear(10, 8, layout=[[1, 0], [1, 1], [0, 1]], block_size=4)
    >>> ours = ns.nn.Linear(10, 8, layout=[[1, 0], [1, 1], [0, 1]], block_size=4)
    >>> ours.load_state_dict(nst.to_nn_state_dict(theirs))
    >>> y = theirs(torch.ones(2, 10)).detach().numpy()
    >>> np.allclose(ours(np.ones((2, 10), np.float32)).numpy(), y, atol=1e-5)
    True
    """
    check_module(model)
    check_block_size(block_size)
    state: dict[str, Any] = {}
    for key, name, tensor, held in _matched(model):
        values = as_array(tensor.detach().cpu().clone())
        if held is DENSE:
            if key == name:  # a weight that comes first elsewhere is what it is there
                grid = (-(-n // block_size) for n in reversed(values.shape))
                state[name] = BlockSparse.from_dense(values.T, dense(*grid), block_size=block_size)
        else:
            state[name] = values if held is None else BlockSparse(values, held[0], shape=held[1])
    return state


def from_nn_state_dict(model: torch.nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The state dict of a model of `numbsparse.nn`, as a model of torch's takes it.

    Load it as any other; where layouts are to be taken over, call `adopt_layouts_` with it first.
    Numbers that the model has no place for, as a Dropout's calls, are left out.

    Parameters
    ----------
    model : torch.nn.Module, which says the names
    state : dict, as `state_dict()` of the same model of `numbsparse.nn`, or `numbsparse.load` gave
        it

    Returns
    -------
    dict of tensors on the CPU

    Raises
    ------
    TypeError
        If a weight is not a BlockSparse of numbsparse.
    ValueError
        If one has another shape or block size than the model's.

    Examples
    --------
    >>> import torch, numbsparse as ns, numbsparse.torch as nst
    >>> ours = ns.nn.Linear(10, 8, layout=[[1, 0], [0, 1], [0, 1]], block_size=4)
    >>> theirs = nst.Linear(10, 8, block_size=4)
    >>> state = nst.from_nn_state_dict(theirs, ours.state_dict())
    >>> nst.adopt_layouts_(theirs, state)
    >>> theirs.load_state_dict(state)
    <All keys matched successfully>
    """
    check_module(model)
    check_state(state)
    found: dict[str, torch.Tensor] = {}
    names = set()
    for key, name, own, held in _matched(model):
        names.add(name)
        if name not in state:
            continue  # load_state_dict says so
        value = state[name]
        if held is DENSE and isinstance(value, BlockSparse):
            _check_fits(name, value, (own.shape[1], own.shape[0]), value.block_size)
            value = value.to("cpu").toarray().T
        elif held is not None and held is not DENSE:
            _check_fits(name, value, held[1], own.shape[1])
            found[key + SUFFIX] = torch.from_numpy(value.layout.pattern)
            value = value.to("cpu").data
        elif isinstance(value, BlockSparse):
            raise TypeError(
                f"state[{name!r}] takes an array, as torch's own layers do, got {value!r}"
            )
        elif not isinstance(value, np.ndarray):  # an array without axes, from a file
            value = np.asarray(value, as_array(own.detach().cpu()).dtype)
        found[key] = given_back(value, own).clone()
    for name in state.keys() - names:  # load_state_dict refuses them
        if isinstance(state[name], np.ndarray | BlockSparse):
            found[name] = torch.empty(0)
    return found


def _matched(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor, Any]]:
    """(key, name in numbsparse.nn, tensor, DENSE or a layout and shape) of what is saved."""
    held: dict[str, Any] = {}
    names: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if type(module) is torch.nn.Linear:
            held[f"{prefix}weight"] = DENSE
        for name, handle in module.handles.items() if isinstance(module, SparseModule) else ():
            held[prefix + name] = handle.layout, module.shape_of(name)
        for i in range(module.num_layers) if isinstance(module, LSTM) else ():
            for part in ("weight_ih", "weight_hh", "bias"):
                names[f"{prefix}{part}_l{i}"] = f"{prefix}layers.{i}.{part}"
    patterns = {key + SUFFIX for key, of in held.items() if of is not DENSE}
    first: dict[int, str] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and key not in patterns:
            name = first.setdefault(id(tensor), names.get(key, key))
            yield key, name, tensor, held.get(key)


def _check_fits(name: str, value: Any, shape: tuple[int, int], block_size: int) -> None:
    check_kind(f"state[{name!r}]", value, BlockSparse, "a BlockSparse of numbsparse")
    if value.shape != shape or value.block_size != block_size:
        raise ValueError(
            f"state[{name!r}] takes {shape[0]} x {shape[1]} features in blocks of {block_size}, "
            f"got {value!r}"
        )
