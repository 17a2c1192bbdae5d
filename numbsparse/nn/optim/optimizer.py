"""Optimisers, clipping and learning-rate schedules. State lives where the parameters do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import cos, pi
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.device import DeviceArray, forget_captures, live, outside_capture, to_device
from numbsparse.nn.average import ExponentialMovingAverage
from numbsparse.nn.scaling import LossScaler

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ExponentialMovingAverage",
    "LossScaler",
    "Optimizer",
    "cosine",
    "warmup",
    "warmup_cosine",
]


class Optimizer:
    """The base of all optimisers: parameters, a learning rate, and arrays kept for each.

    Set `lr` before a step to follow a schedule.

    A parameter of float16 or bfloat16 (on a GPU) gets a float32 master here, which is what steps
    are added to; the parameter is the master rounded, and all that is kept beside it is float32.
    Weights that are set or loaded between steps are followed. See `LossScaler` for float16.
    """

    slots: tuple[str, ...] = ()  # names of the arrays kept for each parameter
    n_numbers = 0  # how many `_numbers` gives

    def __init__(self, parameters: Iterable[Tensor], lr: float):
        self.parameters = _checked_parameters(parameters)
        _check_from_zero(lr=lr)
        self.lr = lr
        self.steps = 0
        self._skipped: Any = np.zeros(1, np.int64)  # steps that a LossScaler called off
        self._state: dict[int, dict[str, Any]] = {}

    def step(self, verdict: Any = None) -> None:
        """Update every parameter that has a gradient, in place.

        `verdict` is for `LossScaler.step`: (what to multiply gradients by, whether to step at all).
        """
        on_gpu = [isinstance(p.values, DeviceArray) for p in self.parameters]
        numbers: dict[bool, Any] = {}
        if verdict is not None:
            numbers[isinstance(verdict, DeviceArray)] = self._guarded(verdict)
        elif any(on_gpu):  # on the GPU, so that each replay of a captured step counts anew
            numbers[True] = live(lambda: self._count()._numbers(), self.n_numbers, np.float32)
        else:
            numbers[False] = self._count()._numbers()
        for i, (parameter, place) in enumerate(zip(self.parameters, on_gpu, strict=True)):
            if parameter.grad is None:
                continue
            if place not in numbers:
                numbers[place] = self._numbers()
            slots = self._slots_of(i)
            self._update(parameter.values, parameter.grad.values, slots, numbers[place])

    def _count(self) -> Optimizer:
        self.steps += 1
        return self

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def _numbers(self) -> np.ndarray:
        """What a step needs besides arrays, in float64: the learning rate, and so on."""
        raise NotImplementedError

    def _settings(self) -> list[float]:
        """What `guarded_numbers` works them out of, where the GPU knows which steps were taken."""
        raise NotImplementedError

    guarded_numbers: Callable[..., Any]

    def _update(self, p: Any, g: Any, slots: dict[str, Any], numbers: Any) -> None:
        raise NotImplementedError

    def _guarded(self, verdict: Any) -> Any:
        """The numbers of a step that the verdict may call off, in the verdict's place."""
        size = len(self._settings())
        on_gpu = isinstance(verdict, DeviceArray)
        if on_gpu:
            settings: Any = live(lambda: np.array(self._count()._settings()), size, np.float64)
        else:
            settings = np.array(self._count()._settings())
        with outside_capture():
            self._skipped = _beside(self._skipped, on_gpu)
        return type(self).guarded_numbers(settings, verdict, self._skipped)

    def _slots_of(self, i: int) -> dict[str, Any]:
        values = self.parameters[i].values
        on_gpu = isinstance(values, DeviceArray)
        if i not in self._state:
            place = "cuda" if on_gpu else "cpu"
            with outside_capture():
                self._state[i] = {
                    name: ops.zeros(values.shape, _slot_dtype(values), place)
                    for name in self._slot_names(values)
                }
        slots = self._state[i]
        if any(isinstance(array, DeviceArray) != on_gpu for array in slots.values()):
            with outside_capture():  # the parameter was moved
                slots.update({name: _beside(array, on_gpu) for name, array in slots.items()})
        return slots

    def _slot_names(self, values: Any) -> tuple[str, ...]:
        return (*self.slots, "master") if values.dtype.itemsize == 2 else self.slots

    def state_dict(self) -> dict[str, Any]:
        """Steps done and the kept arrays, on the CPU, in memory of their own."""
        skipped = int(_on_cpu(self._skipped)[0])
        state: dict[str, Any] = {"steps": self.steps, "skipped": skipped, "lr": self.lr}
        for i, slots in self._state.items():
            for name, array in slots.items():
                state[f"{i}.{name}"] = _on_cpu(array)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave.

        Raises ValueError where it is of another optimiser; nothing is changed then.
        """
        for key in ("steps", "lr"):
            if key not in state:
                raise ValueError(f"state lacks {key!r}")
        loaded: dict[int, dict[str, Any]] = {}
        for key, array in state.items():
            if key in ("steps", "skipped", "lr"):
                continue
            number, _, name = key.partition(".")
            if not number.isdigit() or int(number) >= len(self.parameters):
                raise ValueError(f"state is of another optimiser: it has {key!r}")
            values = self.parameters[int(number)].values
            if name not in self._slot_names(values):
                raise ValueError(f"state is of another optimiser: it has {key!r}")
            dtype = _slot_dtype(values)
            if not isinstance(array, np.ndarray):
                raise ValueError(f"state[{key!r}] takes an array, got {type(array).__name__}")
            if array.shape != values.shape or array.dtype != dtype:
                raise ValueError(
                    f"state[{key!r}] takes {values.shape} of {dtype}, "
                    f"got {array.shape} of {array.dtype}"
                )
            on_gpu = isinstance(values, DeviceArray)
            loaded.setdefault(int(number), {})[name] = to_device(array) if on_gpu else array.copy()
        for i, slots in loaded.items():
            for name in self._slot_names(self.parameters[i].values):
                if name not in slots:
                    raise ValueError(f"state lacks {f'{i}.{name}'!r}")
        self._state = loaded
        self._skipped = np.array([state.get("skipped", 0)], np.int64)
        forget_captures()
        self.steps, self.lr = int(state["steps"]), float(state["lr"])


def _checked_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    """As a list, of Tensors that each step once."""
    if isinstance(parameters, Tensor):  # its rows would be copies
        raise TypeError("parameters takes a list of Tensors, got a Tensor")
    found = list(parameters)
    if not found:
        raise ValueError("parameters takes at least one tensor, got none")
    for i, parameter in enumerate(found):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters[{i}] takes a Tensor, got {type(parameter).__name__}")
    if len({id(parameter) for parameter in found}) < len(found):
        raise ValueError("parameters takes each tensor once, got one more than once")
    return found


def _check_from_zero(**numbers: float) -> None:
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name} takes a number from 0 on, got {number}")


def _slot_dtype(values: Any) -> np.dtype:
    """What is kept for a parameter is float32 at least."""
    return np.dtype(np.float32) if values.dtype.itemsize == 2 else values.dtype


def _beside(array: Any, on_gpu: bool) -> Any:
    """The array where a parameter is."""
    if isinstance(array, DeviceArray) == on_gpu:
        return array
    return to_device(array) if on_gpu else array.numpy()


def _on_cpu(array: Any) -> np.ndarray:
    return array.numpy() if isinstance(array, DeviceArray) else array.copy()


class SGD(Optimizer):
    """v = momentum * v + g;  p -= lr * v  (with nesterov: p -= lr * (g + momentum * v)).

    `weight_decay * p` is added to g first. Without momentum, v is g.

    >>> import numbsparse as ns
    >>> p = ns.Tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ns.nn.optim.SGD([p], lr=0.1)
    >>> (p * p).sum().backward()
    >>> optimizer.step()
    >>> p
    Tensor([0.8, 1.6])
    """

    n_numbers = ops.SGD_NUMBERS
    guarded_numbers = staticmethod(ops.guarded_sgd_numbers)

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ):
        super().__init__(parameters, lr)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum takes a number from 0 to below 1, got {momentum}")
        _check_from_zero(weight_decay=weight_decay)
        if nesterov and momentum == 0:
            raise ValueError("nesterov takes a momentum above 0")
        self.momentum, self.weight_decay, self.nesterov = momentum, weight_decay, nesterov
        self.slots = ("velocity",) if momentum else ()

    def _numbers(self) -> np.ndarray:
        return np.array([*self._settings(), *ops.TAKEN])

    def _settings(self) -> list[float]:
        return [self.lr, self.momentum, self.weight_decay]

    def _update(self, p: Any, g: Any, slots: dict[str, Any], numbers: Any) -> None:
        velocity, master = slots.get("velocity"), slots.get("master")
        ops.sgd_step_with(p, g, velocity, master, numbers, self.nesterov)


class Adam(Optimizer):
    """m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g^2;
    p -= lr * m' / (sqrt(v') + eps), with m' = m / (1 - beta1^t) and v' = v / (1 - beta2^t).

    `weight_decay * p` is added to g first. Kingma and Ba, "Adam", 2015, algorithm 1.

    >>> import numbsparse as ns
    >>> p = ns.Tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ns.nn.optim.Adam([p], lr=0.1)
    >>> (p * p).sum().backward()
    >>> optimizer.step()
    >>> p
    Tensor([0.9, 1.9])
    """

    slots = ("m", "v")
    n_numbers = ops.ADAM_NUMBERS
    guarded_numbers = staticmethod(ops.guarded_adam_numbers)
    decoupled = False

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, lr)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas takes two numbers from 0 to below 1, got {betas}")
        _check_from_zero(eps=eps, weight_decay=weight_decay)
        self.betas, self.eps, self.weight_decay = betas, eps, weight_decay

    def _numbers(self) -> np.ndarray:
        return ops.adam_numbers(*self._settings())

    def _settings(self) -> list[float]:
        betas, decay = self.betas, self.weight_decay
        return [self.lr, *betas, self.eps, decay, float(self.decoupled), float(self.steps)]

    def _update(self, p: Any, g: Any, slots: dict[str, Any], numbers: Any) -> None:
        ops.adam_step_with(p, g, slots["m"], slots["v"], slots.get("master"), numbers)


class AdamW(Adam):
    """Adam with p -= lr * weight_decay * p beside the step, not within g.

    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.

    >>> import numbsparse as ns
    >>> p = ns.Tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ns.nn.optim.AdamW([p], lr=0.1, weight_decay=0.5)
    >>> (p * p).sum().backward()
    >>> optimizer.step()
    >>> p
    Tensor([0.85, 1.8 ])
    """

    decoupled = True

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay)


def warmup(step: int, steps: int) -> float:
    """A factor that rises from 1 / steps at step 0, in a line, to 1 at step `steps - 1`.

    >>> import numbsparse as ns
    >>> [ns.nn.optim.warmup(step, 4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    return min(1.0, (step + 1) / max(steps, 1))


def cosine(step: int, steps: int, floor: float = 0.0) -> float:
    """A factor that falls from 1 at step 0 to `floor` at step `steps`, along half a cosine.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    >>> import numbsparse as ns
    >>> [round(ns.nn.optim.cosine(step, 4), 2) for step in range(5)]
    [1.0, 0.85, 0.5, 0.15, 0.0]
    """
    done = min(1.0, step / max(steps, 1))
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * done))


def warmup_cosine(step: int, steps: int, warmup_steps: int, floor: float = 0.0) -> float:
    """`warmup` for the first steps, then `cosine` over the rest: a factor for the learning rate.

    >>> from numbsparse.nn import optim
    >>> [round(optim.warmup_cosine(step, 6, 2), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup_steps:
        return warmup(step, warmup_steps)
    return cosine(step - warmup_steps, steps - warmup_steps, floor)
