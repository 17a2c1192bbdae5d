"""Rows that `cp.async` can read: gapless, from one multiple of 16 bytes to another."""

from __future__ import annotations

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.elementwise import copy
from numbsparse.kernels.views import span

BYTES = 16  # of one copy


def aligned_rows(x: DeviceArray) -> tuple[DeviceArray, int]:
    """x (rows, width) as one axis, and the items from row to row; copied unless it is aligned."""
    if x.rows is not None:
        return x.rows
    (rows, width), item = x.shape, x.itemsize
    step, next_item = x.strides
    if (
        x.address % BYTES
        or (rows > 1 and (step % BYTES or step < 0))
        or (width > 1 and next_item != item)
    ):
        run = BYTES // item
        aligned = empty((rows, -(-width // run) * run), x.dtype)[:, :width]
        copy(aligned, x)
        return span(aligned), aligned.strides[0] // item
    x.rows = span(x), step // item
    return x.rows
