"""Pruning: block-sparse weights keep their blocks of largest norm, at once or step by step."""

from collections.abc import Iterable
from typing import Any

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.device import refuse_in_capture
from numbsparse.nn.module import Module
from numbsparse.nn.utils.weights import (
    COUNT,
    SCOPES,
    SHARE,
    Changing,
    as_model,
    check_density,
    followers_of,
    keep,
    largest_of_all,
    norms_of,
    weights_of,
)
from numbsparse.patterns.checks import integer, number, word


def prune(
    model: Module | Iterable[Tensor],
    density: float | None = None,
    *,
    threshold: float | None = None,
    by: str = "l2",
    scope: str = "layer",
    remap: Any = (),
) -> dict[str, float]:
    """Keep the blocks of largest norm of all block-sparse weights, and drop the others.

    Values, gradients and layouts change at once, and so does what is given as `remap`; steps that
    `ns.graph` captured are captured anew. A weight that several layers share is pruned once. Where
    an error is raised nothing has changed.

    Parameters
    ----------
    model : Module, or a list of some of its Parameters
        Dense parameters among them, such as biases, stay as they are.
    density : float, 0 to 1
        Keep round(density * blocks of the whole grid) blocks, those of largest norm; of equal ones
        the first in row order. A weight that has fewer keeps all. Or:
    threshold : float
        Keep the blocks with norm >= threshold.
    by : "l1", "l2" or "max"
        The norm: see `BlockSparse.block_norms`.
    scope : "layer" or "model"
        Whether `density` is the share of each weight, or of all of them together, which then
        compete and take one block size.
    remap : optimizer, moving average, or a list of them
        Their `remap` is called: what they keep for the blocks that stay goes on.

    Returns
    -------
    dict: the density of each weight by its name

    Raises
    ------
    TypeError, ValueError
        For other arguments, a norm that is NaN or infinite, and a weight that would keep no block.

    Examples
    --------
    >>> from numbsparse import nn
    >>> model = nn.Sequential(nn.Linear(64, 128, seed=0), nn.ReLU(), nn.Linear(128, 64, seed=1))
    >>> optimizer = nn.optim.Adam(model.parameters())
    >>> nn.utils.prune(model, density=0.25, remap=optimizer)
    {'0.weight': 0.25, '2.weight': 0.25}
    """
    if (density is None) == (threshold is None):
        got = "neither" if density is None else "both"
        raise ValueError(f"exactly one of density and threshold must be given, got {got}")
    weights, followers, scope = weights_of(model), followers_of(remap), word("scope", scope, SCOPES)
    if density is not None:
        density = number("density", density, most=1)
        kept = largest_of_all(weights, norms_of(weights, by), density, scope)
    else:
        least = number("threshold", threshold)
        kept = [norms >= least for norms in norms_of(weights, by)]
    limit = f"threshold {threshold}" if density is None else f"density {density:.4g} of the {scope}"
    return keep(weights, kept, followers, limit)


def compact(model: Module | Iterable[Tensor], *, remap: Any = ()) -> dict[str, float]:
    """Drop the blocks that are all zero, or whose gate is zero in evaluation.

    `model` and `remap`, what is returned and raised: as in `prune`. Results stay as they are.

    >>> import numpy as np
    >>> from numbsparse import nn
    >>> layer = nn.Linear(16, 16, block_size=4, gate=True)
    >>> layer.gate.data.values[:12] = 0
    >>> nn.utils.compact(layer)
    {'weight': 0.25}
    """
    weights, followers = weights_of(model), followers_of(remap)
    deciding = [w._replace(gate=None) if w.normed else w for w in weights]
    kept = [norms > 0 for norms in norms_of(deciding, "max")]
    return keep(weights, kept, followers, "dropping zeros")


def cubic(first: float, last: float, done: float) -> float:
    """From the first to the last, much at first and little at the end; `done` is a share."""
    return last + (first - last) * (1 - min(max(done, 0), 1)) ** 3


class GradualPruning(Changing):
    """Densities that fall along a cubic from the first to the last, a `prune` every few steps.

    density(t) = last + (first - last) * (1 - (t - start) / (stop - start)) ** 3 from step `start`
    to step `stop`: much is pruned while much is redundant, and little at the end.

    Parameters
    ----------
    model, by, scope, remap : as in `prune`
    density : float, 0 to 1
        The last one. The first is that of all weights together as they are now.
    start, stop, every : int
        Steps of training; the last pruning is that of `stop`, wherever `every` falls.

    Raises what `prune` raises, ValueError where `stop` is not after `start`.

    Notes
    -----
    Call `step` after each step of the optimizer, outside of a step that `ns.graph` captures. To
    resume, load the state of this object first: it gives the weights, and what is given as `remap`,
    the layouts that they had, so that the states of model and optimizer fit.

    Examples
    --------
    >>> from numbsparse import nn
    >>> layer = nn.Linear(256, 256, seed=0)
    >>> pruning = nn.utils.GradualPruning(layer, density=0.25, stop=4)
    >>> for _ in range(4):
    ...     pruning.step()
    ...     print(layer.weight.data.density)
    0.5625
    0.34375
    0.265625
    0.25

    Zhu and Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model
    compression", 2017, equation 1, whose sparsity is 1 - density.
    """

    numbers = (("steps", COUNT), ("first", SHARE))

    def __init__(
        self,
        model: Module | Iterable[Tensor],
        density: float,
        *,
        stop: int,
        start: int = 0,
        every: int = 1,
        by: str = "l2",
        scope: str = "layer",
        remap: Any = (),
    ):
        self.model = as_model(model)
        self.density = number("density", density, most=1)
        self.start, self.every = integer("start", start, least=0), integer("every", every)
        self.stop = integer("stop", stop, least=self.start + 1)
        self.remap, self.steps = followers_of(remap), 0
        self._how: Any = {"by": ops.checked_norm(by), "scope": word("scope", scope, SCOPES)}
        weights = weights_of(self.model)
        if scope == "layer":
            check_density(weights, self.density)
        layouts = [weight.data.layout for weight in weights]
        blocks = sum(a.shape[0] * a.shape[1] for a in layouts)
        self.first = sum(a.n_blocks for a in layouts) / blocks

    def density_at(self, step: int) -> float:
        """The density that is aimed at after so many steps."""
        return cubic(self.first, self.density, (step - self.start) / (self.stop - self.start))

    def step(self) -> None:
        """Count a step, and prune where one is due; after an error it is not counted."""
        refuse_in_capture("GradualPruning.step", "call it after the step")
        step = self.steps + 1
        due = (step - self.start) % self.every == 0 or step == self.stop
        if due and self.start <= step <= self.stop:
            prune(self.model, self.density_at(step), remap=self.remap, **self._how)
        self.steps = step
