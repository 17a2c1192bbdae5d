"""In the simulator, 32 threads run an instruction together, as a warp, or 128 as a warpgroup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse.simulator import SIMULATED
from numbsparse.simulator.threads import Worker, current

if SIMULATED:
    import numbsparse.simulator.launch  # noqa: F401, threads take turns in Numba's own launches too

WARP, WARPGROUP = 32, 128


def together(
    meaning: Callable[..., np.ndarray], *operands: Any, shared: tuple[Any, ...] = (), of: int = WARP
) -> Any:
    """Run `meaning` on every lane's operands, stacked along a first axis; this lane's result.

    `shared` are the same for all lanes, and follow those. Raises RuntimeError where the lanes
    do not all arrive, or arrive for different things.
    """
    thread = current()
    block, (number, lane) = thread.block, divmod(thread.thread_id, of)
    warp: Warp | None = block.own.get((of, number))
    if warp is None:
        if of * number + of > block.threads:
            raise RuntimeError(
                f"{meaning.__name__} takes warps of {of} threads; "
                f"a block of {block.threads} ends inside one"
            )
        warp = block.own[of, number] = Warp(of)
    return warp.run(thread, lane, meaning, operands, shared)


class Warp:
    """The last lane to arrive computes, and then all continue.

    A lane returns only after it took its result, so the next instruction overwrites nothing.
    """

    def __init__(self, lanes: int) -> None:
        self.lanes = range(lanes)
        self.calls: dict[int, tuple[Callable[..., np.ndarray], tuple[Any, ...]]] = {}
        self.waiting: list[Worker] = []
        self.results: Any = None
        self.error = ""

    def run(
        self,
        thread: Worker,
        lane: int,
        meaning: Callable[..., np.ndarray],
        operands: tuple[Any, ...],
        shared: tuple[Any, ...],
    ) -> Any:
        self.calls[lane] = meaning, operands
        if len(self.calls) < len(self.lanes):
            self.waiting.append(thread)
            thread.wait(self.missing)
        else:
            self.compute(shared)
            thread.wake(self.waiting)
        if self.error:
            raise RuntimeError(self.error)
        return self.results[lane]

    def missing(self) -> str:
        names = sorted({meaning.__name__ for meaning, _ in self.calls.values()})
        return f"lanes {sorted({*self.lanes} - {*self.calls})} to run {' or '.join(names)}"

    def compute(self, shared: tuple[Any, ...]) -> None:
        calls = [self.calls[lane] for lane in self.lanes]
        self.calls = {}
        lanes: dict[Any, list[int]] = {}
        for lane, (meaning, _) in enumerate(calls):
            lanes.setdefault(meaning, []).append(lane)
        if len(lanes) > 1:
            self.error = "the lanes of a warp went apart: " + ", ".join(
                f"{meaning.__name__} in lanes {at}" for meaning, at in lanes.items()
            )
            return
        stacked = (np.array(operand) for operand in zip(*(o for _, o in calls), strict=True))
        with np.errstate(all="ignore"):  # infinities and NaNs are results like others
            self.results = meaning(*stacked, *shared)
