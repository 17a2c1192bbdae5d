"""A small-world LSTM of `numbsparse.torch` on several cards, under torch's DDP."""

import socket
from argparse import Namespace
from typing import Any

from many_cards_lstm import (
    INPUTS,
    STEPS,
    B,
    about,
    checked,
    drawn,
    in_both_ways,
    small_world,
    some_of,
)
from many_cards_times import seconds_of_each

from numbsparse.distributed import Group


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
        ours, _ = in_both_ways(group, options, STEPS[0])
        names = {"alone": "one", "alone, uncaptured": "uncaptured", "DataParallel": "all"}
        calls: dict[str, Any] = {name: ours[way] for name, way in names.items()}
        weights: dict[str, Any] = {}
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

            calls[name], weights[name] = step, own.weight_hh_l0
        size = sum(p.numel() for p in net.parameters())
        whole = torch.zeros(size, dtype=dtype, device=where)
        calls["torch's all_reduce of as many bytes"] = lambda: torch.distributed.all_reduce(whole)
        seconds = seconds_of_each(group, calls, options.repeats, wait)
        common = about(group, options, options.units)
        rows = [{"step": name, **common, "seconds": seconds[name]} for name in calls]
        gradients = {name: some_of(w.grad.cpu()) for name, w in weights.items()}
        exact = group.all_reduce(gradients["numbsparse.torch alone"], "mean")
        for row in rows:
            if row["step"] in DDP:
                row["error"] = checked(exact, gradients[row["step"]])
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
