"""Gradient descent, with momentum and with Nesterov's."""

from collections.abc import Iterable, Mapping
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.nn.optim.groups import Setting
from numbsparse.nn.optim.optimizer import Optimizer
from numbsparse.patterns.checks import flag, number


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum::

        v = momentum * v + g
        p -= lr * v                     # with nesterov: lr * (g + momentum * v)

    `weight_decay * p` is added to g first. Without momentum, v is g.

    >>> import numbsparse as ns
    >>> p = ns.Tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ns.nn.optim.SGD([p], lr=0.1)
    >>> (p * p).sum().backward()
    >>> optimizer.step()
    >>> p
    Tensor([0.8, 1.6])
    """

    n_numbers, n_settings, chosen_by = ops.SGD_NUMBERS, 3, ("nesterov",)
    guarded_numbers = staticmethod(ops.guarded_sgd_numbers)

    momentum, weight_decay, nesterov = Setting(), Setting(), Setting()

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ):
        settings = {"momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(parameters, lr=lr, **settings)

    @staticmethod
    def check_settings(  # type: ignore[override]
        lr: float, momentum: float, weight_decay: float, nesterov: bool
    ) -> None:
        number("lr", lr)
        number("momentum", momentum, below=1)
        number("weight_decay", weight_decay)
        if flag("nesterov", nesterov) and momentum == 0:
            raise ValueError("nesterov takes a momentum above 0")

    def slots_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("velocity",) if group["momentum"] else ()

    def _settings(self, group: Mapping[str, Any], step: int) -> list[float]:
        return [group["lr"], group["momentum"], group["weight_decay"]]

    def _update(
        self, group: Mapping[str, Any], p: Any, g: Any, slots: dict[str, Any], numbers: Any
    ) -> None:
        velocity, master = slots.get("velocity"), slots.get("master")
        ops.sgd_step(p, g, velocity, master, numbers, group["nesterov"], fits=True)
