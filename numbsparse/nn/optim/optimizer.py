"""What all optimizers share: parameters in groups, the state kept for each, its checkpoints."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from numbsparse import edits, ops
from numbsparse.autograd import Tensor
from numbsparse.device import DeviceArray, forget_captures, live, moved, on, outside_capture
from numbsparse.dtypes import check_kind
from numbsparse.nn import kept
from numbsparse.nn.optim.groups import Groups, Setting
from numbsparse.patterns.checks import integer, number


class Optimizer:
    """The base of all optimizers: parameters, their settings, and arrays kept for each.

    `parameters` are Tensors, or groups of them with settings of their own, dicts such as
    {"params": tensors, "lr": 1e-4}; what a group does not say is as the other arguments say.
    `param_groups` are these dicts with all their settings, which may be changed between steps. A
    setting that is the same in all groups is an attribute too: set `lr` before a step to follow a
    schedule, or see `LambdaLR`.

    >>> from numbsparse import nn
    >>> model = nn.Sequential(nn.Linear(8, 8, block_size=4), nn.Linear(8, 8, block_size=4))
    >>> groups = [
    ...     {"params": model[0].parameters(), "lr": 1e-4},
    ...     {"params": model[1].parameters(), "weight_decay": 0.1},
    ... ]
    >>> optimizer = nn.optim.Adam(groups, lr=1e-3)
    >>> [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    [(0.0001, 0.0), (0.001, 0.1)]

    A parameter of float16 or bfloat16 (on a GPU) gets a float32 master here, which is what steps
    are added to; the parameter is the rounded master, and all other state is float32.
    Weights that are set or loaded between steps are followed. See `LossScaler` for float16.

    What is kept belongs to the layout of a block-sparse parameter. After `p.data = w` with another
    layout a step raises ValueError, until `remap` is called:

    >>> import numpy as np, numbsparse as ns
    >>> p = ns.nn.Parameter(ns.BlockSparse(np.ones((1, 4, 4)), [[1, 0]]))
    >>> optimizer = ns.nn.optim.SGD([p], lr=0.5, momentum=0.5)
    >>> (p @ np.ones(8)).sum().backward()
    >>> optimizer.step()
    >>> p.data = ns.BlockSparse(np.ones((2, 4, 4)), [[1, 1]])
    >>> optimizer.remap()
    >>> [float(block.max()) for block in optimizer.state_dict()["0.velocity"].data]
    [1.0, 0.0]
    """

    slots: tuple[str, ...] = ()  # names of the arrays kept for each parameter
    n_numbers = n_settings = 0  # how many `guarded_numbers` and `_settings` give
    chosen_by: tuple[str, ...] | None = None
    """Settings, beside its arrays and numbers, that `_update` follows; None: any may be."""
    lr = Setting()

    def __init__(self, parameters: Iterable[Tensor] | Iterable[dict[str, Any]], **settings: Any):
        self._groups = Groups(self.check_settings, settings)
        self._groups.add_all(parameters)
        self.steps = 0
        self._counts: list[int] = []  # steps of each, those called off counted
        # Steps that a LossScaler called off: in all, then of each parameter.
        self._skipped: Any = np.zeros(1, np.int64)
        self._state: dict[int, dict[str, Any]] = {}
        self._forms: dict[int, kept.Form] = {}  # what the state of each belongs to
        self._seen: dict[int, tuple[Any, ...]] = {}  # state and look of each as it last fitted
        self._count_all()

    @property
    def parameters(self) -> list[Tensor]:
        """Those of all groups, in order: parameters[i] in errors and states is the i-th of them."""
        return self._groups.parameters

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """A dict for each group: its "params", its settings, and the "initial_lr" it began with."""
        return self._groups.groups

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Take another group, such as one that was frozen. Captured steps are captured again.

        Raises what the constructor raises; nothing is changed then.
        """
        self._groups.add(group)
        self._count_all()
        forget_captures()

    def _count_all(self) -> None:
        """Begin to count for parameters that are new."""
        new = len(self.parameters) - len(self._counts)
        self._counts += [0] * new
        self._skipped = np.append(kept.on_cpu(self._skipped), np.zeros(new, np.int64))

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays kept for each parameter of a group."""
        return self.slots

    @staticmethod
    def check_settings(lr: float) -> None:
        """Refuse what a group cannot have."""
        number("lr", lr)

    def step(self) -> None:
        """Update every parameter that has a gradient, in place.

        Raises TypeError or ValueError that names the parameter, and changes nothing, where a
        gradient does not fit its parameter, or the state is of another layout or dtype.
        """
        self.step_checked(self.checked())

    def checked(self) -> dict[int, dict[str, Any]]:
        """What is kept for each parameter with a gradient, by its number, when all of it fits."""
        self._groups.check()
        found = {}
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                look = self._look(i)
                slots, seen = self._state.get(i), self._seen.get(i)
                if slots is None or seen is None or seen[0] is not slots or seen[1] != look:
                    slots = self._checked(i)
                    self._seen[i] = slots, look
                found[i] = slots
        return found

    def _look(self, i: int) -> tuple[Any, ...]:
        """What `_checked` asks of a parameter, its gradient and its group."""
        parameter = self.parameters[i]
        grad: Any = parameter.grad.data if isinstance(parameter.grad, Tensor) else None
        of_grad = None if grad is None else kept.look_of(grad)
        names = self._slot_names(i, self._groups.of(i))
        return kept.look_of(parameter.data), of_grad, names

    def _checked(self, i: int) -> dict[str, Any]:
        """What is kept for a parameter, where it and the gradient fit."""
        name = f"parameters[{i}]"
        parameter: Any = self.parameters[i]
        check_gradient(name, parameter)
        slots = self._slots_of(i)
        with kept.naming(name):
            ops.check_step(parameter.values, parameter.grad.values, **slots)
        return slots

    def step_checked(self, found: dict[int, dict[str, Any]], verdict: Any = None) -> None:
        """`step` with what `checked` found, and the verdict of `ops.judge` on the gradients."""
        homes: dict[str, list[int]] = {}
        for i, slots in found.items():
            data = self.parameters[i].data
            self._state[i], self._forms[i] = slots, kept.form_of(data)
            homes.setdefault(data.device, []).append(i)
        if not found:
            self.steps += 1
        for nth, (device, members) in enumerate(homes.items()):
            with on(device):
                numbers = self._numbers_of(members, device, verdict, counts=nth == 0)
                self._update_all(members, device, numbers)
            by = f"{type(self).__name__}.step"
            for i in members:
                edits.note(self.parameters[i].values, by)

    def _update_all(self, members: list[int], device: str, numbers: Any) -> None:
        """The step of each of these parameters, which live in one place, by its row of numbers.

        On a GPU its launches are started again where all is in the memory that it was in before.
        """
        groups = [self._groups.of(i) for i in members]
        parameters: list[Any] = [self.parameters[i] for i in members]
        pairs = [(parameter.values, parameter.grad.values) for parameter in parameters]
        slots = [self._state[i] for i in members]

        def work() -> None:
            for row, of in enumerate(zip(groups, pairs, slots, strict=True)):
                group, (p, g), own = of
                self._update(group, p, g, own, numbers[row])

        if device == "cpu" or self.chosen_by is None:
            work()
            return
        known = _replays.setdefault(self, {})
        if len(known) >= REMEMBERED:  # gradients came from ever new memory
            known.clear()
        what = tuple([tuple([group[name] for name in self.chosen_by]) for group in groups])
        arrays = (numbers, *chain(*pairs), *chain(*(own.values() for own in slots)))
        ops.replayed_in(known, what, arrays, work)

    def _numbers_of(self, members: list[int], device: str, verdict: Any, counts: bool) -> Any:
        """A row of numbers for each of these parameters, which live in one place.

        On the GPU they are worked out for each replay of a captured step, which so counts again.
        """

        def settings() -> np.ndarray:
            self.steps += counts
            for i in members:
                self._counts[i] += 1
            rows = ((i, self._groups.of(i)) for i in members)
            return np.array([[*self._settings(group, self._counts[i]), 1 + i] for i, group in rows])

        numbers_of, on_gpu = type(self).guarded_numbers, device != "cpu"

        def plain() -> Any:
            return numbers_of(settings(), np.array(ops.TAKEN), self._skipped)

        if verdict is None and on_gpu and isinstance(self._skipped, DeviceArray):
            verdict = live(lambda: np.ones(2), 2, np.float32)  # that knows how many were skipped
        if verdict is None:
            self._skips_in("cpu")
            numbers = live(plain, len(members) * self.n_numbers, np.float32) if on_gpu else plain()
        else:
            size = len(members) * (1 + self.n_settings)
            given = live(settings, size, np.float64) if on_gpu else settings()
            numbers = numbers_of(given, verdict, self._skips_in(device))
        return numbers.reshape(len(members), self.n_numbers)

    def _skips_in(self, device: str) -> Any:
        """The counts of skipped steps, in that place."""
        self._skipped = kept.in_place_of(self._skipped, device)
        return self._skipped

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def remap(self) -> None:
        """Follow parameters whose layout was changed by `p.data = w`: call it before a step.

        State of blocks that both layouts have is carried over; for new blocks it begins with zeros,
        while Adam's count of the parameter's steps continues. Raises ValueError for another block
        size, and changes nothing then. Captured steps are captured again.
        """
        moved = {}
        for i, slots in self._state.items():
            data = self.parameters[i].data
            new, old = kept.form_of(data), self._forms[i]
            if slots and new != old:
                kept.check_can_remap(f"parameters[{i}]", old, new)
                moved[i] = {n: kept.remapped(array, old, new) for n, array in slots.items()}
        self._state = self._state | moved
        self._forms = self._forms | {i: kept.form_of(self.parameters[i].data) for i in moved}
        forget_captures()

    def _settings(self, group: Mapping[str, Any], step: int) -> list[float]:
        """What `guarded_numbers` works out of what a parameter's step of this number needs."""
        raise NotImplementedError

    guarded_numbers: Callable[..., Any]

    def _update(
        self, group: Mapping[str, Any], p: Any, g: Any, slots: dict[str, Any], numbers: Any
    ) -> None:
        raise NotImplementedError

    def _slots_of(self, i: int) -> dict[str, Any]:
        """What is kept for a parameter, where it is; zeros at first. Nothing is changed."""
        data, values = self.parameters[i].data, self.parameters[i].values
        names, slots = self._slot_names(i, self._groups.of(i)), self._state.get(i)
        with outside_capture():
            if slots is None:
                return {name: kept.like(values) for name in names}
            self._check_state(i, data, slots)
            return {name: moved(array, values.device) for name, array in slots.items()}

    def _check_state(self, i: int, data: Any, slots: dict[str, Any]) -> None:
        """Refuse state of another layout, or for another dtype."""
        if slots:
            beside, so = "what is kept for it", ": call remap() to carry the state over, or make a "
            so += "new optimizer"
            kept.check_form(f"parameters[{i}]", kept.form_of(data), self._forms[i], beside, so)
        names = self._slot_names(i, self._groups.of(i))
        dtype = ops.state_dtype(data.dtype)
        if set(slots) != set(names) or any(a.dtype != dtype for a in slots.values()):
            has = {name: str(a.dtype) for name, a in slots.items()}
            raise ValueError(
                f"parameters[{i}] is {data.dtype} now, for which {list(names)} of {dtype} are "
                f"kept, and there is {has}: make a new optimizer"
            )

    def _slot_names(self, i: int, group: Mapping[str, Any]) -> tuple[str, ...]:
        """What is kept for a parameter in a group of these settings."""
        names = self.slots_of(group)
        return (*names, "master") if self.parameters[i].dtype.itemsize == 2 else names

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to resume, on the CPU, in memory of its own.

        The steps done and skipped; "param_groups", a dict for each group with its settings, its
        "initial_lr" and, as "params", how many it has; and by the number of each parameter the
        steps that it took, "0.steps", and what is kept for it, "0.m": as a BlockSparse for a
        BlockSparse.
        """
        skipped = kept.on_cpu(self._skipped).tolist()
        state: dict[str, Any] = {"steps": self.steps, "skipped": skipped[0]}
        state |= self._groups.state_dict()
        for i, slots in self._state.items():
            state[f"{i}.steps"] = self._counts[i] - skipped[1 + i]
            for name, array in slots.items():
                state[f"{i}.{name}"] = kept.saved(array, self._forms[i])
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave: all settings become those that it was made with.

        To go on with others, such as another learning rate, set them after it. Raises TypeError or
        ValueError where the state is of another optimizer or another layout; nothing is changed
        then.
        """
        steps, skipped = checked_header(state)
        settings = self._groups.checked_state(state)
        numbers = enumerate(self._groups.members)
        names = [(*self._slot_names(i, settings[nth]), "steps") for i, nth in numbers]
        found = self._loaded(state, names)
        for i, own in found.items():
            for name in names[i]:
                if name not in own:
                    raise ValueError(f"state lacks {f'{i}.{name}'!r}")
        counts = {i: own.pop("steps") for i, own in found.items()}
        self.steps = steps
        self._groups.take(settings)
        self._skipped = np.zeros_like(self._skips_in("cpu"))
        self._skipped[0] = skipped
        self._counts = [counts.get(i, 0) for i in range(len(self.parameters))]
        self._state = dict(sorted(found.items()))
        self._forms = {i: kept.form_of(self.parameters[i].data) for i in self._state}
        forget_captures()

    def _loaded(
        self, state: Mapping[str, Any], names: list[tuple[str, ...]]
    ) -> dict[int, dict[str, Any]]:
        """The steps that each parameter took, and its arrays."""
        found: dict[int, dict[str, Any]] = {}
        for key, value in state.items():
            if key in _HEADER:
                continue
            first, _, name = str(key).partition(".")
            i = int(first) if first.isdecimal() else len(self.parameters)
            data = self.parameters[i].data if i < len(self.parameters) else None
            if data is None or name not in names[i]:
                raise ValueError(f"state is of another optimizer: it has {key!r}")
            argument = f"state[{key!r}]"
            found.setdefault(i, {})[name] = (
                integer(argument, value, least=0, most=inf)
                if name == "steps"
                else kept.loaded(argument, value, data)
            )
        return found


REMEMBERED = 16  # steps on a GPU, of one optimizer

_replays: WeakKeyDictionary[Optimizer, dict[Any, Any]] = WeakKeyDictionary()

_HEADER = ("steps", "skipped", "param_groups")


def checked_header(state: Mapping[str, Any]) -> tuple[int, int]:
    """Steps, steps skipped."""
    kept.check_state(state)
    for key in _HEADER:
        if key not in state:
            raise ValueError(f"state lacks {key!r}")
    steps = integer("state['steps']", state["steps"], least=0, most=inf)
    return steps, integer("state['skipped']", state["skipped"], least=0, most=steps)


def check_gradient(name: str, parameter: Tensor) -> None:
    """Refuse a gradient that is stored in another way than its parameter."""
    grad: Any = parameter.grad
    check_kind(f"{name}.grad", grad, Tensor, "a Tensor")
    own, got = kept.form_of(parameter.data), kept.form_of(grad.data)
    kept.check_form(f"{name}.grad", got, own, "its parameter", ": run backward again")
    if grad.device != parameter.device:
        takes = f"the device of its parameter, {parameter.device}"
        raise ValueError(f"{name}.grad takes {takes}, got {grad.device}")
