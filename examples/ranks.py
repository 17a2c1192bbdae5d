"""Programs on several cards: each rank trains on a part of the batch, and the first one writes.

    python -m numbsparse.distributed --ranks 2 examples/char_lm.py --batch 64

starts two on this host, as do torchrun and mpirun. Their results are those of one, to rounding.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from typing import Any

import numpy as np

import numbsparse.distributed as dist
from numbsparse.distributed import Group


@contextmanager
def ranks() -> Iterator[Group]:
    """All ranks; what others than the first would print is dropped."""
    with dist.init() as group, ExitStack() as silent:
        if group.rank:
            nowhere = silent.enter_context(open(os.devnull, "w", encoding="utf-8"))
            silent.enter_context(redirect_stdout(nowhere))
            silent.enter_context(redirect_stderr(nowhere))
        yield group


@cache
def alone() -> Group:
    """This rank by itself, for work that ranks share out; all of them call it first together."""
    everyone = dist.init()
    return everyone.split(everyone.rank)


def part_of(batch: int, group: Group, name: str = "--batch") -> slice:
    """This rank's rows of a batch; ValueError where the ranks cannot have equally many."""
    if batch % group.size:
        raise ValueError(f"{name} takes a multiple of the {group.size} ranks, got {batch}")
    rows = batch // group.size
    return slice(group.rank * rows, (group.rank + 1) * rows)


def mean(number: float, group: Group) -> float:
    """Over the ranks."""
    return float(group.all_reduce(np.array(number, np.float64), "mean"))


def whole(part: Any, axis: int, group: Group) -> np.ndarray:
    """The arrays of all ranks as one, along their axis of the batch."""
    rows = np.ascontiguousarray(np.moveaxis(part.numpy(), axis, 0))
    return np.moveaxis(group.all_gather(rows), 0, axis)
