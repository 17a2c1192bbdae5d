"""Module: something with parameters. Parameter: a tensor that is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, as_data, as_tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, forget_captures, id_of, moved, switched
from numbsparse.dtypes import check_kind, type_name
from numbsparse.nn import kept
from numbsparse.nn.held import held, holds
from numbsparse.nn.init import fan_in
from numbsparse.ops.elementwise import gapless
from numbsparse.patterns.checks import BOOL, INTEGER, REAL, flag


class Parameter(Tensor):
    """A Tensor that requires a gradient and that its Module finds by itself.

    It shares memory with `data`, but for an array that is not C-contiguous, which is copied.
    `p -= x`, which would make another Tensor, raises TypeError: write p.data = (p - x).data.

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
        super().__init__(_in_order(as_data(data)), requires_grad=True)

    @property
    def data(self) -> np.ndarray | DeviceArray | BlockSparse:
        """The values. Others of the same shape may take their place: a BlockSparse for another.

        Captured steps are then captured again. Raises ValueError for another shape, TypeError for
        numbers without gradients, and for an array instead of a BlockSparse.
        """
        return _data.fget(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, data: Any) -> None:
        data, own = _in_order(as_data(data)), self._data
        if isinstance(data, BlockSparse) != isinstance(own, BlockSparse):
            takes = "a BlockSparse" if isinstance(own, BlockSparse) else "an array"
            raise TypeError(f"data takes {takes} here, got {type_name(data)}")
        if data.shape != own.shape:
            raise ValueError(f"data takes the shape {own.shape} here, got {data.shape}")
        self._set_data(data)

    def _refused(self, other: Any) -> Any:
        raise TypeError(
            "p -= x takes no Parameter, as it would make another Tensor, which is not trained: "
            "p.data = (p - x).data changes the Parameter, y = p - x leaves it as it is"
        )

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = __imatmul__ = _refused


def _in_order(data: Any) -> Any:
    """Data as optimizers write it, where it is: C-contiguous."""
    return data if isinstance(data, BlockSparse) else gapless(data)


_data: Any = Tensor.__dict__["data"]

if TYPE_CHECKING:
    P = ParamSpec("P")
    R = TypeVar("R", covariant=True)

    class MatrixParameter(Parameter):
        """One of a BlockSparse, as layers have it."""

        @property
        def data(self) -> BlockSparse: ...
        @data.setter
        def data(self, data: Any) -> None: ...

    class HasForward(Protocol[P, R]):
        def forward(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    class AsForward:
        """Of a module's call, which takes and gives what its `forward` does."""

        def __get__(self, module: HasForward[P, R], owner: Any) -> Callable[P, R]: ...
else:
    MatrixParameter = Parameter


class Module:
    """The base of all layers and models: give it parameters and modules as attributes.

    Subclasses write `forward`; a call runs it. Parameters and Modules are found by name, whenever
    they are asked for, as attributes of the object or its class, and in lists, tuples, dicts, their
    views, arrays of objects, dataclasses and namespaces: "head.weight", "blocks.0.weight". In a
    set, which has no order, they raise TypeError; what an iterator, a closure or an object of
    another class holds is not seen. Arrays that are not trained are buffers: see `register_buffer`.
    Attributes named in `saved` (numbers) go into the state dict too. Parameters of 16-bit floats
    are made, moved and saved anywhere, and computed with on a GPU: on the CPU a call raises
    TypeError that names one.

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
    training: bool = True
    tap_features: int | None = None  # of a convolution, the rows of its weight that a tap has
    _of_class: Mapping[str, Any] = {}  # what subclasses hold themselves, for all their objects

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if vars(cls).get("__slots__"):
            raise TypeError(f"{cls.__name__} takes no __slots__: parameters there are not found")
        own = {name: value for name, value in vars(cls).items() if holds(value, HELD)}
        cls._of_class = {**cls._of_class, **own}

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None and name in vars(self).get("_buffer_names", ()):
            value = as_tensor(value, name)  # an array was assigned
        trained = isinstance(value, Tensor) and value.requires_grad
        taken = value is None or trained or isinstance(value, Parameter | Module)
        if not taken and isinstance(vars(self).get(name, self._of_class.get(name)), Parameter):
            says = f"{name} takes a Parameter, got {type_name(value)}, which would not be trained"
            raise TypeError(f"{says}: give the one that is there other values, .{name}.data = ...")
        super().__setattr__(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    if TYPE_CHECKING:
        __call__ = AsForward()
    else:

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return self.forward(*args, **kwargs)
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

    def _held(self, kind: type) -> Iterator[tuple[str, Any]]:
        """Modules or Parameters directly in this module, with their names."""
        attributes = {**self._of_class, **vars(self)} if self._of_class else vars(self)
        return (pair for pair in held(attributes, HELD) if isinstance(pair[1], kind))

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The modules directly in this one, with their names."""
        return self._held(Module)

    def children(self) -> Iterator[Module]:
        """The modules directly in this one."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module, called `prefix`, and all within it, each once: "", "blocks", "blocks.0"."""
        seen: set[int] = set()
        for name, module in self._paths(f"{prefix}." if prefix else ""):
            if id(module) not in seen:
                seen.add(id(module))
                yield name[:-1], module

    def modules(self) -> Iterator[Module]:
        """This module and all within it, each once."""
        return (module for _, module in self.named_modules())

    def apply(self, function: Callable[[Module], Any]) -> Module:
        """Call `function` with every module within, then with this one; returns this one.

        >>> from numbsparse import nn
        >>> def no_bias(module):
        ...     if isinstance(module, nn.Linear):
        ...         module.bias.data[:] = 0
        >>> model = nn.Sequential(nn.Linear(8, 4, block_size=4, seed=0), nn.ReLU()).apply(no_bias)
        """
        check_kind("function", function, Callable, "what can be called")
        for module in self._inside_out(set()):
            function(module)
        return self

    def _inside_out(self, seen: set[int]) -> Iterator[Module]:
        if id(self) not in seen:
            seen.add(id(self))
            for child in self.children():
                yield from child._inside_out(seen)
            yield self

    def _paths(
        self, prefix: str = "", above: tuple[Module, ...] = ()
    ) -> Iterator[tuple[str, Module]]:
        """`named_modules`, under each name that a module has, up to the last dot: "blocks.0."."""
        if any(self is one for one in above):  # a module that knows its parent
            return
        yield prefix, self
        for name, child in self.named_children():
            yield from child._paths(f"{prefix}{name}.", (*above, self))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Every parameter once, with its name."""
        return ((name, parameter) for _, name, parameter in self._found())

    def _found(self) -> Iterator[tuple[Module, str, Parameter]]:
        """Every parameter once, with the module that it is directly in, and its name."""
        seen: set[int] = set()
        names: set[str] = set()
        for prefix, module in self._paths():
            for name, parameter in module._held(Parameter):
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

    def register_buffer(self, name: str, value: Any, persistent: bool = True) -> None:
        """Make an attribute of a Tensor that is not trained, but moved with the parameters.

        A `persistent` one is in the state dict too. Another Tensor or array of any shape may be
        assigned to the attribute later; None, at first too, is a buffer that is not there yet. In
        a step that `ns.graph` captures, write into its array: an assignment is not repeated.

        Raises TypeError or ValueError for a name that is not an identifier, or is taken.

        >>> import numpy as np
        >>> from numbsparse import nn
        >>> class Whiten(nn.Module):
        ...     def __init__(self, mean):
        ...         super().__init__()
        ...         self.register_buffer("mean", mean)
        ...     def forward(self, x):
        ...         return x - self.mean
        >>> layer = Whiten(np.array([1.0, 2.0]))
        >>> layer(np.array([3.0, 3.0])), layer.state_dict(), layer.parameters()
        (Tensor([2., 1.]), {'mean': array([1., 2.])}, [])
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise TypeError(f"name takes an identifier, got {name!r}")
        names = vars(self).setdefault("_buffer_names", {})
        if name not in names and hasattr(self, name):
            raise ValueError(f"name takes an attribute that is not taken, got {name!r}")
        value = None if value is None else as_tensor(value, "value")
        names[name] = flag("persistent", persistent)
        setattr(self, name, value)

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Every buffer once, with its name."""
        return ((name, buffer) for name, buffer, _ in self._buffers())

    def buffers(self) -> Iterator[Tensor]:
        """Every buffer once."""
        return (buffer for _, buffer in self.named_buffers())

    def _buffers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Every buffer once, with its name, and whether it is saved."""
        seen: set[int] = set()
        for prefix, module in self._paths():
            for name, persistent in vars(module).get("_buffer_names", {}).items():
                value = getattr(module, name, None)
                if not (value is None or isinstance(value, Parameter) or id(value) in seen):
                    seen.add(id(value))
                    yield prefix + name, value, persistent

    def requires_grad_(self, requires_grad: bool = True) -> Module:
        """Freeze all parameters, with False, or thaw them; returns this module."""
        wanted = flag("requires_grad", requires_grad)
        for parameter in self.parameters():
            parameter.requires_grad = wanted
        return self

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
        """Set training mode, which turns dropout on, for all modules; returns this one.

        Steps captured in the other mode are current again after the next `train` or `eval`.
        """
        if not isinstance(mode, BOOL):
            raise TypeError(f"mode takes a bool, got {mode!r}")
        others = [module for module in self.modules() if module.training != mode]
        for module in others:
            module.training = mode
        if others:
            names = frozenset(map(id, others))
            switched((names, mode), (names, not mode))
        return self

    def eval(self) -> Module:
        """Set evaluation mode for all modules; returns this one."""
        return self.train(False)

    def to(self, place: str) -> Module:
        """Move parameters and buffers to "cpu", "cuda" (the GPU in use) or "cuda:1"; returns this.

        Gradients are forgotten.
        """
        id_of(place)  # refused before anything moves
        for parameter in self.parameters():
            parameter.data = moved(parameter.data, place)
            parameter.grad = None
        for buffer in self.buffers():
            buffer.data = moved(buffer.data, place)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Parameters, buffers and saved numbers by name, on the CPU, in memory of their own."""
        tensors, numbers = self._saved()
        state = {name: kept.on_cpu(tensor.data) for name, tensor in tensors.items()}
        return state | {name: getattr(*place) for name, place in numbers.items()}

    def _saved(self) -> tuple[dict[str, Tensor], dict[str, tuple[Module, str]]]:
        """By the names that a state dict has: tensors; modules that have a number, and its name."""
        buffers = ((name, buffer) for name, buffer, persistent in self._buffers() if persistent)
        tensors: list[Any] = [*self.named_parameters(), *buffers]
        numbers = [(path + name, (at, name)) for path, at in self._paths() for name in at.saved]
        names = [name for name, _ in (*tensors, *numbers)]
        if len(set(names)) < len(names):
            twice = max(names, key=names.count)
            raise ValueError(f"two things that this module saves are named {twice!r}")
        return dict(tensors), dict(numbers)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of `state_dict()`; where they do not fit, nothing is changed.

        Raises ValueError or TypeError that names what is missing, left over, or of another shape,
        dtype or layout, and a saved number of another kind.
        """
        kept.check_state(state)
        tensors, numbers = self._saved()
        missing = [name for name in (*tensors, *numbers) if name not in state]
        unknown = [name for name in state if name not in tensors and name not in numbers]
        if missing or unknown:
            raise ValueError(f"state is of another model: it lacks {missing}, and has {unknown}")
        own = {n: _loaded(f"state[{n!r}]", state[n], t) for n, t in tensors.items()}
        for name, (module, attribute) in numbers.items():
            module.check_saved(attribute, state[name], f"state[{name!r}]")
        for name, tensor in tensors.items():
            tensor.data = own[name]
            tensor.grad = None
        for name, (module, attribute) in numbers.items():
            kind, value = type(getattr(module, attribute)), state[name]
            setattr(module, attribute, kind(value) if issubclass(kind, int | float) else value)
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
        """What the parentheses of the repr contain."""
        return ""


HELD = (Module, Parameter)


def _loaded(argument: str, value: Any, tensor: Tensor) -> Any:
    """Data of a state dict as a Tensor holds it."""
    own: Any = tensor.data
    so = ": give it that first, p.data = p.data.remap(layout), or load what changed it before"
    values = kept.loaded(argument, value, own, own.dtype, so)
    return own.with_values(values) if isinstance(own, BlockSparse) else values
