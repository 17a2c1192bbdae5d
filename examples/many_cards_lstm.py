"""Small-world LSTMs on several cards: data parallel, and split."""

import gc
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
from many_cards_times import captured, seconds_of, seconds_of_each

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import nn, ops
from numbsparse.distributed import Group
from numbsparse.distributed.exchange import Exchange

INPUTS, DENSITY, B = 64, 0.03, 32
CHECKED = 1024  # blocks of the gradient


def small_world(units: int) -> np.ndarray:
    n = units // B
    return ns.patterns.barabasi_albert(n, max(round(DENSITY * n / 2), 1), seed=0)


def made(units: int, options: Namespace) -> nn.LSTM:
    dtype = "float16" if options.device == "cuda" else "float32"
    how: Any = {"layout": small_world(units), "block_size": B, "dtype": dtype, "seed": 0}
    return nn.LSTM(INPUTS, units, **how)


def drawn(options: Namespace, features: int, rank: int) -> Any:
    """(time, batch, features) in the model's dtype, alike in all steps, other ones on each rank."""
    dtype = np.float16 if options.device == "cuda" else np.float32
    rng = np.random.default_rng([features, rank])
    x = rng.standard_normal((1, options.batch, features), np.float32).astype(dtype)
    if options.device == "cpu":
        return x.repeat(options.steps, axis=0)
    one, steps = ns.to_device(x[0]), ops.zeros((options.steps, *x.shape[1:]), dtype, "cuda")
    for t in range(options.steps):
        ops.copy_into(steps[t], one)
    return steps


def passes(model: Any, parts: Any, options: Namespace, units: int, rank: int) -> Callable[[], Any]:
    """A forward and a backward pass, and what `parts.step` does then."""
    x, dy = drawn(options, INPUTS, rank), drawn(options, units, rank)

    def step() -> None:
        y, _ = model(x)
        model.zero_grad()
        y.backward(dy)
        if parts is not None:
            parts.step()

    return step


STEPS = ("forward and backward", "with Adam", "with Adam, its state sharded")


def data_parallel(group: Group, options: Namespace, names: Any = STEPS) -> list[dict[str, Any]]:
    """A step alone and with the others; without an optimizer, with Adam, with a part of Adam."""
    rows = []
    for name in names:
        calls, weights = in_both_ways(group, options, name)
        row: dict[str, Any] = {"step": name, **about(group, options, options.units)}
        row["gradients"] = sum(p.values.nbytes for p in weights["one"])
        row |= seconds_of_each(group, calls, options.repeats)
        if "Adam" not in name:  # else the gradients are those of other weights
            row["error"] = error_of(group, weights)
        rows.append(row)
        del calls, weights
        gc.collect()  # a captured step and its model know each other
    return rows


def in_both_ways(group: Group, options: Namespace, name: str) -> tuple[dict[str, Any], Any]:
    """Steps of "one" card and of "all", and their models' parameters."""
    calls: dict[str, Any] = {}
    weights: dict[str, list[Any]] = {}
    for way in ("one", "all", *(["uncaptured"] if name == STEPS[0] else [])):
        model: Any = made(options.units, options).to(options.device)
        optimizer: Any = nn.optim.Adam(model.parameters(), 1e-3) if "Adam" in name else None
        if way == "all":
            dist.DataParallel(model, group)
            optimizer = dist.ShardedOptimizer(optimizer, group) if "sharded" in name else optimizer
        step = passes(model, optimizer, options, options.units, group.rank)
        calls[way] = step if way == "uncaptured" else captured(step, options)
        weights[way] = list(model.parameters())
    return calls, weights


def error_of(group: Group, weights: dict[str, list[Any]]) -> float:
    """How far the ranks' gradient is from the mean of those that each found alone."""
    largest = {way: max(found, key=lambda p: p.values.nbytes) for way, found in weights.items()}
    one, got = (some_of(largest[way].grad.values) for way in ("one", "all"))
    return checked(group.all_reduce(one, "mean"), got)


def some_of(gradient: Any) -> np.ndarray:
    """The first blocks, in float64 on the host."""
    blocks = gradient[:CHECKED]
    return (blocks if isinstance(blocks, np.ndarray) else blocks.numpy()).astype(np.float64)


def checked(exact: np.ndarray, got: np.ndarray) -> float:
    """The relative error of the ranks' mean; ValueError where it is no rounding."""
    error = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
    if not error < 1e-2:
        raise ValueError(f"the gradient is not the mean over the ranks: relative error {error:.1e}")
    return error


class Alone(Exchange):
    """A rank's own part of what is exchanged: the others' stays as it is."""

    def gather(self, part: Any, whole: Any) -> Any:
        ops.copy_into(self.part(whole), part)
        return whole

    def collect(self, term: Any, part: Any) -> Any:
        ops.copy_into(part, self.part(term))
        return part


class Exchanging(dist.SplitLSTM):
    """A split LSTM that exchanges in one way or another, or waits for nobody.

    Of the recurrent weight there is this rank's part alone: the whole one is large.
    """

    way = "share"
    weight_hh_l0: nn.Parameter

    def __init__(self, units: int, options: Namespace, group: Group):
        dtype = "float16" if options.device == "cuda" else "float32"
        how: Any = {"layout": np.eye(units // B), "block_size": B, "dtype": dtype, "seed": 0}
        super().__init__(nn.LSTM(INPUTS, units, **how), group)
        self.weight_hh_l0.values[:] *= (B / DENSITY / units) ** 0.5  # as so many inputs take it
        self.to(options.device)
        few = self.weight_hh_l0.values
        pattern = np.split(small_world(units), group.size, axis=1)[group.rank]
        layout = ns.Layout(pattern.repeat(ops.GATES, axis=1))
        blocks = ops.zeros((layout.n_blocks, B, B), dtype, options.device)
        for first in range(0, layout.n_blocks, len(few)):
            ops.copy_into(blocks[first : first + len(few)], few[: layout.n_blocks - first])
        self.weight_hh_l0.data = ns.BlockSparse(blocks, layout)

    def _exchange(self, nbytes: int) -> Exchange:
        self.peer_memory = self.way == "peer memory"
        return Alone(self.group) if self.way == "share" else super()._exchange(nbytes)


def split(group: Group, options: Namespace) -> list[dict[str, Any]]:
    """Of each size, a step of time of a rank's share alone, by NCCL and by peers' memory."""
    rows = []
    for units in options.split_units:
        row: dict[str, Any] = {**about(group, options, units)}
        layer = Exchanging(units, options, group)
        step = passes(layer, None, options, units, 0)
        for way in ("share", group.backend, *(["peer memory"] if group.backend == "nccl" else [])):
            layer.way = way
            row[way] = seconds_of(group, captured(step, options), options.repeats) / options.steps
            gc.collect()
        rows.append(row)
        del layer, step
        gc.collect()
    return rows


def about(group: Group, options: Namespace, units: int) -> dict[str, Any]:
    sizes = {"steps": options.steps, "batch": options.batch, "units": units}
    dtype = "float16" if options.device == "cuda" else "float32"
    return {
        "ranks": group.size,
        **sizes,
        "density": float(small_world(units).mean()),
        "dtype": dtype,
    }
