"""Launches repeated with operands at the same addresses: their arguments are worked out once.

Training goes over the same arrays step after step, and a product of few rows takes the GPU less
time than the host needs to work out its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numbsparse.device import DeviceArray, current_stream, is_capturing
from numbsparse.device.launch import Bound
from numbsparse.layout import Index

REMEMBERED = 4096  # launches of a layout
MOST_MAPS = 2**14  # groups of tensor maps that are kept forever

_maps: dict[int, DeviceArray] = {}
_announced: set[tuple[Any, ...]] = set()


class Call(NamedTuple):
    """The first launch, which waits for what was made for it; later ones; our arrays they use."""

    first: Bound
    later: Bound
    kept: tuple[DeviceArray, ...]


def again(
    index: Index,
    make: Callable[..., Call],
    operands: tuple[DeviceArray, ...],
    *options: Any,
    more: tuple[DeviceArray, ...] = (),
) -> None:
    """Run make(index, *operands, *options, *more), or the call it returned for these addresses.

    A call depends on the addresses and strides of the operands, and on the addresses of `more`.
    On each stream the first launch waits for what was made for it. Calls that another library
    captures in a graph are not remembered: the graph's memory may have other uses before and
    after.
    """
    calls, (a, b, c) = index.calls, operands
    places: tuple[Any, ...] = a.address, a.strides, b.address, b.strides, c.address, c.strides
    if more:
        places = *places, *[each.address for each in more]
    stream = current_stream()
    key = make, options, places, a.shape, b.shape, c.shape, a.dtype, stream.handle
    call = calls.get(key)
    if call is not None and not stream.is_captured:
        call.later(a, b, c, *more, *call.kept)
        return
    if len(calls) >= REMEMBERED:
        calls.clear()
    call = make(index, *operands, *options, *more)
    call.first(a, b, c, *more, *call.kept)
    if not stream.is_captured:
        calls[key] = call


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
