"""What the layers have in common: layouts beside parameters, in copies and in state dicts too."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx import Proxy

from numbsparse import ops
from numbsparse.dtypes import check_kind
from numbsparse.layout import Layout, as_layout
from numbsparse.nn.init import column_fan_in
from numbsparse.nn.kept import check_state
from numbsparse.patterns.checks import flag
from numbsparse.torch.handles import Handle
from numbsparse.torch.matrix import BlockSparse
from numbsparse.torch.operators import check_dtype

if TYPE_CHECKING:
    from numbsparse.nn.module import AsForward

SUFFIX = "_pattern"  # of the name of a weight: of its pattern in a state dict


class SparseModule(torch.nn.Module):
    """A module some of whose parameters are the kept blocks of matrices, (n_blocks, B, B).

    Its state dict holds the pattern of such a weight too, bool (in_blocks, out_blocks), as
    "weight_pattern" beside "weight". It loads weights of its own layouts only: see
    `adopt_layouts_`.
    """

    if TYPE_CHECKING:
        weight: torch.nn.Parameter
        __call__: AsForward = AsForward()

    def __init__(self, block_size: int, precision: str | None) -> None:
        super().__init__()
        self.block_size = block_size
        self.precision = ops.own_precision(precision)
        self.handles: dict[str, Handle] = {}

    def hold(self, name: str, layout: Layout, device: Any = None, dtype: Any = None) -> None:
        """Make the parameter of this name, of the layout, its values whatever was in memory."""
        shape = (layout.n_blocks, self.block_size, self.block_size)
        values = torch.empty(shape, device=device, dtype=dtype)
        check_dtype("dtype", values.dtype)
        setattr(self, name, torch.nn.Parameter(values))
        self.handles[name] = Handle(layout)

    def _pattern(self, name: str) -> torch.Tensor:
        """Made when it is asked for: that of a huge layout fills the memory."""
        return torch.from_numpy(self.handles[name].layout.pattern)

    def __getattr__(self, name: str) -> Any:
        """What a state dict has is found by its name, too, as `torch.distributed` looks for it."""
        held = name.removesuffix(SUFFIX)
        if held != name and held in self.__dict__.get("handles", ()):
            return self._pattern(held)
        return super().__getattr__(name)

    def shape_of(self, name: str) -> tuple[int, int]:
        """The features of the matrix that a parameter of this module holds, in and out."""
        raise NotImplementedError

    def in_graph(self, x: Proxy, *more: Any) -> Any:
        """A call of this layer as one node of a graph of torch.fx, where shapes are not known."""
        name = x.tracer.path_of_module(self)
        if not name:
            raise TypeError("torch.fx takes this layer within a model, got the layer alone")
        return x.tracer.create_proxy("call_module", name, (x, *more), {})

    def matrix(self, name: str) -> BlockSparse:
        """The matrix that a parameter of this module holds."""
        return BlockSparse(getattr(self, name), self.handles[name], shape=self.shape_of(name))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self.handles:
            destination[prefix + name + SUFFIX] = self._pattern(name)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        missing_keys, _, error_msgs = lists
        for name in self.handles:
            key = prefix + name + SUFFIX
            pattern = state_dict.pop(key, None)
            if pattern is None and strict and not is_sharded(getattr(self, name)):
                missing_keys.append(key)  # rank 0 alone may have it, and looks at it
            if pattern is not None and not torch.equal(
                pattern_in(key, pattern), self._pattern(name)
            ):
                error_msgs.append(
                    f"{key} is of another layout than {prefix}{name} has: to take it, call "
                    "numbsparse.torch.adopt_layouts_(model, state_dict) first"
                )
        if not error_msgs:  # nothing of it is loaded beside a wrong layout
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)


class OneWeight(SparseModule):
    """A layer of one weight, perhaps with a bias, of `features` in, through each tap, and out."""

    features: tuple[int, int]

    def hold_both(self, layout: Layout, bias: bool, device: Any, dtype: Any) -> None:
        """Make both, and draw them."""
        self.hold("weight", layout, device, dtype)
        wanted = flag("bias", bias)
        values = torch.empty(self.features[1], device=device, dtype=dtype) if wanted else None
        self.bias = None if values is None else torch.nn.Parameter(values)
        self.reset_parameters()

    @property
    def layout(self) -> Layout:
        """The layout of the weight."""
        return self.handles["weight"].layout

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, as torch's layers do for their fan-in."""
        draw_(self.weight, self.bias, self.layout, self.features)


def adopt_layouts_(model: torch.nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Give a model's sparse layers the layouts of a state dict, so that it can be loaded.

    Values of weights whose layout changes are lost; load the state dict next. Their parameters stay
    the same objects, so an optimizer goes on with them, once its own state is loaded too.

    Parameters
    ----------
    model : torch.nn.Module
    state_dict : dict, as `state_dict()` of such a model gave it

    Raises ValueError where a pattern has another number of blocks on a side; then nothing is done.

    Examples
    --------
    >>> import torch, numbsparse.torch as nst
    >>> one, other = (nst.Linear(8, 8, layout=p, block_size=4) for p in ([[1, 0], [0, 1]],
    ...                                                                 [[1, 1], [0, 0]]))
    >>> nst.adopt_layouts_(other, one.state_dict())
    >>> other.load_state_dict(one.state_dict())
    <All keys matched successfully>
    """
    check_module(model)
    check_state(state_dict, "state_dict")
    adopted = []
    for prefix, module in model.named_modules():
        for name in module.handles if isinstance(module, SparseModule) else ():
            key = f"{prefix}.{name}{SUFFIX}".removeprefix(".")
            if key not in state_dict:
                continue
            layout = as_layout(pattern_in(key, state_dict[key]).numpy(), key)
            own = module.handles[name].layout
            if layout.shape != own.shape:
                raise ValueError(f"{key} takes {own.shape} blocks, got {layout.shape}")
            if layout != own:
                if module._parameters.get(name) is None:
                    takes = f"{key} takes the layout that {prefix or 'the model'} has"
                    raise ValueError(
                        f"{takes} as long as a hook or parametrization computes {name}: remove it"
                    )
                adopted.append((module, name, layout))
    for module, name, layout in adopted:
        weight = getattr(module, name)
        weight.data = weight.data.new_zeros((layout.n_blocks, *weight.shape[1:]))
        weight.grad = None
        module.handles[name] = Handle(layout)


def pattern_in(key: str, pattern: Any) -> torch.Tensor:
    """A pattern of a state dict, on the CPU; what is no array is refused by its key."""
    check_kind(key, pattern, torch.Tensor | np.ndarray | list | tuple, "a pattern")
    found = torch.as_tensor(pattern).cpu()
    return found if found.dtype == torch.bool else found.float()  # as where all was made bfloat16


def check_module(model: Any) -> None:
    check_kind("model", model, torch.nn.Module, "a torch.nn.Module")


def is_sharded(weight: torch.Tensor) -> bool:
    """Whether `fully_shard` dealt a parameter out."""
    return type(weight.data).__name__ == "DTensor"


def beside_sharded(weight: torch.Tensor) -> AbstractContextManager[Any]:
    """Within it a parameter that is sharded takes whole tensors beside it."""
    if not is_sharded(weight):
        return nullcontext()
    return import_module("torch.distributed.tensor.experimental").implicit_replication()


def draw_(
    weight: torch.Tensor, bias: torch.Tensor | None, layout: Layout, features: tuple[int, int]
) -> None:
    """Draw as torch's layers do, uniformly within 1 / sqrt(fan-in), which counts only kept blocks.

    `features` are those that come in, through each tap, and those that go out.
    """
    size, columns = weight.shape[1], torch.from_numpy(layout.index.block_columns.copy()).long()
    fan_in = column_fan_in(layout, size, features[0])
    bound = torch.from_numpy(1 / np.sqrt(np.maximum(fan_in, 1))).to(weight)
    with torch.no_grad(), beside_sharded(weight):
        weight.uniform_(-1, 1).mul_(bound[columns.to(weight.device), None, None])
        if bias is not None:
            bias.uniform_(-1, 1).mul_(bound.repeat_interleave(size)[: features[1]])
