"""Pruning: block-sparse weights keep their blocks of largest norm, at once or step by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor
from numbsparse.block_sparse import BlockSparse
from numbsparse.dtypes import type_name
from numbsparse.layout import Layout
from numbsparse.nn.module import Module
from numbsparse.patterns.checks import integer, number

SCOPES = ("layer", "model")


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
    weights, followers = _weights_of(model), _followers(remap)
    if density is not None:
        density = number("density", density, most=1)
        kept = _largest_of_all(weights, _norms(weights, by), density, _checked_scope(scope))
    else:
        least = number("threshold", threshold)
        kept = [norms >= least for norms in _norms(weights, by)]
    limit = f"threshold {threshold}" if density is None else f"density {density} of the {scope}"
    for weight, mask in zip(weights, kept, strict=True):
        if mask.size and not mask.any():
            raise ValueError(
                f"{limit} leaves {weight.name} none of its {mask.size} blocks: keep more, take "
                'scope="layer" with a density that is one block at least, or leave this weight '
                "out, with a list of the other parameters in place of the model"
            )
    layouts = [w.data.layout.select(mask) for w, mask in zip(weights, kept, strict=True)]
    _set_layouts(weights, layouts, followers)
    return {weight.name: weight.data.density for weight in weights}


class GradualPruning:
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
        self.model = model if isinstance(model, Module) else list(model)
        self.density = number("density", density, most=1)
        self.start, self.every = integer("start", start, least=0), integer("every", every)
        self.stop = integer("stop", stop, least=self.start + 1)
        self.remap, self.steps = _followers(remap), 0
        self._how: Any = {"by": ops.checked_norm(by), "scope": _checked_scope(scope)}
        layouts = [weight.data.layout for weight in _weights_of(self.model)]
        self._first = sum(a.n_blocks for a in layouts) / sum(
            a.shape[0] * a.shape[1] for a in layouts
        )

    def density_at(self, step: int) -> float:
        """The density that is aimed at after so many steps."""
        done = min(max((step - self.start) / (self.stop - self.start), 0), 1)
        return self.density + (self._first - self.density) * (1 - done) ** 3

    def step(self) -> None:
        """Count a step, and prune where one is due; after an error it is not counted."""
        step = self.steps + 1
        due = (step - self.start) % self.every == 0 or step == self.stop
        if due and self.start <= step <= self.stop:
            prune(self.model, self.density_at(step), remap=self.remap, **self._how)
        self.steps = step

    def state_dict(self) -> dict[str, Any]:
        """Steps, the first density, and the layouts by name, as SciPy's index arrays."""
        layouts = {weight.name: weight.data.layout for weight in _weights_of(self.model)}
        return {"steps": self.steps, "first": self._first} | {
            "layouts": {n: {"indptr": a.indptr, "indices": a.indices} for n, a in layouts.items()}
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict()` gave: the weights take its layouts, zeros in new blocks.

        Raises TypeError or ValueError where it is of other weights; nothing is changed then.
        """
        if not isinstance(state, Mapping) or set(state) != {"steps", "first", "layouts"}:
            raise ValueError(f"state takes steps, first and layouts, got {state!r}")
        weights = _weights_of(self.model)
        names, saved = [weight.name for weight in weights], state["layouts"]
        if not isinstance(saved, Mapping) or set(names) != set(saved):
            raise ValueError(f"state['layouts'] takes those of {names}, got {list(saved)}")
        steps = integer("state['steps']", state["steps"], least=0)
        first = number("state['first']", state["first"], most=1)
        layouts = [
            Layout.from_arrays(
                saved[w.name]["indptr"], saved[w.name]["indices"], w.data.layout.shape
            )
            for w in weights
        ]
        _set_layouts(weights, layouts, self.remap)
        self.steps, self._first = steps, first


class _Weight(NamedTuple):
    name: str
    parameter: Tensor
    tap_features: int | None = None  # see ops.inside
    gate: Any = None  # of its blocks, a Parameter or a Module that gives one

    @property
    def gates(self) -> list[tuple[Tensor, float]]:
        """The Parameters of 1 x 1 blocks that follow its layout, and what new blocks have there."""
        if self.gate is None or isinstance(self.gate, Tensor):
            return [] if self.gate is None else [(self.gate, 1.0)]
        return [(p, self.gate.fresh) for p in self.gate.parameters()]

    @property
    def data(self) -> BlockSparse:
        return self.parameter.data


def _weights_of(model: Any) -> list[_Weight]:
    """The block-sparse parameters, each once."""
    if isinstance(model, Module):
        found = [_in_module(module, name, p) for module, name, p in model._found()]
        found = [w for w in found if not _is_gate(w)]
    else:
        listed = [] if isinstance(model, Tensor) else list(model)
        found = [_Weight(f"model[{i}]", p) for i, p in enumerate(listed)]
        for weight in found:
            if not isinstance(weight.parameter, Tensor):
                raise TypeError(
                    f"{weight.name} takes a Parameter, got {type_name(weight.parameter)}"
                )
            if _is_gate(weight):
                raise ValueError(
                    f"{weight.name} is a gate, which follows its weight: give the model"
                )
    once = {id(w.parameter): w for w in reversed(found) if isinstance(w.data, BlockSparse)}
    weights = list(once.values())[::-1]
    if not weights:
        raise ValueError("model takes a Module, or a list, with a block-sparse Parameter, got none")
    owners: dict[int, str] = {}
    for weight in weights:
        if (other := owners.setdefault(id(weight.data.values), weight.name)) != weight.name:
            raise ValueError(
                f"{other} and {weight.name} share their values in two Parameters, which pruning "
                "would part: let the layers share one Parameter"
            )
    return weights


def _in_module(module: Module, name: str, parameter: Tensor) -> _Weight:
    gate = vars(module).get("gate") if vars(module).get("weight") is parameter else None
    return _Weight(name, parameter, module.tap_features, gate)


def _is_gate(weight: _Weight) -> bool:
    return isinstance(weight.data, BlockSparse) and weight.data.block_size == 1


def _norms(weights: list[_Weight], by: str) -> list[np.ndarray]:
    """Of the blocks of each, times what their gates are in evaluation."""
    found = []
    for weight in weights:
        norms = _on_host(ops.block_norms(weight.data, by, weight.tap_features))
        if weight.gate is not None:
            norms = norms * abs(gates_of(weight.gate))
        if not np.isfinite(norms).all():
            raise ValueError(f"{weight.name} takes finite values to be pruned, got NaN or infinity")
        found.append(norms)
    return found


def gates_of(gate: Any) -> np.ndarray:
    """The numbers, in evaluation, of a gate: a Parameter, or a Module. (n_blocks,)."""
    matrix = (gate if isinstance(gate, Tensor) else gate.evaluated()).data
    return _on_host(matrix.data).reshape(-1)


def _on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.numpy()


def _largest_of_all(
    weights: list[_Weight], norms: list[np.ndarray], density: float, scope: str
) -> list[np.ndarray]:
    grids = [w.data.layout.shape[0] * w.data.layout.shape[1] for w in weights]
    if scope == "layer":
        return [_largest(own, round(density * n)) for own, n in zip(norms, grids, strict=True)]
    sizes = {w.name: w.data.block_size for w in weights}
    if len(set(sizes.values())) > 1:
        raise ValueError(f'scope="model" compares blocks of one size, got {sizes}: take "layer"')
    kept = _largest(np.concatenate(norms), round(density * sum(grids)))
    return np.split(kept, np.cumsum([own.size for own in norms])[:-1])


def _largest(norms: np.ndarray, n: int) -> np.ndarray:
    """Whether each is among the n largest; of equal ones the first is."""
    kept = np.zeros(norms.size, bool)
    kept[np.argsort(-norms, kind="stable")[:n]] = True
    return kept


def _checked_scope(scope: str) -> str:
    if scope not in SCOPES:
        raise ValueError(f"scope takes one of {', '.join(SCOPES)}, got {scope!r}")
    return scope


def _followers(remap: Any) -> list[Any]:
    followers = [remap] if hasattr(remap, "remap") else list(remap)
    for follower in followers:
        if not callable(getattr(follower, "remap", None)):
            raise TypeError(f"remap takes optimizers and averages, got {type_name(follower)}")
    return followers


def _set_layouts(weights: list[_Weight], layouts: list[Layout], followers: list[Any]) -> None:
    for follower in followers:  # who cannot follow says so before anything is changed
        follower.remap()
    changes = []
    for weight, layout in zip(weights, layouts, strict=True):
        belonging = [(weight.parameter, 0.0), *weight.gates]
        changes += [(p, layout, new) for p, new in belonging if layout != p.data.layout]
    moved = [_remapped(*change) for change in changes]
    grads = [None if p.grad is None else Tensor(p.grad.data.remap(new)) for p, new, _ in changes]
    for (parameter, *_), data, grad in zip(changes, moved, grads, strict=True):
        parameter.data, parameter.grad = data, grad
    for follower in followers:
        follower.remap()


def _remapped(parameter: Tensor, layout: Layout, new: float) -> BlockSparse:
    """The values in another layout, those of new blocks all `new`."""
    data = parameter.data
    if not new:
        return data.remap(layout)
    values = ops.full((layout.n_blocks, *data.values.shape[1:]), new, data.dtype, data.place)
    return ops.remap(data, layout, BlockSparse(values, layout, shape=data.shape))
