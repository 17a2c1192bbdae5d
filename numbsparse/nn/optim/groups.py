"""Groups of parameters, each with settings of its own, such as a learning rate."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from numbsparse.autograd import Tensor, listed, tensors_of
from numbsparse.dtypes import type_name
from numbsparse.nn.kept import check_keys, naming
from numbsparse.patterns.checks import number

OTHERS = ("params", "initial_lr", "name")  # keys of a group besides its settings


class Setting:
    """An optimizer's attribute: a setting that is the same in all of its groups.

    Raises ValueError, when it is read and when it is set, where the groups differ.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Any, kind: type | None = None) -> Any:
        if optimizer is None:
            return self
        values = [group[self.name] for group in optimizer.param_groups]
        if any(value != values[0] for value in values):
            one = f"param_groups[i][{self.name!r}]"
            raise ValueError(f"{self.name} differs from group to group, {values}: use {one}")
        return values[0]

    def __set__(self, optimizer: Any, value: Any) -> None:
        self.__get__(optimizer)
        for group in optimizer.param_groups:
            group[self.name] = value


class Groups:
    """The groups of an optimizer: `parameters` are those of all, `members` their groups' numbers.

    `check` refuses settings; `defaults` are for those that a group lacks.
    """

    def __init__(self, check: Callable[..., None], defaults: Mapping[str, Any]):
        self._check, self._defaults = check, dict(defaults)
        self.groups: list[dict[str, Any]] = []
        self.parameters: list[Tensor] = []
        self.members: list[int] = []

    def add_all(self, parameters: Any) -> None:
        """What an optimizer is made of: Tensors, or groups of them."""
        found = listed("parameters", parameters)
        if not any(isinstance(each, Mapping) for each in found):
            found = [{"params": found}]
        for i, group in enumerate(found):
            if not isinstance(group, Mapping):
                got = type(group).__name__
                raise TypeError(f"parameters[{i}] takes a group, as others are, got {got}")
            self.add(group)
        if not self.parameters:
            raise ValueError("parameters takes at least one tensor, got none")

    def add(self, group: Mapping[str, Any]) -> None:
        """Another group."""
        takes = ["params", *self._defaults, "name"]
        if not isinstance(group, Mapping):
            raise TypeError(f"a group takes a dict of {', '.join(takes)}, got {type_name(group)}")
        if "params" not in group or (unknown := [key for key in group if key not in takes]):
            got = f"got {unknown[0]!r}" if "params" in group else "which lacks 'params'"
            raise ValueError(f"a group takes {', '.join(takes)}, {got}")
        params = group["params"]
        params = tensors_of("parameters", [params] if isinstance(params, Tensor) else params)
        if any(parameter._edges for parameter in params):
            raise ValueError("parameters takes what gets gradients, got one that was computed")
        known = {id(parameter) for parameter in (*self.parameters, *params)}
        if len(known) < len(self.parameters) + len(params):
            raise ValueError("parameters takes each tensor once, got one more than once")
        own = {**self._defaults, **group, "params": tuple(params)}
        self._check_one(len(self.groups), own)
        own["initial_lr"] = own["lr"]
        self.parameters += params
        self.members += [len(self.groups)] * len(params)
        self.groups.append(own)

    def of(self, i: int) -> dict[str, Any]:
        """The group of a parameter, as it is now."""
        return self.groups[self.members[i]]

    def check(self) -> None:
        """Refuse settings that were changed to what they cannot be."""
        for i, group in enumerate(self.groups):
            self._check_one(i, group)

    def _check_one(self, i: int, group: Mapping[str, Any], argument: str = "") -> None:
        where = f"{argument or 'param_groups'}[{i}]"
        with naming(where) if i or argument else nullcontext():
            self._check(**{key: value for key, value in group.items() if key not in OTHERS})

    def state_dict(self) -> dict[str, Any]:
        """The settings of each group, and how many parameters it has."""
        sizes = zip(self.groups, self._sizes(), strict=True)
        return {"param_groups": [_settings_of(group) | {"params": n} for group, n in sizes]}

    def checked_state(self, state: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The settings of each group in what `state_dict` gave."""
        argument, given = "state['param_groups']", state["param_groups"]
        if not isinstance(given, list) or not all(isinstance(own, Mapping) for own in given):
            raise TypeError(f"{argument} takes a list of dicts, got {given!r}")
        sizes, own_sizes = [own.get("params") for own in given], self._sizes()
        if sizes != own_sizes:
            raise ValueError(
                f"{argument} is of other groups: it has {sizes} parameters, here are {own_sizes}"
            )
        settings = [{k: v for k, v in own.items() if k != "params"} for own in given]
        for i, (group, own) in enumerate(zip(self.groups, settings, strict=True)):
            check_keys(f"{argument}[{i}]", own, _settings_of(group))
            self._check_one(i, own, argument)
            number(f"{argument}[{i}]['initial_lr']", own["initial_lr"])
        return settings

    def take(self, settings: list[dict[str, Any]]) -> None:
        """What `checked_state` gave."""
        for group, own in zip(self.groups, settings, strict=True):
            group.update(own)

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.groups]


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has of a group besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "name")}
