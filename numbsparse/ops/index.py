"""The index arrays of layouts, in the place of what they index."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from numbsparse.device import DeviceArray
from numbsparse.kernels.parts.plans import on_device
from numbsparse.layout import Index, Layout


def index_beside(layout: Layout, array: Any) -> Index:
    """The layout's index arrays in the place of `array`; sent to the GPU once per layout."""
    if not isinstance(array, DeviceArray):
        return layout.index
    if layout.device_index is None:
        index = _device_index.get(layout)  # equal layouts share one
        if index is None:
            index = _device_index[layout] = on_device(layout.index)
        layout.device_index = index
    return layout.device_index


_device_index: WeakKeyDictionary[Layout, Index] = WeakKeyDictionary()
