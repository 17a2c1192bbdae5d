"""Optimizers whose state is divided among the ranks; checkpoints that one rank writes for all."""

from collections import ChainMap
from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np

from numbsparse import nn
from numbsparse.autograd import Tensor
from numbsparse.distributed.group import Group
from numbsparse.dtypes import check_kind
from numbsparse.nn import kept
from numbsparse.nn.optim.optimizer import Optimizer, check_gradient, checked_header

GRAIN = 64  # values that a rank's part is a multiple of, so that it is aligned
LEAST = 4096  # values of a parameter that is divided; smaller ones are updated by all ranks


class ShardedOptimizer(Optimizer):
    """An optimizer that keeps, and updates, a part of each parameter on each rank (ZeRO-1).

    Moments and float32 masters take 1/size of the memory, and of the time, on each rank; then each
    sends its part of the parameters to the others. The gradients are those of the whole batch, as
    `DataParallel` gives them; clipping and `LossScaler` see them whole.

    `state_dict` is that of the optimizer it was made of, whole, on every rank: all make it
    together, one saves it, and it resumes on any number of ranks, or without this.

    Parameters
    ----------
    optimizer : Optimizer
        Of parameters that all ranks have alike; its groups and settings are shared. It is not used
        any more itself.
    group : Group

    Raises what the optimizer does, and ValueError in a step where a layout has changed.

    Examples
    --------
    >>> import numbsparse as ns
    >>> import numbsparse.distributed as dist
    >>> with dist.init() as group:
    ...     model = ns.nn.Linear(64, 64, block_size=4, seed=0)
    ...     adam = ns.nn.optim.Adam(model.parameters(), lr=1e-3)
    ...     optimizer = dist.ShardedOptimizer(adam, group)

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
    2020, stage 1.
    """

    def __init__(self, optimizer: Optimizer, group: Group):
        check_kind("optimizer", optimizer, Optimizer, "a numbsparse Optimizer")
        check_kind("group", group, Group, "a numbsparse Group")
        self.group, self._groups = group, optimizer._groups  # settings are set there
        self._cuts = [_Cut(parameter, group) for parameter in self.parameters]
        self._inner = self._of_parts(optimizer)
        if optimizer._state:
            self.load_state_dict(optimizer.state_dict())

    def _of_parts(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer of the parts, whose groups have the settings of the shared ones."""
        cuts = iter(self._cuts)
        params = [
            [part for _ in group["params"] for part in next(cuts).parts]
            for group in self.param_groups
        ]
        settings = [
            {key: value for key, value in group.items() if key != "initial_lr"}
            for group in self.param_groups
        ]
        inner = copy(optimizer)
        groups = [own | {"params": found} for own, found in zip(settings, params, strict=True)]
        Optimizer.__init__(inner, groups, **optimizer._groups._defaults)
        linked: Any = [
            ChainMap({"params": own["params"]}, group)
            for own, group in zip(inner.param_groups, self.param_groups, strict=True)
        ]
        inner._groups.groups[:] = linked
        return inner

    def add_param_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError("a ShardedOptimizer takes no further groups: make a new one")

    def remap(self) -> None:
        raise NotImplementedError("a ShardedOptimizer takes no other layouts: make a new one")

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self._inner.steps

    def checked(self) -> dict[int, dict[str, Any]]:
        for i, cut in enumerate(self._cuts):
            values, grad = cut.parameter.values, cut.parameter.grad
            if kept.form_of(cut.parameter.data) != cut.form:
                raise ValueError(f"parameters[{i}] has another layout now: make a new optimizer")
            if grad is not None:
                check_gradient(f"parameters[{i}]", cut.parameter)
            for j, part in enumerate(cut.parts):
                if values is not cut.seen:
                    part.data = cut.of(values)[j]
                part.grad = None if grad is None else Tensor(cut.of(grad.values)[j])
            cut.seen = values
        return self._inner.checked()

    def step_checked(self, found: dict[int, dict[str, Any]], verdict: Any = None) -> None:
        self._inner.step_checked(found, verdict)
        with self.group.together():
            for cut in self._cuts:
                if cut.parameter.grad is not None and cut.divided:
                    values = cut.parameter.values
                    out = values.reshape(-1)[: cut.divided]
                    self.group.all_gather(cut.of(values)[0], out=out)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer without ranks, on all of them: they call it together."""
        inner = self._inner.state_dict()
        state = {key: inner[key] for key in ("steps", "skipped")} | self._groups.state_dict()
        first = 0
        for i, cut in enumerate(self._cuts):
            for name in _names_of(first, inner):
                parts = [inner[f"{first + j}.{name}"] for j in range(len(cut.parts))]
                state[f"{i}.{name}"] = parts[0] if name == "steps" else cut.whole(parts, self.group)
            first += len(cut.parts)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave, or that of the optimizer without ranks."""
        checked_header(state)
        numbers = set(map(str, range(len(self._cuts))))
        if others := [
            key for key in map(str, state) if "." in key and key.split(".")[0] not in numbers
        ]:
            raise ValueError(f"state is of another optimizer: it has {others[0]!r}")
        settings = self._groups.checked_state(state)
        sizes = [len(group["params"]) for group in self._inner.param_groups]
        groups = [own | {"params": size} for own, size in zip(settings, sizes, strict=True)]
        inner: dict[str, Any] = {key: value for key, value in state.items() if "." not in str(key)}
        inner["param_groups"] = groups
        first = 0
        for i, cut in enumerate(self._cuts):
            for name in _names_of(i, state):
                key, data = f"{i}.{name}", cut.parameter.data
                values = [state[key]] * len(cut.parts)
                if name != "steps":
                    whole = kept.loaded(f"state[{key!r}]", values[0], data)
                    values = cut.of(kept.on_cpu(whole))
                inner |= {f"{first + j}.{name}": value for j, value in enumerate(values)}
            first += len(cut.parts)
        self._inner.load_state_dict(inner)
        for group, own in zip(self._inner.param_groups, settings, strict=True):
            for name in own:  # of the parts' own: the shared ones count
                group.pop(name)
        self._groups.take(settings)


class _Cut:
    """A parameter, and what this rank updates of it: its own part, and what is left over.

    `divided` are the values of all ranks' own parts; what is left over all ranks update.
    """

    def __init__(self, parameter: Tensor, group: Group):
        self.parameter, self.form = parameter, kept.form_of(parameter.data)
        self.seen, size = parameter.values, parameter.values.size
        each = size // group.size // GRAIN * GRAIN if size >= LEAST and group.size > 1 else 0
        self.divided = each * group.size
        own = slice(group.rank * each, (group.rank + 1) * each)
        pieces = [own] * (each > 0) + [slice(self.divided, size)] * (self.divided < size)
        self._pieces = pieces or [own]
        self.parts = [Tensor(part, requires_grad=True) for part in self.of(self.seen)]

    def of(self, values: Any) -> list[Any]:
        flat = values.reshape(-1)
        return [flat[piece] for piece in self._pieces]

    def whole(self, parts: list[Any], group: Group) -> Any:
        if self.divided:
            parts[0] = group.all_gather(parts[0])
        whole = np.concatenate(parts).reshape(self.form.shape)
        return whole if self.form.layout is None else self.form.matrix(whole)


def _names_of(i: int, state: Mapping[str, Any]) -> list[str]:
    """What is kept of parameter i."""
    return [key.partition(".")[2] for key in state if key.startswith(f"{i}.")]


def save(path: Any, state: Any, group: Group) -> None:
    """`numbsparse.save` by rank 0, while the others wait: the file is there when it returns.

    All ranks call it. `state` is what rank 0 has; `state_dict` of a `ShardedOptimizer` in it was
    made by all. Every rank resumes by `numbsparse.load(path)`.

    Raises what `numbsparse.save` raises, on the other ranks RuntimeError that says the same.

    >>> import os, tempfile
    >>> import numbsparse.distributed as dist
    >>> path = os.path.join(tempfile.mkdtemp(), "checkpoint.npz")
    >>> with dist.init() as group:
    ...     dist.save(path, {"step": 3}, group)
    """
    check_kind("group", group, Group, "a numbsparse Group")
    failed: BaseException | None = None
    if group.rank == 0:
        try:
            nn.save(path, state)
        except Exception as error:
            failed = error
    said = group.share(None if failed is None else f"{type(failed).__name__}: {failed}")[0]
    if failed is not None:
        raise failed
    if said is not None:
        raise RuntimeError(f"rank 0 did not save {path}: {said}")
