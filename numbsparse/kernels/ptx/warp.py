"""In the simulator, 32 threads meet and run an instruction as one warp, or 128 as a warpgroup."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

PATIENCE = 60.0
"""Seconds that lanes wait for the others; then they raise and end."""

WARP, WARPGROUP = 32, 128

_lock = threading.Lock()
# A BlockManager runs one block of one launch, and its warps end with it.
_warps: WeakKeyDictionary[Any, dict[tuple[int, int], Warp]] = WeakKeyDictionary()


def together(
    meaning: Callable[..., np.ndarray], *operands: Any, shared: tuple[Any, ...] = (), of: int = WARP
) -> Any:
    """Run `meaning` on every lane's operands, stacked along a first axis; this lane's result.

    `shared` are the same for all lanes, and come after those. Raises RuntimeError where the lanes
    do not all come, or come for different things.
    """
    thread: Any = threading.current_thread()
    number, lane = divmod(thread.thread_id, of)
    block = thread._manager
    threads = int(np.prod(block._block_dim))
    if of * number + of > threads:
        raise RuntimeError(
            f"{meaning.__name__} takes warps of {of} threads; a block of {threads} ends inside one"
        )
    if getattr(block, "takes_turns", False):
        raise RuntimeError(f"{meaning.__name__} takes all lanes of a warp at once, not in turns")
    with _lock:
        warp = _warps.setdefault(block, {}).setdefault((of, number), Warp(of))
    return warp.run(lane, meaning, operands, shared)


class Warp:
    """One barrier per instruction: the last lane to come computes, and then all go on.

    A lane comes back only after it took its result, so the next instruction overwrites nothing.
    """

    def __init__(self, lanes: int = WARP) -> None:
        self.lanes = range(lanes)
        self.barrier = threading.Barrier(lanes, self.compute)
        self.calls: dict[int, tuple[Callable[..., np.ndarray], tuple[Any, ...]]] = {}
        self.shared: tuple[Any, ...] = ()
        self.results: Any = None
        self.error = ""

    def run(
        self,
        lane: int,
        meaning: Callable[..., np.ndarray],
        operands: tuple[Any, ...],
        shared: tuple[Any, ...] = (),
    ) -> Any:
        self.calls[lane] = meaning, operands
        self.shared = shared
        try:
            self.barrier.wait(PATIENCE)
        except threading.BrokenBarrierError:
            self.error = self.error or (
                f"the lanes of a warp run {meaning.__name__} together, but after {PATIENCE:g} s "
                f"lanes {sorted(set(self.lanes) - set(self.calls))} had not come"
            )
        if self.error:
            raise RuntimeError(self.error)
        return self.results[lane]

    def compute(self) -> None:
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
        stacked = (np.stack(operand) for operand in zip(*(o for _, o in calls), strict=True))
        with np.errstate(all="ignore"):  # infinities and NaNs are results like others
            self.results = meaning(*stacked, *self.shared)
