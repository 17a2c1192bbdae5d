"""Growth and rewiring: blocks that matter least go, and others come, while a network trains."""

from collections.abc import Iterable, Mapping
from math import cos, inf, pi
from typing import Any

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.device import moved, refuse_in_capture
from numbsparse.layout import Layout
from numbsparse.nn.kept import check_keys
from numbsparse.nn.module import Module
from numbsparse.nn.utils.drawn import absent_blocks, changed, swapped
from numbsparse.nn.utils.weights import (
    COUNT,
    SHARE,
    Changing,
    Weight,
    as_model,
    check_density,
    followers_of,
    largest,
    loaded,
    norms_of,
    saved,
    set_layouts,
    weights_of,
)
from numbsparse.patterns.checks import integer, number, word

RULES = ("gradient", "random", "degrees")


def _shares(argument: str, of: Any) -> dict[str, float]:
    if not isinstance(of, Mapping):
        raise TypeError(f"{argument} takes a density of each weight by its name, got {of!r}")
    return {name: SHARE(argument, share) for name, share in of.items()}


class Rewiring(Changing):
    """Every few steps drop a share of the blocks, those of smallest norm, and grow others.

    In each weight round(share * blocks) go, where

    share(t) = fraction / 2 * (1 + cos(pi * t / stop)), or `fraction` without a `stop`,

    and as many come: those with the largest norm of the gradient, as in RigL; drawn at random, as
    in SET; or such that every block row and block column keeps its degree, by swaps of pairs, which
    makes a small world of any layout: blocks (i, j) and (k, l) become (i, l) and (k, j). With a
    `density` the number of blocks follows a line from that at first to it. New blocks begin with
    zeros, also in what is given as `remap`, where those of blocks that stay go on; new gates begin
    as gates do.

    Parameters
    ----------
    model, by, remap : as in `prune`
    fraction : float, 0 to 1
    grow : "gradient", "random" or "degrees"
    every : int
        Steps of training from one change to the next.
    stop : int, optional
        The step after which nothing changes.
    density : float, 0 to 1, optional
        Of each weight at step `stop`, which it takes; not with "degrees".
    candidates : int, optional
        For "gradient": so many blocks that are not there, drawn at random in each weight, are held
        there as zeros for the step before a change, so that its `backward` gives their gradient.
        No more than these come. Default: as many as the weight has, or as `density` asks for. No
        dense gradient is made.
    seed : int, optional
        What is drawn depends on it and on the number of the step.

    Raises what `prune` raises, ValueError for other arguments, RuntimeError within a step that
    `ns.graph` captures.

    Notes
    -----
    Call `step` between `backward` and the step of the optimizer. Steps that `ns.graph` captured are
    captured anew after a change. To resume, load the state of this object before those of the model
    and of what is given as `remap`: it gives them the layouts that they had.

    Examples
    --------
    >>> import numpy as np
    >>> from numbsparse import nn, patterns
    >>> layer = nn.Linear(256, 256, layout=patterns.random(8, 8, 0.25, seed=0), seed=0)
    >>> optimizer = nn.optim.Adam(layer.parameters())
    >>> rewiring = nn.utils.Rewiring(layer, every=5, stop=20, density=0.5, remap=optimizer, seed=0)
    >>> x = np.ones((4, 256), np.float32)
    >>> for _ in range(20):
    ...     layer.zero_grad()
    ...     nn.functional.sum(layer(x)).backward()
    ...     rewiring.step()
    ...     optimizer.step()
    >>> layer.weight.data.density
    0.5

    Evci, Gale, Menick, Castro and Elsen, "Rigging the Lottery", 2019 (RigL); Mocanu et al.,
    "Scalable training of artificial neural networks with adaptive sparse connectivity", 2018 (SET);
    swaps: Maslov and Sneppen, "Specificity and Stability in Topology of Protein Networks", 2002.
    """

    numbers = (("steps", COUNT), ("seed", COUNT), ("first", _shares))

    def __init__(
        self,
        model: Module | Iterable[Tensor],
        fraction: float = 0.3,
        *,
        grow: str = "gradient",
        every: int = 100,
        stop: int | None = None,
        density: float | None = None,
        candidates: int | None = None,
        by: str = "l2",
        remap: Any = (),
        seed: int | None = None,
    ):
        self.model = as_model(model)
        self.fraction, self.every = number("fraction", fraction, most=1), integer("every", every)
        self.grow, self.by = word("grow", grow, RULES), ops.checked_norm(by)
        least = 2 if grow == "gradient" else 1  # the first step has no gradient of candidates
        self.stop = None if stop is None else integer("stop", stop, least)
        self.density = None if density is None else number("density", density, most=1)
        self.candidates = None if candidates is None else integer("candidates", candidates)
        drawn = np.random.default_rng().integers(2**31) if seed is None else seed
        self.seed = integer("seed", drawn, least=0, most=inf)
        self.remap, self.steps = followers_of(remap), 0
        if density is not None and (stop is None or grow == "degrees"):
            raise ValueError("density takes a stop, and blocks that grow by gradient or at random")
        self.first = {w.name: w.data.density for w in weights_of(self.model)}
        self._kept: dict[str, Layout] = {}  # without candidates, while these are there
        if self.density is not None:
            check_density(weights_of(self.model), self.density)

    def share_at(self, step: int) -> float:
        """The share of blocks that a change at this step drops."""
        if self.stop is None:
            return self.fraction
        return self.fraction / 2 * (1 + cos(pi * min(step / self.stop, 1)))

    def step(self) -> None:
        """Count a step, and change the layouts where that is due; after an error neither."""
        refuse_in_capture("Rewiring.step", "call it after the step")
        step, weights = self.steps + 1, weights_of(self.model)
        if self._is_due(step):
            self._change(weights, step)
        if self.grow == "gradient" and self._is_due(step + 1):
            self._probe(weights, step)
        self.steps = step

    def _is_due(self, step: int) -> bool:
        last = self.stop is not None and step == self.stop
        return last or (step % self.every == 0 and (self.stop is None or step < self.stop))

    def _count_at(self, weight: Weight, step: int) -> int:
        """How many blocks a weight has after a change at this step."""
        if self.density is None or self.stop is None:
            return self._layout_of(weight).n_blocks
        rows, columns = weight.data.layout.shape
        density = self._density_at(self.first[weight.name], self.density, step / self.stop)
        return round(density * rows * columns)

    @staticmethod
    def _density_at(first: float, last: float, done: float) -> float:
        return first + (last - first) * min(done, 1)

    def _layout_of(self, weight: Weight) -> Layout:
        """Its layout, without candidates."""
        own = weight.data.layout
        return self._kept.get(weight.name, own) & own if self._kept else own

    def _probe(self, weights: list[Weight], step: int) -> None:
        """Hold blocks that are not there as zeros, for the next `backward`."""
        kept = {weight.name: self._layout_of(weight) for weight in weights}
        wider = []
        for nth, weight in enumerate(weights):
            layout = kept[weight.name]
            fewest = self._count_at(weight, step + 1) - layout.n_blocks
            more = self.candidates or max(layout.n_blocks, fewest)
            drawn = absent_blocks(layout, more, self._generator(step, nth))
            wider.append(changed(layout, np.ones(layout.n_blocks, bool), drawn))
        set_layouts(weights, self.remap, wider)
        self._kept = kept

    def _change(self, weights: list[Weight], step: int) -> None:
        if self.grow == "gradient" and not self._kept:
            return  # the first step has no gradients of candidates yet
        norms, fewer, other = norms_of(weights, self.by), [], []
        for nth, (weight, own) in enumerate(zip(weights, norms, strict=True)):
            layout = self._layout_of(weight)
            if layout is not weight.data.layout:
                own = own[layout.positions_in(weight.data.layout)]
            stay, new = self._chosen(weight, layout, own, step, self._generator(step, nth))
            if self._kept:  # what candidates hold goes too
                fewer.append(layout.select(stay))
            other.append(changed(layout, stay, new))
        set_layouts(weights, self.remap, *([fewer] if fewer else []), other)
        self._kept = {}

    def _chosen(
        self, weight: Weight, layout: Layout, norms: np.ndarray, step: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which of a layout's blocks stay, bool, and the flat indices of those that come.

        `norms` are those of its blocks; candidates are not among them.
        """
        flat, count = layout.flat_indices, self._count_at(weight, step)
        n = round(self.share_at(step) * flat.size)
        if self.grow == "degrees":
            return swapped(flat, largest(-norms, n), layout.shape[1], rng)
        new = self._grown(weight, layout, count - flat.size + n, rng)
        return ~largest(-norms, flat.size + new.size - count), new

    def _grown(
        self, weight: Weight, layout: Layout, n: int, rng: np.random.Generator
    ) -> np.ndarray:
        """The flat indices of up to n blocks that are not there."""
        if self.grow == "random":
            return absent_blocks(layout, n, rng)
        candidates = weight.data.layout - layout
        slopes = self._slopes(weight)[candidates.positions_in(weight.data.layout)]
        return candidates.flat_indices[largest(slopes, n)]

    def _slopes(self, weight: Weight) -> np.ndarray:
        """The norms of the gradient of all blocks that it has, candidates among them."""
        grad = weight.parameter.grad
        if grad is None or grad.matrix.layout != weight.data.layout:
            raise ValueError(
                f"{weight.name} has no gradient of its candidates: call step between backward and "
                "the optimizer's step"
            )
        norms: np.ndarray = moved(ops.block_norms(grad.matrix, self.by, weight.tap_features), "cpu")
        return norms

    def _generator(self, step: int, nth: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, step, nth])

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"kept": saved(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any], *, remap: Any = ()) -> None:
        weights, kept = weights_of(self.model), dict[str, Layout]()
        if isinstance(state, Mapping):
            state = {"kept": {}, **state}  # a file keeps no empty dict
            without = state.pop("kept")
            if "first" in state:
                check_keys("state['first']", state["first"], [weight.name for weight in weights])
            kept = {} if without == {} else loaded(weights, without, "kept")
        super().load_state_dict(state, remap=remap)
        self._kept = kept
