"""What a rung works out from a layout before its first launch: once per layout, then cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse.device import to_device
from numbsparse.layout import Index, Walk


def on_device(index: Index) -> Index:
    """The index arrays on the GPU."""
    return Index(
        Walk(*map(to_device, index.rows)),
        Walk(*map(to_device, index.columns)),
        to_device(index.block_rows),
        to_device(index.block_columns),
        on_host=index,
    )


def planned(index: Index, make: Callable[..., tuple[Any, ...]], *key: Any) -> tuple[Any, ...]:
    """make(index, *key), with the index as NumPy arrays; the arrays of its result where it is.

    It is called once for every layout and `key`, and its result lives as long as the layout.
    """
    found = index.plans.get((make, key))
    if found is None:
        on_gpu = index.on_host is not None
        result = make(index.on_host or index, *key)
        found = tuple(to_device(a) if on_gpu and isinstance(a, np.ndarray) else a for a in result)
        index.plans[make, key] = found
    return found
