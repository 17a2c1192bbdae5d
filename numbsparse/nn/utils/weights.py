"""The block-sparse weights of a model, their gates, and how all follows another layout."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from numbsparse import ops
from numbsparse.autograd import Tensor, no_grad
from numbsparse.block_sparse import BlockSparse
from numbsparse.device import DeviceArray, moved, refuse_in_capture
from numbsparse.dtypes import check_kind, type_name
from numbsparse.layout import Layout
from numbsparse.nn.kept import check_keys, naming
from numbsparse.nn.module import Module
from numbsparse.patterns.checks import integer, number

SCOPES = ("layer", "model")
COUNT, SHARE = partial(integer, least=0), partial(number, most=1)


class Changing:
    """The base of what changes the layouts of a model: its state has them, and `numbers`."""

    model: Any
    remap: Any = ()
    numbers: tuple[tuple[str, Callable[[str, Any], Any]], ...]  # attributes, and what checks them

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to resume; the layouts by name, as SciPy's index arrays."""
        numbers = {name: getattr(self, name) for name, _ in self.numbers}
        layouts = {weight.name: weight.data.layout for weight in weights_of(self.model)}
        return numbers | {"layouts": saved(layouts)}

    def load_state_dict(self, state: Mapping[str, Any], *, remap: Any = ()) -> None:
        """Take what `state_dict()` gave: the weights take its layouts, zeros in new blocks.

        `remap` as in `prune`, besides what was given before. Raises TypeError or ValueError where
        the state is of other weights; nothing is changed then.
        """
        check_keys("state", state, sorted({*dict(self.numbers), "layouts"}))
        numbers = {n: check(f"state[{n!r}]", state[n]) for n, check in self.numbers}
        weights, followers = weights_of(self.model), [*self.remap, *followers_of(remap)]
        set_layouts(weights, followers, list(loaded(weights, state["layouts"]).values()))
        for name, found in numbers.items():
            setattr(self, name, found)


class Weight(NamedTuple):
    name: str
    parameter: Tensor
    tap_features: int | None = None  # see ops.inside
    gate: Any = None  # of its blocks, a Parameter or a Module that gives one
    normed: bool = False  # the length of its columns counts blocks whose gate is zero, too

    @property
    def gates(self) -> list[tuple[Tensor, float]]:
        """The Parameters of 1 x 1 blocks that follow its layout, and what new blocks have there."""
        if self.gate is None or isinstance(self.gate, Tensor):
            return [] if self.gate is None else [(self.gate, 1.0)]
        return [(p, self.gate.fresh) for p in self.gate.parameters()]

    @property
    def data(self) -> BlockSparse:
        data: Any = self.parameter.data  # an array before it is known to be a weight
        return data  # type: ignore[no-any-return]


def as_model(model: Any) -> Any:
    """A Module, or the list of Parameters that stands for one."""
    if isinstance(model, Module):
        return model
    alone = isinstance(model, Tensor | BlockSparse) or not getattr(model, "ndim", 1)
    if alone or not isinstance(model, Iterable):
        raise TypeError(f"model takes a Module or a list of Parameters, got {type_name(model)}")
    return list(model)


def weights_of(model: Any) -> list[Weight]:
    """The block-sparse parameters, each once."""
    if isinstance(model, Module):
        _check_gates(model)
        found = [_in_module(module, name, p) for module, name, p in model._found()]
        found = [w for w in found if not _is_gate(w)]
    else:
        found = [Weight(f"model[{i}]", p) for i, p in enumerate(as_model(model))]
        for weight in found:
            check_kind(weight.name, weight.parameter, Tensor, "a Parameter")
            if _is_gate(weight):
                raise ValueError(
                    f"{weight.name} is a gate, which follows its weight: give the model"
                )
    once = {id(w.parameter): w for w in reversed(found) if isinstance(w.data, BlockSparse)}
    weights = list(once.values())[::-1]
    if not weights:
        raise ValueError("model takes a Module, or a list, with a block-sparse Parameter, got none")
    owners: dict[Any, str] = {}
    for weight in weights:
        values = weight.data.values
        begin = values.address if isinstance(values, DeviceArray) else values.ctypes.data
        if values.size and (other := owners.setdefault(begin, weight.name)) != weight.name:
            raise ValueError(
                f"{other} and {weight.name} share their values in two Parameters, which pruning "
                "would part: let the layers share one Parameter"
            )
    return weights


def _in_module(module: Module, name: str, parameter: Tensor) -> Weight:
    own = own_weight(module) is parameter
    gate, normed = vars(module).get("gate") if own else None, own and "weight_v" in vars(module)
    return Weight(name, parameter, module.tap_features, gate, normed)


def own_weight(module: Module) -> Any:
    """The Parameter of a layer that its gate is for; None where it has none."""
    return vars(module).get("weight", vars(module).get("weight_v"))  # see weight_norm


def _check_gates(model: Module) -> None:
    """Refuse layers that share a weight or a gate alone: one drops what another needs."""
    owners: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        weight, gate = own_weight(module), vars(module).get("gate")
        if not isinstance(weight, Tensor) or not isinstance(weight.data, BlockSparse):
            continue
        pairs = (weight, gate, "a weight but not a gate"), (gate, weight, "a gate but not a weight")
        for shared, own, words in pairs if gate is not None else pairs[:1]:
            other, its = owners.setdefault(id(shared), (name, own))
            if own is not its:
                raise ValueError(
                    f"{other} and {name} share {words}, and of both the gate decides which blocks "
                    "stay: put one layer in both places"
                )


def _is_gate(weight: Weight) -> bool:
    return isinstance(weight.data, BlockSparse) and weight.data.block_size == 1


def norms_of(weights: list[Weight], by: str) -> list[np.ndarray]:
    """Of the blocks of each, times what their gates are in evaluation."""
    found = []
    for weight in weights:
        for gate, _ in weight.gates:
            if gate.matrix.layout != weight.data.layout:
                raise ValueError(
                    f"the gate of {weight.name} takes its layout, {weight.data.layout}, got "
                    f"{gate.matrix.layout}: remap both together"
                )
        norms = moved(ops.block_norms(weight.data, by, weight.tap_features), "cpu")
        if weight.gate is not None:
            norms = norms * abs(gates_of(weight.gate))
        if not np.isfinite(norms).all():
            raise ValueError(f"{weight.name} takes finite values to be pruned, got NaN or infinity")
        found.append(norms)
    return found


def gates_of(gate: Any) -> np.ndarray:
    """The numbers, in evaluation, of a gate: a Parameter, or a Module. (n_blocks,)."""
    with no_grad():
        numbers = gate.matrix.data if isinstance(gate, Tensor) else gate.evaluated().data
    return np.reshape(moved(numbers, "cpu"), -1)


def largest_of_all(
    weights: list[Weight], norms: list[np.ndarray], density: float, scope: str
) -> list[np.ndarray]:
    grids = [w.data.layout.shape[0] * w.data.layout.shape[1] for w in weights]
    if scope == "layer":
        return [largest(own, round(density * n)) for own, n in zip(norms, grids, strict=True)]
    sizes = {w.name: w.data.block_size for w in weights}
    if len(set(sizes.values())) > 1:
        raise ValueError(f'scope="model" compares blocks of one size, got {sizes}: use "layer"')
    kept = largest(np.concatenate(norms), round(density * sum(grids)))
    return np.split(kept, np.cumsum([own.size for own in norms])[:-1])


def keep(
    weights: list[Weight], kept: list[np.ndarray], followers: list[Any], limit: str
) -> dict[str, float]:
    """Those blocks of each weight; what limits them leaves each a block at least."""
    for weight, mask in zip(weights, kept, strict=True):
        if mask.size and not mask.any():
            raise ValueError(
                f"{limit} leaves {weight.name} none of its {mask.size} blocks: keep more, use "
                'scope="layer" with a density that is one block at least, or leave this weight '
                "out, with a list of the other parameters in place of the model"
            )
    layouts = [w.data.layout.select(mask) for w, mask in zip(weights, kept, strict=True)]
    set_layouts(weights, followers, layouts)
    return {weight.name: weight.data.density for weight in weights}


def check_density(weights: list[Weight], density: float) -> None:
    """Refuse, before anything is trained, what would leave a weight no block."""
    for weight in weights:
        rows, columns = weight.data.layout.shape
        if weight.data.n_blocks and not round(density * rows * columns):
            raise ValueError(
                f"density {density} leaves {weight.name} none of its {rows * columns} blocks: keep "
                "one block at least, or give a list of the other parameters"
            )


def largest(norms: np.ndarray, n: int) -> np.ndarray:
    """Whether each is among the n largest; of equal ones the first is, and NaN is the last."""
    if not 0 < n < norms.size:
        return np.full(norms.size, n > 0)
    rising = np.where(np.isnan(norms), np.inf, -norms)
    bound = np.partition(rising, n - 1)[n - 1]  # a sort takes ten times as long
    kept: np.ndarray = rising < bound
    kept[np.flatnonzero(rising == bound)[: n - np.count_nonzero(kept)]] = True
    return kept


def followers_of(remap: Any) -> list[Any]:
    is_one = hasattr(remap, "remap") or not isinstance(remap, Iterable) or hasattr(remap, "shape")
    followers = [remap] if is_one else list(remap)
    for follower in followers:
        follows = callable(getattr(follower, "remap", None)) and hasattr(follower, "__dict__")
        if not follows or isinstance(follower, BlockSparse):
            raise TypeError(f"remap takes optimizers and averages, got {type_name(follower)}")
    return followers


def set_layouts(weights: list[Weight], followers: list[Any], *chain: list[Layout]) -> None:
    """Give the weights, and all that belongs to them, these layouts, one list after the other.

    After an error all is as it was.
    """
    refuse_in_capture("a change of layouts", "call it after the step")
    parameters = [p for w in weights for p in (w.parameter, *(gate for gate, _ in w.gates))]
    before = [(p, p.data, p.grad) for p in parameters]
    states = [(follower, dict(vars(follower))) for follower in followers]
    try:
        for follower in followers:  # who cannot follow says so before anything is computed
            follower.remap()
        for layouts in chain:
            _set_layouts(weights, layouts)
            for follower in followers:
                follower.remap()
    except BaseException:  # such as memory that is not there
        for parameter, data, grad in before:
            if parameter.data is not data:
                parameter.data, parameter.grad = data, grad
        for follower, state in states:
            vars(follower).update(state)
        raise


def _set_layouts(weights: list[Weight], layouts: list[Layout]) -> None:
    changes = []
    for weight, layout in zip(weights, layouts, strict=True):
        belonging = [(weight.parameter, 0.0), *weight.gates]
        changes += [(p, layout, new) for p, new in belonging if layout != p.matrix.layout]
    moved = [_remapped(*change) for change in changes]
    grads = [None if p.grad is None else Tensor(p.grad.matrix.remap(new)) for p, new, _ in changes]
    for (parameter, *_), data, grad in zip(changes, moved, grads, strict=True):
        parameter.data, parameter.grad = data, grad


def _remapped(parameter: Tensor, layout: Layout, new: float) -> BlockSparse:
    """The values in another layout, those of new blocks all `new`."""
    data = parameter.matrix
    if not new:
        return data.remap(layout)
    values = ops.full((layout.n_blocks, *data.values.shape[1:]), new, data.dtype, data.device)
    return ops.remap(data, layout, BlockSparse(values, layout, shape=data.shape))


def saved(layouts: Mapping[str, Layout]) -> dict[str, Any]:
    """For a state dict: the layouts by name, as SciPy's index arrays."""
    return {n: {"indptr": a.indptr, "indices": a.indices} for n, a in layouts.items()}


def loaded(weights: list[Weight], state: Any, argument: str = "layouts") -> dict[str, Layout]:
    """The layouts of `saved`, in the order of the weights."""
    argument = f"state[{argument!r}]"
    check_keys(argument, state, [weight.name for weight in weights])
    return {w.name: _loaded(f"{argument}[{w.name!r}]", state[w.name], w) for w in weights}


def _loaded(argument: str, arrays: Any, weight: Weight) -> Layout:
    if not isinstance(arrays, Mapping) or set(arrays) != {"indptr", "indices"}:
        raise ValueError(f"{argument} takes indptr and indices, got {arrays!r}")
    with naming(argument):
        return Layout.from_arrays(**arrays, shape=weight.data.layout.shape)
