"""When tensor maps are announced to the copy engine, which takes it 2 us each time."""

from __future__ import annotations

from typing import Any

from numbsparse.device import DeviceArray, current_stream, is_capturing
from numbsparse.kernels.parts.calls import fresh_each_time

_announced: set[tuple[Any, ...]] = set()


def unannounced(maps: DeviceArray) -> int:
    """Whether a kernel must announce them: the first time on each stream (`fresh_each_time`)."""
    stream = current_stream()
    if stream.is_captured or fresh_each_time(maps):
        return 1
    of = maps.address, stream.handle
    if of in _announced:
        return 0
    if not is_capturing():  # what is captured may run later
        _announced.add(of)
    return 1
