"""Modules that hold others: in a row, in a list, by names."""

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

from numbsparse.autograd import Tensor
from numbsparse.dtypes import check_kind, type_name
from numbsparse.nn.module import Module
from numbsparse.patterns.checks import pair


class Sequential(Module):
    """Modules one after the other: Sequential(a, b)(x) = b(a(x)).

    One dict of modules gives them names, which are their attributes too. A slice is a Sequential.

    Raises TypeError for anything but Modules, ValueError for a name that is taken.

    >>> import numpy as np, numbsparse as ns
    >>> model = ns.nn.Sequential(ns.nn.Linear(64, 32, seed=0), ns.nn.ReLU())
    >>> model(np.ones((2, 64), np.float32)).shape
    (2, 32)
    >>> list(ns.nn.Sequential({"act": ns.nn.ReLU()}).append(ns.nn.Tanh()).named_children())
    [('act', ReLU()), ('1', Tanh())]
    """

    def __init__(self, *modules: Module | Mapping[str, Module]):
        super().__init__()
        first = modules[0] if len(modules) == 1 else None
        named = first if isinstance(first, Mapping) else {str(i): m for i, m in enumerate(modules)}
        for name, module in named.items():
            self._add(name, module)

    def _add(self, name: str, module: Any) -> None:
        if hasattr(self, _checked_name(name)):
            raise ValueError(f"modules takes names that are not taken, got {name!r}")
        setattr(self, name, _checked(module))

    def _names(self) -> list[str]:
        return [name for name, value in vars(self).items() if isinstance(value, Module)]

    def append(self, module: Module) -> "Sequential":
        """Add a module at the end, by the next number that is not a name yet; returns this one."""
        number = len(self)
        while hasattr(self, str(number)):
            number += 1
        self._add(str(number), module)
        return self

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Sequential({name: getattr(self, name) for name in self._names()[i]})
        return getattr(self, self._names()[i])

    def __setitem__(self, i: int, module: Module) -> None:
        setattr(self, self._names()[i], _checked(module))

    def __iter__(self) -> Iterator[Module]:
        return iter([value for value in vars(self).values() if isinstance(value, Module)])

    def __len__(self) -> int:
        return len(self._names())


class ModuleList(Module, MutableSequence[Module]):
    """A list of modules. A plain list, as an attribute of a Module, is found just as well.

    Raises TypeError for anything but Modules.

    >>> import numpy as np, numbsparse as ns
    >>> layers = ns.nn.ModuleList(ns.nn.Linear(8, 8, block_size=4, seed=i) for i in range(3))
    >>> layers.append(ns.nn.ReLU())
    >>> x = np.ones((2, 8), np.float32)
    >>> for layer in layers:
    ...     x = layer(x)
    >>> len(layers), len(layers[1:]), len(layers.parameters())
    (4, 3, 6)
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, modules: Iterable[Module] = ()):
        super().__init__()
        self._list = [_checked(module) for module in _each(modules)]

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((name.removeprefix("_list."), m) for name, m in super().named_children())

    def insert(self, index: int, module: Module) -> None:
        self._list.insert(index, _checked(module))

    def __getitem__(self, i: Any) -> Any:
        return ModuleList(self._list[i]) if isinstance(i, slice) else self._list[i]

    def __setitem__(self, i: Any, module: Any) -> None:
        self._list[i] = [_checked(m) for m in module] if isinstance(i, slice) else _checked(module)

    def __delitem__(self, i: Any) -> None:
        del self._list[i]

    def __len__(self) -> int:
        return len(self._list)


class ModuleDict(Module, MutableMapping[str, Module]):
    """Modules by name. A plain dict, as an attribute of a Module, is found just as well.

    Raises TypeError for names that are not strings, and for anything but Modules.

    >>> import numpy as np, numbsparse as ns
    >>> heads = ns.nn.ModuleDict({"mean": ns.nn.Linear(8, 4, block_size=4, bias=False, seed=0)})
    >>> heads["spread"] = ns.nn.Linear(8, 4, block_size=4, bias=False, seed=1)
    >>> heads["mean"](np.ones((2, 8), np.float32)).shape, list(heads.state_dict())
    ((2, 4), ['mean.weight', 'spread.weight'])
    """

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] = ()):
        super().__init__()
        self._dict: dict[str, Module] = {}
        for each in _each(modules.items() if isinstance(modules, Mapping) else modules):
            name, module = pair("modules", "a dict, or pairs of a name and a Module", each)
            self[name] = module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        return ((name.removeprefix("_dict."), m) for name, m in super().named_children())

    def __getitem__(self, name: str) -> Any:
        return self._dict[name]

    def __setitem__(self, name: str, module: Module) -> None:
        self._dict[_checked_name(name)] = _checked(module)

    def __delitem__(self, name: str) -> None:
        del self._dict[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict)

    def __len__(self) -> int:
        return len(self._dict)


def _each(modules: Any) -> Iterable[Any]:
    if isinstance(modules, Tensor) or not isinstance(modules, Iterable):
        raise TypeError(f"modules takes several Modules, got {type_name(modules)}")
    return modules


def _checked(module: Any) -> Module:
    check_kind("modules", module, Module, "Modules")
    return module  # type: ignore[no-any-return]


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"modules takes strings as names, got {name!r}")
    return name
