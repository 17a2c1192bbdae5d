"""In the simulator, 32 threads run an instruction together, as a warp, or 128 as a warpgroup."""

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
    types: tuple[Any, ...] = (),
) -> Any:
    """Run `meaning` on every lane's operands, stacked along a first axis; this lane's result.

    `shared` are the same for all lanes, and follow those. With `registers` the result is a tuple.
    With `types`, for each operand, a tuple of registers, what they are to be.
    Raises RuntimeError where the lanes do not all arrive, or arrive for different things.
    """
    thread = current()
    warp: Warp | None = thread.own.get(of)
    if warp is None:
        block, number = thread.block, thread.thread_id // of
        if of * number + of > block.threads:
            raise RuntimeError(
                f"{meaning.__name__} takes warps of {of} threads; "
                f"a block of {block.threads} ends inside one"
            )
        warp = thread.own[of] = block.own.get((of, number)) or Warp(of)
        block.own[of, number] = warp
    lane = thread.thread_id % of
    warp.calls[lane] = meaning, operands
    if len(warp.calls) < of:
        warp.waiting.append(thread)
        thread.block.turns.wait(thread, warp.missing)
    else:
        warp.compute(shared, registers, types)
        thread.wake(warp.waiting)
    if warp.error:
        raise RuntimeError(warp.error)
    return warp.results[lane]


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

    def missing(self) -> str:
        names = sorted({meaning.__name__ for meaning, _ in self.calls.values()})
        return f"lanes {sorted({*self.lanes} - {*self.calls})} to run {' or '.join(names)}"

    def compute(self, shared: tuple[Any, ...], registers: bool, types: tuple[Any, ...]) -> None:
        calls = [self.calls[lane] for lane in self.lanes]
        self.calls = {}
        meanings, operands = zip(*calls, strict=True)
        meaning = meanings[0]
        if meanings.count(meaning) < len(meanings):
            self.error = "the lanes of a warp went apart: " + ", ".join(
                f"{name} in lanes {[lane for lane in self.lanes if meanings[lane] is each]}"
                for each, name in {each: each.__name__ for each in meanings}.items()
            )
            return
        each_one = zip(*operands, strict=True)
        stacked = map(_registers, each_one, types) if types else map(_stacked, each_one)
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
    return _registers(operands, type(first[0]))


def _registers(operands: Sequence[Any], dtype: Any) -> np.ndarray:
    """The registers of all lanes, as one array (lanes, registers); all are of that type."""
    values = [*chain.from_iterable(operands)]
    if {*map(type, values)} != {dtype}:
        for value in values:
            register(dtype, value)
    return np.array(values, dtype).reshape(len(operands), -1)


def register(dtype: Any, value: Any) -> Any:
    """The value of a register of that type; TypeError for another."""
    if type(value) is not dtype:
        raise TypeError(f"a register of {dtype.__name__} got {type(value).__name__} {value!r}")
    return value
