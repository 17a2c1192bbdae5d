"""Optimizers whose state is divided among the ranks; checkpoints that one rank writes for all."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np

from numbsparse import nn
from numbsparse.autograd import Tensor
from numbsparse.distributed.group import Group
from numbsparse.nn import kept
from numbsparse.nn.optim.optimizer import Optimizer, check_gradient

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
        self.group, self._groups = group, optimizer._groups  # settings are set there
        self._seen = [parameter.values for parameter in self.parameters]
        self._kept_as = [kept.form_of(parameter.data) for parameter in self.parameters]
        self._each = [self._each_of(values.size) for values in self._seen]
        self._pieces = [
            self._pieces_of(*sizes)
            for sizes in zip(self._each, (v.size for v in self._seen), strict=True)
        ]
        self._parts = [
            [Tensor(_flat(values)[piece], requires_grad=True) for piece in pieces]
            for values, pieces in zip(self._seen, self._pieces, strict=True)
        ]
        self._inner = self._of_parts(optimizer)
        if optimizer._state:
            self.load_state_dict(optimizer.state_dict())

    def _each_of(self, size: int) -> int:
        """How many of so many values each rank updates by itself."""
        ranks = self.group.size
        return size // ranks // GRAIN * GRAIN if size >= LEAST and ranks > 1 else 0

    def _pieces_of(self, each: int, size: int) -> list[slice]:
        """What this rank updates: its own part, and what is left over, as all others do."""
        rank, rest = self.group.rank, slice(each * self.group.size, size)
        own = [slice(rank * each, (rank + 1) * each)] if each else []
        return own if own and rest.start == size else [*own, rest]

    def _of_parts(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer of the parts, whose groups have the settings of the shared ones."""
        parts = iter(self._parts)
        params = [
            [part for _ in group["params"] for part in next(parts)] for group in self.param_groups
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
        inner._groups.members[:] = [(nth, linked[nth]) for nth, _ in inner._groups.members]
        return inner

    def add_param_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError("a ShardedOptimizer takes no further groups: make a new one")

    def remap(self) -> None:
        raise NotImplementedError("a ShardedOptimizer takes no other layouts: make a new one")

    @property
    def steps(self) -> int:  # type: ignore[override]
        return self._inner.steps

    def checked(self) -> dict[int, dict[str, Any]]:
        for i, parameter in enumerate(self.parameters):
            if kept.form_of(parameter.data) != self._kept_as[i]:
                raise ValueError(f"parameters[{i}] has another layout now: make a new optimizer")
            if parameter.grad is not None:
                check_gradient(f"parameters[{i}]", parameter)
            values = parameter.values
            for piece, part in zip(self._pieces[i], self._parts[i], strict=True):
                if values is not self._seen[i]:
                    part.data = _flat(values)[piece]
                grad = parameter.grad
                part.grad = None if grad is None else Tensor(_flat(grad.values)[piece])
            self._seen[i] = values
        return self._inner.checked()

    def step_checked(self, found: dict[int, dict[str, Any]], verdict: Any = None) -> None:
        self._inner.step_checked(found, verdict)
        with self.group.together():
            for i, parameter in enumerate(self.parameters):
                if parameter.grad is not None and self._each[i]:
                    whole = _flat(parameter.values)
                    out = whole[: self._each[i] * self.group.size]
                    self.group.all_gather(whole[self._pieces[i][0]], out=out)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer without ranks, on all of them: they call it together."""
        inner = self._inner.state_dict()
        state = {key: inner[key] for key in ("steps", "skipped")} | self._groups.state_dict()
        first = 0
        for i, pieces in enumerate(self._pieces):
            names = [key.partition(".")[2] for key in inner if key.startswith(f"{first}.")]
            for name in names:
                parts = [inner[f"{first + j}.{name}"] for j in range(len(pieces))]
                if name == "steps":
                    state[f"{i}.steps"] = parts[0]
                    continue
                if self._each[i]:
                    parts[0] = self.group.all_gather(parts[0])
                form = self._kept_as[i]
                whole = np.concatenate(parts).reshape(form.shape)
                state[f"{i}.{name}"] = whole if form.layout is None else form.matrix(whole)
            first += len(pieces)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave, or that of the optimizer without ranks."""
        inner: dict[str, Any] = {k: v for k, v in state.items() if "." not in k and k != "lr"}
        rates = self._groups.checked_rates(state)
        sizes = [len(group["params"]) for group in self._inner.param_groups]
        inner |= {"lr": rates[0]} if len(rates) == 1 else {"lr": rates, "groups": sizes}
        first = 0
        for i, (parameter, pieces) in enumerate(zip(self.parameters, self._pieces, strict=True)):
            for key in [key for key in state if key.startswith(f"{i}.")]:
                name, value = key.partition(".")[2], state[key]
                if name != "steps":
                    data = parameter.data
                    whole = kept.loaded(f"state[{key!r}]", value, data, kept.wide_dtype(data))
                    value = kept.on_cpu(whole).reshape(-1)
                for j, piece in enumerate(pieces):
                    inner[f"{first + j}.{name}"] = value if name == "steps" else value[piece]
            first += len(pieces)
        self._inner.load_state_dict(inner)
        for group in self._inner.param_groups:
            group.pop("lr", None)  # of the parts' own: the shared one counts
        self._groups.set_rates(rates)


def _flat(values: Any) -> Any:
    return values.reshape(-1)


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
