"""Rows that `cp.async` can read: gapless, from one multiple of 16 bytes to another."""

from __future__ import annotations

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.elementwise import copy
from numbsparse.kernels.views import span

BYTES = 16  # of one copy


def aligned_rows(x: DeviceArray) -> tuple[DeviceArray, int]:
    """x (rows, width) as one axis, and the items from row to row; copied unless it is aligned."""
    (rows, width), item = x.shape, x.itemsize
    starts = (x.address, x.strides[0] if rows > 1 else 0)
    if (width > 1 and x.strides[1] != item) or any(s % BYTES or s < 0 for s in starts):
        run = BYTES // item
        aligned = empty((rows, -(-width // run) * run), x.dtype)[:, :width]
        copy(aligned, x)
        x = aligned
    return span(x), x.strides[0] // item
