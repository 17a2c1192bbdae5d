"""In the simulator, 32 threads run an instruction together, as a warp, or 128 as a warpgroup."""

from collections.abc import Callable, Iterator, Sequence
from contextvars import Context
from itertools import accumulate, chain
from typing import Any

import numpy as np

from numbsparse.simulator import SIMULATED
from numbsparse.simulator.threads import Worker, current

if SIMULATED:
    import numbsparse.simulator.launch  # noqa: F401, threads take turns in Numba's own launches too

WARP, WARPGROUP = 32, 128
WORDS = np.uint32, np.int32, np.float32  # the types of a register

_quiet = Context()  # infinities and NaNs are results like others; `np.errstate` takes longer
_quiet.run(np.seterr, all="ignore")


def together(
    meaning: Callable[..., np.ndarray],
    *operands: Any,
    shared: tuple[Any, ...] = (),
    of: int = WARP,
    registers: bool = False,
    kinds: tuple[tuple[Any, int], ...] = (),
) -> Any:
    """Run `meaning` on every lane's operands, stacked along a first axis; this lane's result.

    `shared` are the same for all lanes, and follow those. With `registers` the result is a tuple.
    With `kinds` the operands are registers, each (type, number) of which is stacked.
    Raises RuntimeError where the lanes do not all arrive, or arrive for different things.
    """
    thread = current()
    warp, lane = thread.own.get(of) or _join(thread, of, meaning)
    warp.calls[lane] = meaning, operands
    if len(warp.calls) < of:
        warp.waiting.append(thread)
        thread.turns.wait(thread, warp.missing)
    else:
        warp.compute(shared, registers, kinds)
        thread.turns.wake(warp.waiting)
    if warp.error:
        raise RuntimeError(warp.error)
    return warp.results[lane]


def _join(thread: Worker, of: int, meaning: Callable[..., np.ndarray]) -> "tuple[Warp, int]":
    """The thread's warp, and which lane of it it is; both stay."""
    block, (number, lane) = thread.block, divmod(thread.thread_id, of)
    if of * number + of > block.threads:
        raise RuntimeError(
            f"{meaning.__name__} takes warps of {of} threads; "
            f"a block of {block.threads} ends inside one"
        )
    thread.own[of] = block.own.setdefault((of, number), Warp(of)), lane
    return thread.own[of]  # type: ignore[no-any-return]


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
        self.quietly = _quiet.copy().run

    def missing(self) -> str:
        names = sorted({meaning.__name__ for meaning, _ in self.calls.values()})
        return f"lanes {sorted({*self.lanes} - {*self.calls})} to run {' or '.join(names)}"

    def compute(self, shared: tuple[Any, ...], registers: bool, kinds: Any) -> None:
        meanings, operands = zip(*map(self.calls.pop, self.lanes), strict=True)
        meaning = meanings[0]
        if meanings.count(meaning) < len(meanings):
            self.error = "the lanes of a warp went apart: " + ", ".join(
                f"{name} in lanes {[lane for lane in self.lanes if meanings[lane] is each]}"
                for each, name in {each: each.__name__ for each in meanings}.items()
            )
            return
        stacked = _rows(operands, kinds) if kinds else map(_stacked, zip(*operands, strict=True))
        self.results = self.quietly(meaning, *stacked, *shared)
        if registers:  # all at once: a tuple of each row by itself takes five times as long
            each = iter(self.results.reshape(-1))
            self.results = list(zip(*[each] * self.results.shape[1], strict=True))


def _stacked(operands: Sequence[Any]) -> np.ndarray:
    """The operands of all lanes: a number each, or a tuple or an array of them."""
    kind = type(operands[0])
    if kind is tuple:
        return _stacked([*chain.from_iterable(operands)]).reshape(len(operands), -1)
    if kind in WORDS and {*map(type, operands)} == {kind}:
        return np.frombuffer(b"".join(operands), kind)
    if kind is np.ndarray:
        return np.frombuffer(b"".join(operands), operands[0].dtype).reshape(len(operands), -1)
    return np.array(operands)


def _rows(lanes: Sequence[Any], kinds: tuple[tuple[Any, int], ...]) -> Iterator[np.ndarray]:
    """Of the registers of each lane so many of each type, as arrays (lanes, number).

    By their bytes: an array of NumPy's numbers takes ten times as long.
    """
    values = [*chain.from_iterable(lanes)]
    types = [kind for kind, number in kinds for _ in range(number)] * len(lanes)
    if [*map(type, values)] != types:
        for value, kind in zip(values, types, strict=True):
            register(kind, value)
    words = np.frombuffer(b"".join(values), np.uint32).reshape(len(lanes), -1)
    ends = accumulate(number for _, number in kinds)
    for (kind, number), end in zip(kinds, ends, strict=True):
        yield words[:, end - number : end].view(kind)


def register(dtype: Any, value: Any) -> Any:
    """The value of a register of that type; TypeError for another."""
    if type(value) is not dtype:
        raise TypeError(f"a register of {dtype.__name__} got {type(value).__name__} {value!r}")
    return value
