"""How long ranks take for what they do together; and for NCCL's sums and copies alone."""

import time
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import numpy as np

import numbsparse as ns
from numbsparse import device
from numbsparse.distributed import Group

ROUNDS, IN_A_GRAPH = 5, 10
KIB, MIB = 2**10, 2**20


def wait() -> None:
    """For the GPU, if there is one, to do what our stream was given."""
    if device.is_available():
        device.synchronize()


def seconds_of(
    group: Group, call: Callable[[], Any], repeats: int, wait: Callable[[], None] = wait
) -> float:
    """Median seconds of a call, of the slowest rank: all of them call it as often."""
    return seconds_of_each(group, {"": call}, repeats, wait)[""]


def seconds_of_each(
    group: Group, calls: dict[str, Callable[[], Any]], repeats: int, wait: Callable[[], None] = wait
) -> dict[str, float]:
    """The same of several calls in turns: a card at work changes its clock."""
    for call in calls.values():
        for _ in range(3):  # compiles, is captured, and is replayed
            call()
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in product(range(ROUNDS), calls.items()):
        call()
        wait()
        group.barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        rounds[name].append((time.perf_counter() - began) / repeats)
    return {
        name: median(map(max, zip(*group.share(own), strict=True))) for name, own in rounds.items()
    }


def captured(step: Callable[[], Any], options: Namespace) -> Callable[[], Any]:
    """Replayed as one graph, where there is a GPU."""
    return ns.graph(step) if options.device == "cuda" else step


def collectives(group: Group, options: Namespace) -> list[dict[str, Any]]:
    """Seconds of each, captured several at a time, by bytes of a rank."""
    rows = []
    sizes = (4 * KIB, MIB, 16 * MIB, 64 * MIB, 512 * MIB) if options.device == "cuda" else (KIB,)
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        for nbytes in sizes:
            seconds = seconds_of(group, _repeated(group, name, nbytes, options), options.repeats)
            row = {"ranks": group.size, "collective": name, "bytes": nbytes}
            rows.append(row | {"seconds": seconds / IN_A_GRAPH})
    return rows


def _repeated(group: Group, name: str, nbytes: int, options: Namespace) -> Callable[[], Any]:
    """Some of them, of float16; each rank has `nbytes` to give, or to get of a sum that is cut."""
    shapes = {
        "all_reduce": ((nbytes // 2,),) * 2,
        "all_gather": ((1, nbytes // 2), (group.size, nbytes // 2)),
        "reduce_scatter": ((group.size, nbytes // 2), (1, nbytes // 2)),
    }
    put: Any = ns.to_device if options.device == "cuda" else np.asarray
    x, out = (put(np.zeros(shape, np.float16)) for shape in shapes[name])
    collective = getattr(group, name)

    def several() -> None:
        for _ in range(IN_A_GRAPH):
            collective(x, out=out)

    return captured(several, options)
