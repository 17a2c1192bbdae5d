"""Rows that `cp.async` can read: gapless, from one multiple of 16 bytes to another."""

from __future__ import annotations

from numbsparse.device import DeviceArray, empty
from numbsparse.kernels.elementwise import copy
from numbsparse.kernels.views import span

BYTES = 16  # of one copy


def aligned_rows(x: DeviceArray) -> tuple[DeviceArray, int]:
    """x (rows, width) as one axis, and the items from row to row; copied unless it is aligned."""
    if x.rows is None:
        whole = aligned(x)
        rows = span(whole), whole.strides[0] // whole.itemsize
        if whole is not x:
            return rows
        x.rows = rows
    return x.rows


def aligned_lines(x: DeviceArray) -> tuple[DeviceArray, int, bool]:
    """As `aligned_rows`, of x or of x.T, whichever lies so; and whether it is x.T."""
    turned = not is_aligned(x) and is_aligned(x.T)
    return *aligned_rows(x.T if turned else x), turned


def aligned(x: DeviceArray) -> DeviceArray:
    """x (rows, width), or a copy unless it is aligned."""
    if is_aligned(x):
        return x
    (rows, width), run = x.shape, BYTES // x.itemsize
    rounded = empty((rows, -(-width // run) * run), x.dtype)[:, :width]
    copy(rounded, x)
    return rounded


def is_aligned(x: DeviceArray) -> bool:
    rows, width = x.shape
    starts = (x.address, x.strides[0] if rows > 1 else 0)
    gapless = width <= 1 or x.strides[1] == x.itemsize
    return gapless and not any(s % BYTES or s < 0 for s in starts)
