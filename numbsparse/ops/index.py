"""The index arrays of layouts, in the place of what they index."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from numbsparse.device import DeviceArray, to_device
from numbsparse.kernels.matmul.plans import on_device
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


def positions_beside(layout: Layout, other: Layout, array: Any) -> Any:
    """`layout.positions_in(other)` in the place of `array`; the last ones are sent there once."""
    positions = layout.positions_in(other)
    if not isinstance(array, DeviceArray):
        return positions
    known = _device_positions.get(layout)
    if known is None or known[0] is not positions:
        known = _device_positions[layout] = positions, to_device(positions.astype(np.int32))
    return known[1]


_device_positions: WeakKeyDictionary[Layout, tuple[np.ndarray, DeviceArray]] = WeakKeyDictionary()
_device_index: WeakKeyDictionary[Layout, Index] = WeakKeyDictionary()
