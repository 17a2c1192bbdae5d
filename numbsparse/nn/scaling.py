"""Loss scaling: float16 gradients kept from vanishing."""

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from numbsparse import edits, ops
from numbsparse.autograd import Tensor, unread
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, moved, refill
from numbsparse.dtypes import is_floating, type_name
from numbsparse.nn import functional as F
from numbsparse.nn.kept import check_keys, in_place_of
from numbsparse.patterns.checks import integer, number

if TYPE_CHECKING:
    from numbsparse.nn.optim import Optimizer


class LossScaler:
    """Multiplies a loss, so that float16 gradients do not vanish, and adapts the factor by itself.

    The gradients are scaled until the optimizer, in float32, divides by it. A step whose
    gradients are infinite or NaN is skipped: parameters and moments stay, Adam does not count it,
    and the scale is halved. After `interval` good steps in a row it is doubled.

    On a GPU all of it happens there, with nothing copied to the host, so `ns.graph` captures it.
    bfloat16 has the range of float32 and needs no scale; `LossScaler(1.0, interval=None)` still
    skips the bad steps.

    Parameters
    ----------
    scale : float, the first; a power of two loses no digits
    interval : int, or None to leave the scale as it is

    Raises TypeError or ValueError for a scale out of 2^-14 to 2^24, or an interval below 1.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> model = ns.nn.Linear(8, 4, block_size=4, seed=0)
    >>> optimizer, scaler = ns.nn.optim.SGD(model.parameters(), lr=0.1), ns.nn.optim.LossScaler()
    >>> def step(x, target):
    ...     loss = ns.nn.functional.mse_loss(model(x), target)
    ...     model.zero_grad()
    ...     scaler.scale(loss).backward()
    ...     ns.nn.utils.clip_grad_norm(model.parameters(), 1.0, scaler=scaler)
    ...     scaler.step(optimizer)
    ...     return loss
    >>> loss = step(np.ones((2, 8), np.float32), np.ones((2, 4), np.float32))
    >>> scaler.state_dict()
    {'scale': 32768.0, 'good_steps': 1}

    Micikevicius et al., "Mixed Precision Training", 2018, section 3.2.
    """

    def __init__(self, scale: float = 2.0**15, *, interval: int | None = 2000):
        self.interval = None if interval is None else integer("interval", interval)
        self._state: Any = _state_of("scale", scale)

    def scale(self, loss: Tensor) -> Tensor:
        """loss * scale, in float32 for a loss of 16 bits."""
        if not isinstance(loss, Tensor) or isinstance(unread(loss), BlockSparse):
            raise TypeError(f"loss takes a dense Tensor, got {type_name(loss)}")
        if not is_floating(loss.dtype):
            raise TypeError(f"loss takes floating-point numbers, got {loss.dtype}")
        loss = F.cast(loss, np.float32) if loss.dtype.itemsize == 2 else loss
        scale = self.array_in(loss.device)
        return loss * Tensor(scale if scale.dtype == loss.dtype else ops.cast(scale, loss.dtype))

    def step(self, *optimizers: "Optimizer") -> None:
        """A step of each optimizer, or of none if a gradient is not finite; then the next scale.

        Those whose gradients bear one scale step in one call, as the scale may change in it. Raises
        ValueError where no parameter has a gradient, or they are not all in one place, and what
        `Optimizer.step` raises; nothing is changed then.
        """
        for optimizer in optimizers:
            if not hasattr(optimizer, "step_checked"):
                raise TypeError(f"optimizers takes Optimizers, got {type_name(optimizer)}")
        found = [optimizer.checked() for optimizer in optimizers]
        gradients = [p.grad.data for o in optimizers for p in o.parameters if p.grad is not None]
        if not gradients:
            raise ValueError("optimizers take parameters with gradients: call backward before")
        self.array_in(Tensor(gradients[0]).device)
        verdict = ops.judge(gradients, self._state, self.interval or 0)
        edits.note(self._state, "LossScaler.step")
        for optimizer, own in zip(optimizers, found, strict=True):
            optimizer.step_checked(own, verdict)

    def array_in(self, device: str) -> Any:
        """The scale as an array without axes, on "cpu" or "cuda:0"; steps change it in place."""
        self._state = in_place_of(self._state, device)
        return ops.getitem(self._state, 0)

    def state_dict(self) -> dict[str, Any]:
        """The scale, and the good steps since it last changed, copied to the host."""
        state = moved(self._state, "cpu")
        return {"scale": float(state[0]), "good_steps": int(state[1])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave; raises TypeError or ValueError where it did not."""
        check_keys("state", state, ["scale", "good_steps"])
        values = _state_of("state['scale']", state["scale"])
        values[1] = integer("state['good_steps']", state["good_steps"], least=0, most=inf)
        if isinstance(self._state, DeviceArray):
            refill(self._state, values)
        else:
            self._state = values


def _state_of(argument: str, scale: Any) -> np.ndarray:
    """The scale, and the good steps since it last changed."""
    return np.array([number(argument, scale, ops.MOST_SCALE, ops.LEAST_SCALE), 0], np.float32)
