"""Group lasso: whole blocks shrink to zero, by a proximal step after each of the optimizer."""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.device import moved, refuse_in_capture
from numbsparse.nn.module import Module
from numbsparse.nn.utils.weights import (
    SCOPES,
    Changing,
    as_model,
    check_density,
    largest_of_all,
    norms_of,
    weights_of,
)
from numbsparse.patterns.checks import number, word


class GroupLasso(Changing):
    """Shrink the blocks of all block-sparse weights until so many are zero.

    Each `step` is the proximal operator of strength * sum over blocks b of B * ||w_b||, l2 norms:

    w_b becomes w_b * max(0, 1 - t / rms_b), where rms_b = ||w_b|| / B,

    so the root mean square of a block falls by t, and not below 0. Here t is the strength, or the
    largest rms of the blocks that are not among the `density` largest where that is less: those
    reach 0, the others do not. While the strength is less it grows, by the factor `growth` a step.

    Parameters
    ----------
    model, density, scope : as in `prune`; the density is the one to steer to
    strength : float, optional
        At first, in units of the weights a step; default: a thousandth of the mean rms. From 0 it
        grows to that.
    growth : float, at least 1; with 1 the strength stays

    Raises what `prune` raises. A `step` that leaves a weight no block gives a RuntimeWarning.

    Notes
    -----
    Call `step` after each step of the optimizer, outside of a step that `ns.graph` captures: the
    norms are copied to the host. A block at zero may come back by its gradient, in competition with
    the others, until `nn.utils.compact(model, remap=optimizer)` drops it; train on after that,
    without this object, for what was kept is shrunk too. To resume, load its state before those of
    the model and of the optimizer.

    Examples
    --------
    >>> from numbsparse import nn
    >>> layer = nn.Linear(256, 256, seed=0)
    >>> lasso = nn.utils.GroupLasso(layer, density=0.25, growth=2.0)
    >>> for _ in range(20):  # of training
    ...     lasso.step()
    >>> nn.utils.compact(layer)
    {'weight': 0.25}

    Yuan and Lin, "Model selection and estimation in regression with grouped variables", 2006; its
    proximal operator in Parikh and Boyd, "Proximal Algorithms", 2014, section 6.5.4.
    """

    numbers = (("strength", number),)

    def __init__(
        self,
        model: Module | Iterable[Tensor],
        density: float,
        *,
        strength: float | None = None,
        growth: float = 1.02,
        scope: str = "layer",
    ):
        self.model = as_model(model)
        self.density, self.scope = number("density", density, most=1), word("scope", scope, SCOPES)
        self.growth = number("growth", growth, least=1)
        weights = weights_of(self.model)
        if self.scope == "layer":
            check_density(weights, self.density)
        rms, _ = self._measured(weights)  # which refuses a model of several block sizes
        self.strength = number("strength", _weak(rms) if strength is None else strength)

    def step(self) -> None:
        """Shrink the blocks once, and adapt the strength."""
        refuse_in_capture("GroupLasso.step", "call it after the step")
        weights = weights_of(self.model)
        rms, kept = self._measured(weights)
        others = [float(of[~mask].max(initial=0)) for of, mask in zip(rms, kept, strict=True)]
        emptied = []
        for weight, of, largest in zip(weights, rms, others, strict=True):
            largest = largest if self.scope == "layer" else max(others)
            if (threshold := min(self.strength, largest)) > 0:
                _scale(weight.data, np.maximum(0, 1 - threshold / np.maximum(of, threshold)))
                emptied += [weight.name] if of.any() and threshold >= of.max() else []
        if self.strength < max(others) and self.growth > 1:
            self.strength = self.strength * self.growth or _weak(rms)
        for name in emptied:  # after the step: who makes it an error has a whole one
            says = f'{name} has no block left that is not zero: use scope="layer", a larger density'
            says += ", or leave it out, with a list of the other parameters in place of the model"
            warnings.warn(says, RuntimeWarning, stacklevel=2)

    def _measured(self, weights: list[Any]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The rms of the blocks of each weight, and which are among the largest."""
        norms = norms_of(weights, "l2")
        kept = largest_of_all(weights, norms, self.density, self.scope)
        return [n / w.data.block_size for w, n in zip(weights, norms, strict=True)], kept


def _weak(rms: list[np.ndarray]) -> float:
    """A strength to begin with."""
    together = np.concatenate(rms)
    return float(together.mean()) / 1000 if together.size else 0.0


def _scale(w: Any, by: np.ndarray) -> None:
    """w.data[b] *= by[b], in place."""
    if w.is_transposed:
        w, by = w.T, by[w.layout.index.columns.blocks]
    numbers: Any = moved(by.astype(ops.state_dtype(w.dtype)), w.device)
    ops.copy_into(w.values, ops.gated(w, numbers, ops.all_blocks(w, numbers)).values)
