"""What a rung works out from a layout before its first launch: once per layout, then cached."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from numbsparse.device import (
    DeviceArray,
    current_stream,
    empty,
    is_capturing,
    on,
    outside_capture,
    replay,
    runtime,
    to_device,
)
from numbsparse.device.replay import SEEN, repeated
from numbsparse.layout import Index, Walk

MOST_MAPS = 2**14  # groups of tensor maps that are kept forever

_maps: dict[int, DeviceArray] = {}
_announced: set[tuple[Any, ...]] = set()
_everywhere: set[int] = set()  # addresses of maps that all multiprocessors know


class Scratch(np.ndarray):
    """Zeros of a plan that kernels write, one copy a stream; integers are zeros again after."""


def scratch(size: int, dtype: Any) -> np.ndarray:
    return np.zeros(size, dtype).view(Scratch)


class Sent(Index):
    """The index arrays on the GPU in use, sent there when they are first asked for.

    Most kernels follow a plan that the host made, and ask for none.
    """

    device_id: int

    def __init__(self, on_host: Index):
        self.on_host, self.device_id = on_host, current_stream().device
        self.plans, self.calls, self.replays = {}, {}, {}

    def __getattr__(self, name: str) -> Any:
        if name not in ("rows", "columns", "block_rows", "block_columns"):
            raise AttributeError(name)
        arrays = getattr(self.on_host, name)
        with on(self.device_id), outside_capture():
            sent = Walk(*map(to_device, arrays)) if type(arrays) is Walk else to_device(arrays)
        setattr(self, name, sent)
        return sent


_on_gpu: dict[Any, Callable[..., tuple[Any, ...]]] = {}


def on_gpu_of(make: Any) -> Callable[[Any], Any]:
    """A decorator: this function makes on the GPU what `make` does on the host.

    It launches kernels, reads nothing back, and takes the same arguments; its index is on the GPU.
    """

    def register(function: Any) -> Any:
        _on_gpu[make] = function
        return function

    return register


def planned(index: Index, make: Callable[..., tuple[Any, ...]], *key: Any) -> tuple[Any, ...]:
    """make(index, *key), with the index as NumPy arrays; its result's arrays go where the index is.

    It is called once for every layout and `key`, and its result lives as long as the layout. For
    a layout made on the GPU, the function registered by `on_gpu_of` is called.
    """
    stream = current_stream()
    found = index.plans.get((make, key, stream.handle))
    if found is None or stream.is_captured:
        found = _on_stream(index, make, key, stream)
    return found


def room_of_pieces(index: Index, pieces: int, floats: int) -> tuple[np.ndarray, np.ndarray]:
    """(partials, tickets): room for so many pieces of sums, and for how many of each are there."""
    return scratch(pieces * floats, np.float32), scratch(pieces, np.int32)


on_gpu_of(room_of_pieces)(room_of_pieces)


def planned_numbers(index: Index, make: Callable[..., tuple[Any, ...]], *key: Any) -> Any:
    """The same of a plan without arrays, for which it need not be asked which stream is current."""
    return index.plans.get((make, key)) or planned(index, make, *key)


def _on_stream(index: Index, make: Any, key: Any, stream: Any) -> tuple[Any, ...]:
    """The plan that all streams read, with arrays of this stream's own where kernels write."""
    made = index.made is not None
    shared = index.plans.get((make, key))
    if shared is None and made:
        if make not in _on_gpu:
            raise ValueError("this plans its layout on the host: take to_host() of the layout")
        with _where(index):
            shared, launches = replay.apart(lambda: _on_gpu[make](index, *key))
        index.plans[make, key] = shared
        index.made.launches.append(launches)
    elif shared is None:
        result = make(index.on_host or index, *key)
        shared = index.plans[make, key] = _sent(index, result, np.ndarray)
    if not any(type(a) is Scratch for a in shared):
        found = shared
    elif stream.is_captured and stream.arena is not None:
        return stream.arena.once((id(index), make, key), lambda: _sent(index, shared, Scratch))
    elif stream.is_captured:  # by another library: they belong to its graph alone
        return tuple(_fresh(a) if type(a) is Scratch else a for a in shared)
    elif made:
        with _where(index):
            found = tuple(_fresh(a) if type(a) is Scratch else a for a in shared)
    else:
        found = _sent(index, shared, Scratch)
    index.plans[make, key, stream.handle] = found
    return found


def _where(index: Index) -> AbstractContextManager[None]:
    """A plan of a layout that a captured step makes is made by that step."""
    return nullcontext() if index.made.is_captured else outside_capture()


def _sent(index: Index, result: tuple[Any, ...], kind: type) -> tuple[Any, ...]:
    """The result, its arrays of exactly this type sent to where the index is."""
    if index.on_host is None:
        return result
    with outside_capture():
        return tuple(to_device(a) if type(a) is kind else a for a in result)


def _fresh(zeros: Scratch) -> DeviceArray:
    from numbsparse.kernels.elementwise import fill  # which loads numba.cuda

    array = empty(zeros.shape, zeros.dtype)
    if zeros.dtype.kind == "i":
        fill(array, 0)
    return array


def again(
    index: Index,
    make: Callable[..., None],
    operands: tuple[DeviceArray, ...],
    *options: Any,
    more: tuple[DeviceArray, ...] = (),
) -> None:
    """Run make(index, *operands, *options, *more, first=...), or what it launched here before.

    Its launches depend on the addresses and strides of the operands, and on the addresses of
    `more`. On each stream the first one waits for what is made for it, which for our own captures
    is there before. Those that another library captures in a graph are not remembered: the graph's
    memory may have other uses before and after.
    """
    (a, b, c), calls, stream = operands, index.calls, current_stream()
    places: tuple[Any, ...] = a.address, a.strides, b.address, b.strides, c.address, c.strides
    places = *places, *(each.address for each in more)
    key = make, options, places, a.shape, b.shape, c.shape, a.dtype, stream.handle
    captured = stream.is_captured
    new = key not in calls and (index.made is not None or not is_capturing())
    work = partial(make, index, *operands, *options, *more, first=captured or new)
    if captured or is_capturing() or runtime.recording() is not None:
        work()
        if not captured:
            calls.setdefault(key, SEEN)
    else:
        repeated(calls, key, (*operands, *more), stream, work)


def fresh_each_time(maps: DeviceArray) -> int:
    """Whether these maps must be announced to the copy engine at every launch, not only the first.

    It caches a map by its address, on each multiprocessor. Announcing one takes 2 us, more than a
    small product; so maps are kept forever, and no other is put at their address: it could be
    taken for the one before. Beyond MOST_MAPS they are not kept, but announced every time. Within
    a capture those that are kept are announced now, to all multiprocessors, and not in replays.
    """
    if len(_maps) < MOST_MAPS:
        _maps[maps.address] = maps
    if maps.address not in _maps:
        return 1
    if is_capturing() and maps.address not in _everywhere:
        from numbsparse.kernels.parts.announce import announce  # which loads numba.cuda

        with outside_capture(), current_stream().context():
            announce(maps)
        _everywhere.add(maps.address)
    return 0


def unannounced(maps: DeviceArray) -> int:
    """Whether a kernel must announce them: the first time on each stream, and as above."""
    stream = current_stream()
    of = maps.address, stream.handle
    if fresh_each_time(maps) or stream.is_captured:
        return 1
    new = of not in _announced and not is_capturing()
    if new:
        _announced.add(of)
    return int(new)
