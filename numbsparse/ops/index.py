"""The index arrays of layouts, on the device of what they index."""

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from numbsparse.device import DeviceArray, on, runtime, to_device
from numbsparse.kernels.parts.plans import Sent
from numbsparse.layout import Index, Layout


def index_beside(layout: Layout, array: Any) -> Index:
    """The layout's index arrays on `array`'s device; sent to each GPU once per layout."""
    if not isinstance(array, DeviceArray):
        return layout.index
    index = layout.device_index
    if index is None or (runtime.several_devices and _number(index) != array.device_id):
        device = array.device_id
        known = _device_index.setdefault(layout, {})  # equal layouts share one
        if device not in known:
            with on(device):
                known[device] = Sent(layout.index)
        index = layout.device_index = known[device]
    return index


def _number(index: Index) -> int:
    """Of the GPU where the arrays are."""
    if isinstance(index, Sent):
        return index.device_id
    array: Any = index.block_rows
    return array.device_id


def positions_beside(layout: Layout, other: Layout, array: Any) -> Any:
    """`layout.positions_in(other)` on `array`'s device; the last ones are sent there once."""
    positions = layout.positions_in(other)
    if not isinstance(array, DeviceArray):
        return positions
    known = _device_positions.get(layout)
    if known is None or known[0] is not positions or known[1].device_id != array.device_id:
        with on(array.device_id):
            known = _device_positions[layout] = positions, to_device(positions.astype(np.int32))
    return known[1]


_device_positions: WeakKeyDictionary[Layout, tuple[np.ndarray, DeviceArray]] = WeakKeyDictionary()
_device_index: WeakKeyDictionary[Layout, dict[int, Index]] = WeakKeyDictionary()
