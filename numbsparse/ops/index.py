"""The index arrays of layouts, in the place of what they index."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from numbsparse.device import DeviceArray, on, runtime
from numbsparse.kernels.matmul.plans import on_device
from numbsparse.layout import Index, Layout


def index_beside(layout: Layout, array: Any) -> Index:
    """The layout's index arrays in the place of `array`; sent to each GPU once per layout."""
    if not isinstance(array, DeviceArray):
        return layout.index
    index = layout.device_index
    if index is None or (runtime.several_devices and _number(index) != array.device_id):
        device = array.device_id
        known = _device_index.setdefault(layout, {})  # equal layouts share one
        if device not in known:
            with on(device):
                known[device] = on_device(layout.index)
        index = layout.device_index = known[device]
    return index


def _number(index: Index) -> int:
    """Of the GPU where the arrays are."""
    array: Any = index.block_rows
    return array.device_id


_device_index: WeakKeyDictionary[Layout, dict[int, Index]] = WeakKeyDictionary()
