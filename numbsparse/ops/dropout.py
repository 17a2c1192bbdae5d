"""Which values dropout keeps: a function of (seed, call) and the position, on every machine."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from math import prod
from typing import Any

import numpy as np

from numbsparse import kernels
from numbsparse.device import empty, id_of, live, on
from numbsparse.dtypes import as_dtype
from numbsparse.kernels.hashing import MASK, triple32
from numbsparse.ops.operands import checked_dtype
from numbsparse.patterns.checks import integer, number


def dropout_mask(
    shape: tuple[int, ...],
    rate: float,
    seed: int,
    call: int | Callable[[], int],
    dtype: Any,
    place: str,
) -> Any:
    """0 with probability `rate`, else 1 / (1 - rate), for each position by itself.

    The bits are a hash of (seed, call) and the position in C order, so that the CPU and the GPU
    give the same mask, and a resumed training repeats it. Twice through the 32-bit hash
    "triple32" of C. Wellons, "Prospecting for Hash Functions", 2018.

    Parameters
    ----------
    shape : tuple of int, up to 2^32 values
    rate : float, from 0 to below 1
    seed, call : int, from 0 to below 2^64
        One seed a layer, say, and one call a step. A function that gives the next call is asked
        once, and again for each replay of a captured step.
    dtype : float32 or float64 on the CPU, float16, bfloat16 or float32 on a GPU
    place : "cpu", "cuda" or "cuda:1"

    Examples
    --------
    >>> dropout_mask((2, 4), 0.5, seed=1, call=0, dtype="float32", place="cpu").shape
    (2, 4)
    """
    number("rate", rate, below=1)
    gpu = id_of(place)
    dtype, size = checked_dtype(as_dtype(dtype), gpu is not None), prod(shape)
    if size > 2**32:
        raise ValueError(f"shape takes up to 2**32 values, got {shape}")
    threshold, kept = min(round(rate * 2**32), MASK), 1 / (1 - rate)
    with on(gpu):
        made = partial(_keys, seed, call)
        keys = _draw.get()(made if gpu is None else lambda: live(made, 2, np.int64))
        if gpu is not None:
            mask = empty(tuple(shape), dtype)
            kernels.dropout.dropout_mask(mask.reshape(-1), keys, threshold, kept)
            return mask
    return ((_bits(size, keys) >= threshold).astype(dtype) * dtype.type(kept)).reshape(shape)


def logistic_noise(
    size: int, seed: int, call: int | Callable[[], int], dtype: Any, place: str
) -> Any:
    """log(u) - log(1 - u) of `size` numbers u, drawn uniformly between 0 and 1: a logistic sample.

    A function of (seed, call), as `dropout_mask`, whose `call` this is; made on the host.

    >>> logistic_noise(2, seed=0, call=1, dtype="float64", place="cpu").shape
    (2,)
    """

    def made() -> np.ndarray:
        u = (_bits(size, _keys(seed, call)) + 0.5) / 2**32
        return np.log(u) - np.log1p(-u)

    dtype, gpu = as_dtype(dtype), id_of(place)
    with on(gpu):
        return _draw.get()(lambda: made().astype(dtype) if gpu is None else live(made, size, dtype))


Draw = Callable[[Callable[[], Any]], Any]

_draw: ContextVar[Draw] = ContextVar("numbsparse_draw", default=lambda new: new())


@contextmanager
def draws_noted() -> Iterator[list[Any]]:
    """Within this context what masks are made from is noted, for `draws_repeated`."""
    noted: list[Any] = []
    before = _draw.get()

    def draw(new: Callable[[], Any]) -> Any:
        noted.append(keys := before(new))
        return keys

    with _drawing(draw):
        yield noted


@contextmanager
def draws_repeated(noted: list[Any]) -> Iterator[None]:
    """Within this context masks are those noted before, in their order, and no call is counted."""
    left = iter(noted)

    def draw(new: Callable[[], Any]) -> Any:
        for keys in left:
            return keys
        raise RuntimeError("function takes more dropout masks than it took the first time")

    with _drawing(draw):
        yield
    if list(left):
        raise RuntimeError("function takes fewer dropout masks than it took the first time")


@contextmanager
def _drawing(draw: Draw) -> Iterator[None]:
    token = _draw.set(draw)
    try:
        yield
    finally:
        _draw.reset(token)


def _bits(size: int, keys: np.ndarray) -> np.ndarray:
    """32 random bits for each position, uint32."""
    key, second_key = keys
    position = np.arange(size, dtype=np.uint32)
    return triple32(triple32(position + np.uint32(key)) ^ np.uint32(second_key))


def _keys(seed: int, call: int | Callable[[], int]) -> np.ndarray:
    """64 bits, as two numbers, that depend on every bit of the seed and of the call."""
    seed = integer("seed", seed, least=0, most=2**64 - 1)
    call = integer("call", call() if callable(call) else call, least=0, most=2**64 - 1)
    state, keys = 0, []
    for word in (seed & MASK, seed >> 32, call & MASK, call >> 32, 0, 1):
        state = triple32((state + word + 0x9E3779B9) & MASK)
        keys.append(state)
    return np.array(keys[-2:], np.int64)
