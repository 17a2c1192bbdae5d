"""Module: something with parameters. Parameter: a tensor that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_data
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, forget_captures, to_device
from numbsparse.dtypes import type_name
from numbsparse.nn.held import held
from numbsparse.nn.init import fan_in
from numbsparse.patterns.checks import BOOL, INTEGER, REAL


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
        """The values. Others of the same shape may take their place: a BlockSparse for another.

        Captured steps are then captured anew. Raises ValueError for another shape, TypeError for
        numbers without gradients, and for an array in the place of a BlockSparse.
        """
        return _data.fget(self)

    @data.setter
    def data(self, data: Any) -> None:
        data, own = as_data(data), self._data
        if isinstance(data, BlockSparse) != isinstance(own, BlockSparse):
            takes = "a BlockSparse" if isinstance(own, BlockSparse) else "an array"
            raise TypeError(f"data takes {takes} here, got {type_name(data)}")
        if data.shape != own.shape:
            raise ValueError(f"data takes the shape {own.shape} here, got {data.shape}")
        self._set_data(data)


_data: Any = Tensor.__dict__["data"]


class Module:
    """The base of all layers and models: give it parameters and modules as attributes.

    Subclasses write `forward`; a call runs it. Parameters and Modules are found by name, whenever
    they are asked for, as attributes and in lists, tuples and dicts: "head.weight",
    "blocks.0.weight". In a set, which has no order, they raise TypeError. Attributes named in
    `saved` (numbers) go into the state dict too. Parameters of 16-bit floats are made, moved and
    saved anywhere, and computed with on a GPU: on the CPU a call raises TypeError that names one.

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
    tap_features: int | None = None  # of a convolution, the rows of its weight that a tap has

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
        return held(vars(self), (Module,))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all within it, with their names up to the last dot."""
        return _modules(prefix, self, ())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, with its name."""
        return ((name, parameter) for _, name, parameter in self._found())

    def _found(self) -> Iterator[tuple[Module, str, Parameter]]:
        """Every parameter once, with the module that it is directly in, and its name."""
        seen: set[int] = set()
        names: set[str] = set()
        for prefix, module in self.named_modules():
            for name, parameter in held(vars(module), (Parameter,)):
                if id(parameter) in seen:
                    continue
                if prefix + name in names:
                    raise ValueError(f"two parameters of this module are named {prefix + name!r}")
                seen.add(id(parameter))
                names.add(prefix + name)
                yield module, prefix + name, parameter

    def parameters(self) -> list[Parameter]:
        """Every parameter once."""
        return [parameter for _, parameter in self.named_parameters()]

    def n_parameters(self) -> int:
        """How many numbers are trained: of block-sparse weights those in kept blocks.

        What blocks hold beyond the edge of the features, or of a gate's units, does not count.
        """
        return sum(
            module._trained(parameter)
            for module, _, parameter in self._found()
            if parameter.requires_grad
        )

    def _trained(self, parameter: Parameter) -> int:
        """How many numbers of a parameter that is directly in this module are."""
        if isinstance(parameter.data, BlockSparse):
            return int(fan_in(parameter.data, self.tap_features).sum())
        return parameter.size

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

        Raises ValueError or TypeError that names what is missing, left over, or of another shape,
        dtype or layout, and a saved number of another kind.
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
        for name, (module, attribute) in numbers.items():
            module.check_saved(attribute, state[name], f"state[{name!r}]")
        own = {name: _moved(state[name].copy(), p.place) for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = own[name]
            parameter.grad = None
        for name, (module, attribute) in numbers.items():
            kind = float if isinstance(getattr(module, attribute), float) else lambda value: value
            setattr(module, attribute, kind(state[name]))
        forget_captures()

    def check_saved(self, name: str, value: Any, argument: str) -> None:
        """Refuse what cannot be the attribute `name`, one of `saved`: a value of another kind.

        A layer whose numbers have bounds overrides it. Errors call the value by `argument`.
        """
        own = getattr(self, name)
        kinds = next((k for k in (INTEGER, REAL) if isinstance(own, k)), type(own))
        if not isinstance(value, kinds) or isinstance(value, BOOL) != isinstance(own, BOOL):
            raise TypeError(f"{argument} takes a {type(own).__name__}, got {value!r}")

    def __repr__(self) -> str:
        lines = [f"{name}: {child!r}" for name, child in self.named_children()]
        body = "".join("\n  " + line.replace("\n", "\n  ") for line in lines)
        return f"{type(self).__name__}({self.describe()}{body + chr(10) if body else ''})"

    def describe(self) -> str:
        """What stands in the parentheses of the repr."""
        return ""


def _modules(
    prefix: str, module: Module, above: tuple[Module, ...]
) -> Iterator[tuple[str, Module]]:
    if any(module is one for one in above):  # a module that knows its parent
        return
    yield prefix, module
    for name, child in module.named_children():
        yield from _modules(f"{prefix}{name}.", child, (*above, module))


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
