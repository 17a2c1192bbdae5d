"""Which blocks of a simulated grid run at the same time: one, a cluster, or all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numba.cuda.simulator.kernel import BlockManager

from numbsparse.device.threads import Block, Turns

Shape = tuple[int, ...]  # along x, y and z

ALONE: Shape = (1, 1, 1)

_cluster = _together = ALONE
_coming: dict[Shape, list[Block]] = {}  # blocks that are not all there yet


@contextmanager
def at_once(grid: Shape, cluster: Shape | None, together: bool) -> Iterator[None]:
    """While a kernel is launched whose blocks wait for others, of their cluster or of the grid."""
    global _cluster, _together
    shape = ALONE if cluster is None else _three(cluster)
    if any(n % c for n, c in zip(_three(grid), shape, strict=True)):
        raise ValueError(f"grid takes a multiple of the cluster {cluster}, got {grid}")
    _cluster, _together = shape, _three(grid) if together else shape
    try:
        yield
    finally:
        _cluster = _together = ALONE
        _coming.clear()


def run_block(manager: Any, place: Sequence[int], *args: Any) -> None:
    """In the place of `BlockManager.run`; under `cuda.jit(debug=True)` a division by 0 raises."""

    def work() -> None:
        with np.errstate(divide="raise"):
            manager._f(*args)

    block = Block(manager, place, work if manager._debug else partial(manager._f, *args))
    blocks = _coming.setdefault(_group(block, _together), [])
    blocks.append(block)
    if len(blocks) == prod(_together):
        del _coming[_group(block, _together)]
        for each in blocks:
            each.cluster = [b for b in blocks if _group(b, _cluster) == _group(each, _cluster)]
        Turns(blocks).run()


def _three(shape: Shape) -> Shape:
    return (*shape, *ALONE)[:3]


def _group(block: Block, shape: Shape) -> Shape:
    return tuple(p // n for p, n in zip(_three(block.place), shape, strict=True))


BlockManager.run = run_block
