"""In the simulator, 32 threads run an instruction together, as a warp, or 128 as a warpgroup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from numbsparse.simulator import SIMULATED
from numbsparse.simulator.threads import Worker, current

if SIMULATED:
    import numbsparse.simulator.launch  # noqa: F401, threads take turns in Numba's own launches too

WARP, WARPGROUP = 32, 128


def together(
    meaning: Callable[..., np.ndarray],
    *operands: Any,
    shared: tuple[Any, ...] = (),
    of: int = WARP,
    registers: bool = False,
) -> Any:
    """Run `meaning` on every lane's operands, stacked along a first axis; this lane's result.

    `shared` are the same for all lanes, and follow those. With `registers` the result is a tuple.
    Raises RuntimeError where the lanes do not all arrive, or arrive for different things.
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
    return warp.run(thread, lane, meaning, operands, shared, registers)


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
        registers: bool,
    ) -> Any:
        self.calls[lane] = meaning, operands
        if len(self.calls) < len(self.lanes):
            self.waiting.append(thread)
            thread.block.turns.wait(thread, self.missing)
        else:
            self.compute(shared, registers)
            thread.wake(self.waiting)
        if self.error:
            raise RuntimeError(self.error)
        return self.results[lane]

    def missing(self) -> str:
        names = sorted({meaning.__name__ for meaning, _ in self.calls.values()})
        return f"lanes {sorted({*self.lanes} - {*self.calls})} to run {' or '.join(names)}"

    def compute(self, shared: tuple[Any, ...], registers: bool) -> None:
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
        stacked = map(_stacked, zip(*(o for _, o in calls), strict=True))
        with np.errstate(all="ignore"):  # infinities and NaNs are results like others
            self.results = meaning(*stacked, *shared)
        if registers:  # all at once: a tuple of each row by itself takes five times as long
            each = iter(self.results.reshape(-1))
            self.results = list(zip(*[each] * self.results.shape[1], strict=True))


def _stacked(operands: Sequence[Any]) -> np.ndarray:
    """The operands of all lanes; tuples hold registers of one type."""
    first = operands[0]
    if type(first) is not tuple:
        return np.array(operands)
    values = np.array([*chain.from_iterable(operands)], type(first[0]))
    return values.reshape(len(operands), -1)
