"""The moving average of weights, which is what a trained model is often used with."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy as np

from numbsparse import edits, ops
from numbsparse.autograd import Tensor, tensors_of
from numbsparse.device import forget_captures, live, moved, outside_capture
from numbsparse.nn import kept
from numbsparse.patterns.checks import integer, number


class ExponentialMovingAverage:
    """average += (1 - d) * (p - average) after each update of the parameters p.

    d = min(decay, t / (t + 9)) in step t, counted from 0: the average begins with the first p, and
    at first follows quickly, however slow it becomes.

    Averages are where their parameters are, in float32 for those of 16 bits. A step with parameters
    on a GPU runs there entirely, so `ns.graph` captures it. An average belongs to the layout of its
    parameter: after `p.data = w` with another one `step` and `applied` raise ValueError until
    `remap` is called.

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
        self.parameters = tensors_of("parameters", parameters)
        self.decay = number("decay", decay, below=1)
        self.steps = 0
        self._averages: list[Any] = []
        self._forms: list[kept.Form] = []

    def step(self) -> None:
        """Take the parameters as they are now, all in one place, into the average.

        Raises TypeError or ValueError that names the parameter, and changes nothing, where one does
        not fit its average.
        """
        if len(devices := {p.device for p in self.parameters}) > 1:
            raise ValueError(f"parameters takes Tensors of one device, got {sorted(devices)}")
        self._check_forms()
        pairs = zip(self._averages, self.parameters, strict=bool(self._averages))
        with outside_capture():
            averages = [kept.in_place_of(average, p.device) for average, p in pairs]
            averages = averages or [kept.like(p.values) for p in self.parameters]
        forms = self._forms or [kept.form_of(p.data) for p in self.parameters]
        for i, (average, p) in enumerate(zip(averages, self.parameters, strict=True)):
            with kept.naming(f"parameters[{i}]"):
                ops.check_average(average, p.values)
        self._averages, self._forms = averages, forms
        share: Any = self._next_share
        # On a GPU each replay of a captured step counts again.
        share = live(share, 1, np.float32) if devices - {"cpu"} else share()
        for average, p in zip(self._averages, self.parameters, strict=True):
            ops.average_step(average, p.values, share, checked=True)

    def remap(self) -> None:
        """Follow parameters whose layout was changed, `p.data = w`.

        Averages of blocks that both layouts have go on; those of new blocks begin with the
        parameter as it is. Raises ValueError for another block size; nothing is changed then.
        """
        carried = dict(enumerate(self._averages))
        for i, (p, old) in enumerate(zip(self.parameters, self._forms, strict=bool(carried))):
            new, average = kept.form_of(p.data), carried.get(i)
            if average is not None and new != old:
                kept.check_can_remap(f"parameters[{i}]", old, new)
                fresh = ops.zeros(p.values.shape, average.dtype, p.device)
                ops.copy_into(fresh, p.values)
                carried[i] = kept.remapped(average, old, new, fresh)
        self._averages = list(carried.values())
        self._forms = [kept.form_of(p.data) for p in self.parameters] if carried else []
        forget_captures()

    def _check_forms(self) -> None:
        for i, (p, old) in enumerate(zip(self.parameters, self._forms, strict=bool(self._forms))):
            so = ": call remap() to carry it over"
            kept.check_form(f"parameters[{i}]", kept.form_of(p.data), old, "its average", so)

    def _next_share(self) -> np.ndarray:
        """What of the average the newest parameters become."""
        share = 1 - min(self.decay, self.steps / (self.steps + 9))
        self.steps += 1
        return np.array([share])

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the parameters hold their averages; after it, what they held before.

        RuntimeError before the first step, ValueError where a parameter has another layout now.
        """
        if not self._averages:
            raise RuntimeError("there is no average before the first step")
        self._check_forms()
        own = [(p, p.data, ops.copy(p.values)) for p in self.parameters]
        try:
            self._write(self._averages)
            yield
        finally:
            try:
                self._give_back(own)
            except BaseException:  # such as Ctrl-C: what was trained is nowhere else
                self._give_back(own)
                raise

    def _give_back(self, own: list[tuple[Tensor, Any, Any]]) -> None:
        """To each parameter what it held, and its values."""
        for p, data, _ in own:
            if p.data is not data:  # with another layout, or in another place
                p.data = data
        self._write([values for *_, values in own])

    def _write(self, arrays: list[Any]) -> None:
        """Into the parameters."""
        for p, array in zip(self.parameters, arrays, strict=True):
            ops.copy_into(p.values, moved(array, p.device))
            edits.note(p.values, "ExponentialMovingAverage.applied")

    def state_dict(self) -> dict[str, Any]:
        """Steps done and the averages, on the CPU, in memory of their own.

        The average of a BlockSparse is one, of its layout.
        """
        pairs = enumerate(zip(self._averages, self._forms, strict=True))
        return {"steps": self.steps} | {str(i): kept.saved(a, form) for i, (a, form) in pairs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave.

        Raises TypeError or ValueError where it is of other parameters or layouts; nothing is
        changed then.
        """
        kept.check_state(state)
        names = [key for key in state if key != "steps"]
        expected = [str(i) for i in range(len(self.parameters))] if names else []
        if "steps" not in state or sorted(names) != sorted(expected):
            raise ValueError(
                f"state takes steps and {len(self.parameters)} averages, got {sorted(state)}"
            )
        steps = integer("state['steps']", state["steps"], least=0, most=inf)
        averages = [
            kept.loaded(f"state[{name!r}]", state[name], p.data)
            for name, p in zip(expected, self.parameters, strict=False)
        ]
        self._averages, self.steps = averages, steps
        self._forms = [kept.form_of(p.data) for p in self.parameters] if names else []
        forget_captures()
