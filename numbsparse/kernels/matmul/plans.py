"""What a rung works out of a layout before its first launch: once per layout, then remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse.device import DeviceArray, to_device
from numbsparse.layout import Index, Walk


def planned(index: Index, make: Callable[..., tuple[Any, ...]], *key: Any) -> tuple[Any, ...]:
    """make(index, *key), with the index as NumPy arrays; its result's arrays where the index is.

    It is called once for every layout and `key`, and its result lives as long as the layout.
    """
    plans = vars(index).setdefault("plans", {})  # with the index, and as long as it
    found = plans.get((make, key))
    if found is None:
        result, on_gpu = make(on_host(index), *key), isinstance(index.block_rows, DeviceArray)
        found = tuple(to_device(a) if on_gpu and isinstance(a, np.ndarray) else a for a in result)
        plans[make, key] = found
    return found


def on_host(index: Index) -> Index:
    def host(array: Any) -> np.ndarray:
        return array.numpy() if isinstance(array, DeviceArray) else array

    return Index(
        Walk(*map(host, index.rows)),
        Walk(*map(host, index.columns)),
        host(index.block_rows),
        host(index.block_columns),
    )
