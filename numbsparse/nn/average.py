"""The moving average of weights, which is what a trained model is often used with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.device import DeviceArray, forget_captures, live, outside_capture, to_device
from numbsparse.patterns.checks import number


class ExponentialMovingAverage:
    """average += (1 - d) * (p - average) after each update of the parameters p.

    d = min(decay, t / (t + 9)) in step t, counted from 0: the average begins with the first p and
    is at first one of few, however slow it becomes.

    Averages live beside their parameters, in float32 beside 16 bits. All of a step runs on the GPU
    where they are there, so `ns.graph` captures it.

    Parameters
    ----------
    parameters : Tensors, dense and block-sparse
    decay : float, from 0 to below 1

    Raises TypeError or ValueError that names the argument.

    Examples
    --------
    >>> import numpy as np, numbsparse as ns
    >>> p = ns.nn.Parameter(np.zeros(2))
    >>> average = ns.nn.optim.ExponentialMovingAverage([p], decay=0.5)
    >>> for value in (2.0, 4.0, 8.0):
    ...     p.data[:] = value
    ...     average.step()
    >>> with average.applied():
    ...     print(p)
    Tensor([7.23636364, 7.23636364])
    >>> p
    Tensor([8., 8.])

    Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992, with weights
    that fall off exponentially, as in Salimans et al., "PixelCNN++", 2017.
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float = 0.9995):
        if isinstance(parameters, Tensor):  # its rows would be copies
            raise TypeError("parameters takes a list of Tensors, got a Tensor")
        self.parameters = list(parameters)
        for i, parameter in enumerate(self.parameters):
            if not isinstance(parameter, Tensor):
                raise TypeError(f"parameters[{i}] takes a Tensor, got {type(parameter).__name__}")
        self.decay = number("decay", decay)
        if self.decay >= 1:
            raise ValueError(f"decay takes a number from 0 to below 1, got {decay}")
        self.steps = 0
        self._averages: list[Any] = []

    def step(self) -> None:
        """Take the parameters as they are now, all in one place, into the average."""
        if not self._averages:
            with outside_capture():
                self._averages = [_like(p.values) for p in self.parameters]
        if any(isinstance(p.values, DeviceArray) for p in self.parameters):
            # On the GPU, so that each replay of a captured step counts anew.
            share: Any = live(self._next_share, 1, np.float32)
        else:
            share = self._next_share()
        for average, p in zip(self._averages, self.parameters, strict=True):
            ops.average_step(average, p.values, share)

    def _next_share(self) -> np.ndarray:
        """What of the average the newest parameters become."""
        share = 1 - min(self.decay, self.steps / (self.steps + 9))
        self.steps += 1
        return np.array([share])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the parameters hold their averages; after it, what they held before.

        RuntimeError before the first step.
        """
        if not self._averages:
            raise RuntimeError("there is no average before the first step")
        kept = [ops.copy(p.values) for p in self.parameters]
        try:
            for p, average in zip(self.parameters, self._averages, strict=True):
                ops.copy_into(p.values, average)
            yield
        finally:
            for p, own in zip(self.parameters, kept, strict=True):
                ops.copy_into(p.values, own)

    def state_dict(self) -> dict[str, Any]:
        """Steps done and the averages, on the CPU, in memory of their own."""
        averages = (a.numpy() if isinstance(a, DeviceArray) else a.copy() for a in self._averages)
        return {"steps": self.steps} | {str(i): a for i, a in enumerate(averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave.

        Raises ValueError where it is of other parameters; nothing is changed then.
        """
        names = [key for key in state if key != "steps"]
        expected = [str(i) for i in range(len(self.parameters))] if names else []
        if "steps" not in state or sorted(names) != sorted(expected):
            raise ValueError(
                f"state takes steps and {len(self.parameters)} averages, got {sorted(state)}"
            )
        averages = []
        for name, p in zip(expected, self.parameters, strict=bool(names)):
            array, like = state[name], _like(p.values)
            if not isinstance(array, np.ndarray) or (array.shape, array.dtype) != (
                like.shape,
                like.dtype,
            ):
                raise ValueError(
                    f"state[{name!r}] takes {like.shape} of {like.dtype}, got "
                    f"{getattr(array, 'shape', type(array).__name__)} of "
                    f"{getattr(array, 'dtype', 'no dtype')}"
                )
            on_gpu = isinstance(like, DeviceArray)
            averages.append(to_device(array) if on_gpu else array.copy())
        self._averages, self.steps = averages, int(state["steps"])
        forget_captures()


def _like(values: Any) -> Any:
    """Zeros for the average of these values, which is float32 at least."""
    dtype = np.dtype(np.float32) if values.dtype.itemsize == 2 else values.dtype
    return ops.zeros(values.shape, dtype, "cuda" if isinstance(values, DeviceArray) else "cpu")
