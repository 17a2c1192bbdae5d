"""Small-world LSTMs on several cards: data parallel, under torch's DDP, and split."""

from __future__ import annotations

import gc
import socket
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
from many_cards_times import captured, seconds_of

import numbsparse as ns
import numbsparse.distributed as dist
from numbsparse import nn, ops
from numbsparse.distributed import Group
from numbsparse.distributed.split import Exchange

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


STEPS = (
    *("forward and backward", "with Adam", "with Adam, its state sharded"),
    *("forward and backward, peer memory", "with Adam, peer memory"),
)


def data_parallel(group: Group, options: Namespace, names: Any = STEPS) -> list[dict[str, Any]]:
    """A step alone and with the others; without an optimizer, with Adam, with a part of Adam.

    Two GPUs also do it by each other's memory.
    """
    rows = []
    for name in names:
        by_peers = "peer memory" in name
        if by_peers and (group.size != 2 or group.backend != "nccl"):
            continue
        row: dict[str, Any] = {"step": name, **_about(group, options, options.units)}
        gradients = []
        for part in ("one", "all"):
            model: Any = made(options.units, options).to(options.device)
            row["gradients"] = sum(p.values.nbytes for p in model.parameters())
            optimizer: Any = nn.optim.Adam(model.parameters(), 1e-3) if "Adam" in name else None
            if part == "all":
                dist.DataParallel(model, group, peer_memory=by_peers)
                optimizer = dist.ShardedOptimizer(optimizer, group) if "sh" in name else optimizer
            step = passes(model, optimizer, options, options.units, group.rank)
            row[part] = seconds_of(group, captured(step, options), options.repeats)
            if name == STEPS[0] and part == "one":
                row["uncaptured"] = seconds_of(group, step, options.repeats)
            gradients.append(some_of(model.layers[0].weight_hh.grad.values))
            gc.collect()  # a captured step and its model know each other
        if "Adam" not in name:  # else it is that of other weights
            row["error"] = checked(group.all_reduce(gradients[0], "mean"), gradients[1])
        rows.append(row)
    return rows


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


def ddp(group: Group, options: Namespace) -> list[dict[str, Any]]:
    """The same passes of `numbsparse.torch`, on one card and in torch's DDP, never captured."""
    import torch

    import numbsparse.torch as nst

    wait: Any = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    with _in_torch(group, options) as where:
        dtype = torch.float16 if options.device == "cuda" else torch.float32
        x, dy = (
            torch.as_tensor(drawn(options, n, group.rank), device=where)
            for n in (INPUTS, options.units)
        )
        given: Any = {"layout": small_world(options.units), "block_size": B}
        (ours,) = data_parallel(group, options, STEPS[:1])
        about = _about(group, options, options.units)
        rows = [
            {"step": name, **about, "seconds": ours[key]}
            for name, key in (("alone", "one"), ("alone, uncaptured", "uncaptured"),
                              ("DataParallel", "all"))
        ]  # fmt: skip
        exact: Any = None  # the mean of the gradients of all ranks
        for name, how in (("numbsparse.torch alone", None), *DDP.items()):
            torch.manual_seed(0)
            own = nst.LSTM(INPUTS, options.units, **given, device=where, dtype=dtype)
            net: Any = own
            if how is not None:
                net = torch.nn.parallel.DistributedDataParallel(net, **how)

            def step(net: Any = net) -> None:
                net.zero_grad()
                y, _ = net(x)
                y.backward(dy)

            seconds = seconds_of(group, step, options.repeats, wait)
            gradient = some_of(own.weight_hh_l0.grad.cpu())
            rows.append({"step": name, **about, "seconds": seconds})
            if how is None:
                exact = group.all_reduce(gradient, "mean")
            else:
                rows[-1]["error"] = checked(exact, gradient)
        whole = torch.zeros(sum(p.numel() for p in net.parameters()), dtype=dtype, device=where)
        reduce = lambda: torch.distributed.all_reduce(whole)  # noqa: E731
        seconds = seconds_of(group, reduce, options.repeats, wait)
        rows.append({"step": "torch's all_reduce of as many bytes", **about, "seconds": seconds})
    return rows


DDP: dict[str, dict[str, Any]] = {
    "DDP": {},
    "DDP, gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "DDP, gradient_as_bucket_view, one bucket": {
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 1000,
    },
}


class _in_torch:
    """torch's process group of the same ranks, within a context; gives the device's name."""

    def __init__(self, group: Group, options: Namespace):
        self.group, self.on_gpu = group, options.device == "cuda"

    def __enter__(self) -> str:
        import torch

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = self.group.share(free.getsockname()[1])[0]
        where = "cpu"
        if self.on_gpu:
            where = f"cuda:{self.group.local_rank % torch.cuda.device_count()}"
            torch.cuda.set_device(where)
        torch.distributed.init_process_group(
            "nccl" if self.on_gpu else "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=self.group.rank,
            world_size=self.group.size,
        )
        return where

    def __exit__(self, *_: Any) -> None:
        import torch

        torch.distributed.destroy_process_group()


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
        row: dict[str, Any] = {**_about(group, options, units)}
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


def _about(group: Group, options: Namespace, units: int) -> dict[str, Any]:
    sizes = {"steps": options.steps, "batch": options.batch, "units": units}
    dtype = "float16" if options.device == "cuda" else "float32"
    return {
        "ranks": group.size,
        **sizes,
        "density": float(small_world(units).mean()),
        "dtype": dtype,
    }
