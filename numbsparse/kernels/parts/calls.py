"""Launches repeated with operands at the same addresses: their arguments are worked out once.

Training goes over the same arrays step after step, and a product of few rows takes the GPU less
time than the host needs to work out its arguments.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from numbsparse.device import DeviceArray, current_stream, is_capturing, runtime
from numbsparse.device.replay import SEEN, repeated
from numbsparse.layout import Index

MOST_MAPS = 2**14  # groups of tensor maps that are kept forever

_maps: dict[int, DeviceArray] = {}
_announced: set[tuple[Any, ...]] = set()


def again(
    index: Index,
    make: Callable[..., None],
    operands: tuple[DeviceArray, ...],
    *options: Any,
    more: tuple[DeviceArray, ...] = (),
) -> None:
    """Run make(index, *operands, *options, *more, first=...), or what it launched here before.

    Its launches depend on the addresses and strides of the operands, and on the addresses of
    `more`. On each stream the first one waits for what is made for it. Those that another library
    captures in a graph are not remembered: the graph's memory may have other uses before and after.
    """
    (a, b, c), calls, stream = operands, index.calls, current_stream()
    places: tuple[Any, ...] = a.address, a.strides, b.address, b.strides, c.address, c.strides
    places = *places, *(each.address for each in more)
    key = make, options, places, a.shape, b.shape, c.shape, a.dtype, stream.handle
    captured = stream.is_captured
    work = partial(make, index, *operands, *options, *more, first=captured or key not in calls)
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
    taken for the one before. Beyond MOST_MAPS they are not kept, but announced every time.
    """
    if len(_maps) < MOST_MAPS:
        _maps[maps.address] = maps
    return int(maps.address not in _maps)


def unannounced(maps: DeviceArray) -> int:
    """Whether a kernel must announce them: the first time on each stream, and as above."""
    stream = current_stream()
    of = maps.address, stream.handle
    if stream.is_captured or fresh_each_time(maps) or of not in _announced:
        if not is_capturing():  # what is captured may run later
            _announced.add(of)
        return 1
    return 0
