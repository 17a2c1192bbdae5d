"""Module: something with parameters. Parameter: a tensor that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, forget_captures, to_device
from numbsparse.nn.init import fan_in


class Parameter(Tensor):
    """A Tensor that requires a gradient and that its Module finds by itself.

    >>> import numpy as np, numbsparse as ns
    >>> class Scale(ns.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.factor = ns.nn.Parameter(np.ones(1))
    ...     def forward(self, x):
    ...         return x * self.factor
    >>> [name for name, _ in Scale().named_parameters()]
    ['factor']
    """

    __slots__ = ()

    def __init__(self, data: Any):
        super().__init__(data, requires_grad=True)

    @property
    def data(self) -> Any:
        """The values. Where others take their place, captured steps are captured anew."""
        return _data.__get__(self)

    @data.setter
    def data(self, data: Any) -> None:
        replaced = hasattr(self, "data")
        _data.__set__(self, data)
        if replaced:
            forget_captures()


_data: Any = Tensor.__dict__["data"]  # the slot beneath


class Module:
    """The base of all layers and models: give it parameters and modules as attributes.

    Subclasses write `forward`; a call runs it. Attributes that are Parameters or Modules, and lists
    of Modules, are found by name. Attributes named in `saved` (numbers) go into the state dict too.
    Parameters of 16-bit floats are made, moved and saved anywhere, and computed with on a GPU: on
    the CPU a call raises TypeError that names one.

    Examples
    --------
    >>> from numbsparse import nn
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.hidden = nn.Linear(64, 32, seed=0)
    ...     def forward(self, x):
    ...         return nn.functional.relu(self.hidden(x))
    >>> [name for name, _ in Model().named_parameters()]
    ['hidden.weight', 'hidden.bias']
    """

    saved: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.training = True

    def forward(self, *args: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def __call__(self, *args: Any) -> Any:
        try:
            return self.forward(*args)
        except ops.HalfOnCPU as error:
            # On its way out each module gives the parameter a longer name: the model's is seen.
            error.args = (self._half_on_cpu() or error.args[0],)
            raise

    def _half_on_cpu(self) -> str | None:
        """What to do about a parameter of 16-bit floats on the CPU; None if there is none."""
        for name, parameter in self.named_parameters():
            if parameter.place == "cpu" and ops.is_half(parameter.dtype):
                return (
                    f"{name} is {parameter.dtype} on the CPU, where layers take float32 or "
                    f'float64: move the model to a GPU, .to("cuda"), or make it with '
                    f'dtype="float32"'
                )
        return None

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules directly in this one, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list | tuple):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all within it, with their names up to the last dot."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}{name}.")

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, with its name."""
        seen: set[int] = set()
        for prefix, module in self.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Parameter) and id(value) not in seen:
                    seen.add(id(value))
                    yield prefix + name, value

    def parameters(self) -> list[Parameter]:
        """Every parameter once."""
        return [parameter for _, parameter in self.named_parameters()]

    def n_parameters(self) -> int:
        """How many numbers are trained: of block-sparse weights those in kept blocks.

        What blocks hold beyond the edge of the features does not count.
        """
        return sum(
            int(fan_in(parameter.data).sum())
            if isinstance(parameter.data, BlockSparse)
            else parameter.size
            for parameter in self.parameters()
            if parameter.requires_grad
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def train(self, mode: bool = True) -> Module:
        """Set training mode, which turns dropout on, for all modules; returns this one."""
        for _, module in self.named_modules():
            if module.training != mode:
                module.training = mode
                forget_captures()
        return self

    def eval(self) -> Module:
        """Set evaluation mode for all modules; returns this one."""
        return self.train(False)

    def to(self, place: str) -> Module:
        """Move all parameters to "cpu" or "cuda"; gradients are forgotten. Returns this module."""
        if place not in ("cpu", "cuda"):
            raise ValueError(f'place takes "cpu" or "cuda", got {place!r}')
        for parameter in self.parameters():
            parameter.data = _moved(parameter.data, place)
            parameter.grad = None
        return self

    def state_dict(self) -> dict[str, Any]:
        """All parameters and saved numbers by name, on the CPU, in memory of their own."""
        state: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            host = _moved(parameter.data, "cpu")
            state[name] = host.copy() if host is parameter.data else host
        for prefix, module in self.named_modules():
            for name in module.saved:
                state[prefix + name] = getattr(module, name)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of `state_dict()`; where they do not fit, nothing is changed.

        Raises ValueError that names what is missing, left over, or of another shape, dtype or
        layout.
        """
        parameters = dict(self.named_parameters())
        numbers = {
            prefix + name: (module, name)
            for prefix, module in self.named_modules()
            for name in module.saved
        }
        missing = [name for name in (*parameters, *numbers) if name not in state]
        unknown = [name for name in state if name not in parameters and name not in numbers]
        if missing or unknown:
            raise ValueError(f"state is of another model: it lacks {missing}, and has {unknown}")
        for name, parameter in parameters.items():
            _check_fits(name, state[name], parameter)
        for name, parameter in parameters.items():
            own = state[name].copy()
            parameter.data = _moved(own, parameter.place)
            parameter.grad = None
        for name, (module, attribute) in numbers.items():
            setattr(module, attribute, state[name])

    def __repr__(self) -> str:
        lines = [f"{name}: {child!r}" for name, child in self.named_children()]
        body = "".join("\n  " + line.replace("\n", "\n  ") for line in lines)
        return f"{type(self).__name__}({self.describe()}{body + chr(10) if body else ''})"

    def describe(self) -> str:
        """What stands in the parentheses of the repr."""
        return ""


class Sequential(Module):
    """Modules one after the other: Sequential(a, b)(x) = b(a(x)).

    >>> import numpy as np, numbsparse as ns
    >>> model = ns.nn.Sequential(ns.nn.Linear(64, 32, seed=0), ns.nn.ReLU())
    >>> model(np.ones((2, 64), np.float32)).shape
    (2, 32)
    """

    def __init__(self, *modules: Module):
        super().__init__()
        for module in modules:
            if not isinstance(module, Module):
                raise TypeError(f"modules takes Modules, got {type(module).__name__}")
        self.modules = modules

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((str(i), module) for i, module in enumerate(self.modules))

    def forward(self, x: Any) -> Any:
        for module in self.modules:
            x = module(x)
        return x

    def __getitem__(self, i: int) -> Module:
        return self.modules[i]

    def __len__(self) -> int:
        return len(self.modules)


def _moved(data: Any, place: str) -> Any:
    if isinstance(data, BlockSparse):
        return data.to(place)
    if place == "cuda":
        return data if isinstance(data, DeviceArray) else to_device(data)
    return data.numpy() if isinstance(data, DeviceArray) else data


def _check_fits(name: str, value: Any, parameter: Parameter) -> None:
    own = parameter.data
    if isinstance(value, BlockSparse) != isinstance(own, BlockSparse):
        raise ValueError(f"state[{name!r}] takes a {type(own).__name__}, got {value!r}")
    if not isinstance(value, np.ndarray | BlockSparse):
        raise ValueError(f"state[{name!r}] takes an array, got {type(value).__name__}")
    if value.shape != own.shape or value.dtype != own.dtype:
        raise ValueError(
            f"state[{name!r}] takes {own.shape} of {own.dtype}, got {value.shape} of {value.dtype}"
        )
    if isinstance(value, BlockSparse) and (
        value.block_size != own.block_size or value.layout != own.layout
    ):
        raise ValueError(f"state[{name!r}] has another layout: {value!r} where {own!r} is expected")
