"""Adam, and Adam with decoupled weight decay."""

from collections.abc import Iterable, Mapping
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.nn.optim.groups import Setting
from numbsparse.nn.optim.optimizer import Optimizer
from numbsparse.patterns.checks import number, pair


class Adam(Optimizer):
    """Adam: in a parameter's step t, with its gradient g::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g^2
        p -= lr * m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    `weight_decay * p` is added to g first. t is the number of the parameter's own step: one without
    a gradient, as while it is frozen, is not counted. Kingma and Ba, "Adam", 2015, algorithm 1.

    >>> import numbsparse as ns
    >>> p = ns.Tensor([1.0, 2.0], requires_grad=True)
    >>> optimizer = ns.nn.optim.Adam([p], lr=0.1)
    >>> (p * p).sum().backward()
    >>> optimizer.step()
    >>> p
    Tensor([0.9, 1.9])
    """

    slots = ("m", "v")
    n_numbers, n_settings = ops.ADAM_NUMBERS, 7
    guarded_numbers = staticmethod(ops.guarded_adam_numbers)
    decoupled, chosen_by = False, ()
    betas, eps, weight_decay = Setting(), Setting(), Setting()

    def __init__(
        self,
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    @staticmethod
    def check_settings(  # type: ignore[override]
        lr: float, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        number("lr", lr)
        for i, beta in enumerate(pair("betas", "two numbers from 0 to below 1", betas)):
            number(f"betas[{i}]", beta, below=1)
        number("eps", eps)
        number("weight_decay", weight_decay)

    def _settings(self, group: Mapping[str, Any], step: int) -> list[float]:
        rates = group["lr"], *group["betas"], group["eps"], group["weight_decay"]
        return [*rates, float(self.decoupled), float(step)]

    def _update(
        self, group: Mapping[str, Any], p: Any, g: Any, slots: dict[str, Any], numbers: Any
    ) -> None:
        ops.adam_step(p, g, slots["m"], slots["v"], slots.get("master"), numbers, fits=True)


class AdamW(Adam):
    """Adam with p -= lr * weight_decay * p in addition to the step, not within g.

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
        parameters: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(parameters, lr, betas=betas, eps=eps, weight_decay=weight_decay)
