"""What a step of the taught ladder serves. Everything else is refused with the reason."""

from collections.abc import Callable
from typing import Any

import numpy as np

from numbsparse.device import DeviceArray
from numbsparse.kernels.matmul.reach import reach

BLOCK_SIZES = (32, 64, 128)
MOST = 2**31  # values in x or y: what 32 bits count, and a sign


def taught(
    step: str, dtype: str, rows: int, capability: tuple[int, int] = (7, 0)
) -> Callable[..., str | None]:
    """The `unsupported` of a step: only forward, of one dtype, for batches in tiles of `rows`."""

    def refused(product: str, block_size: int, dtype: str, batch: int, *call: Any) -> str | None:
        if product != "forward":
            return "computes only forward"
        if batch == 0 or batch % rows:
            return f"takes batches that are multiples of {rows}, got {batch}"
        return None

    sizes, later = (BLOCK_SIZES, (dtype,)), capability < (9, 0)
    return reach(step, "cuda", *sizes, capability=capability, later=later, refused=refused)


def check(x: DeviceArray, values: DeviceArray, y: DeviceArray, columns: int = 1) -> None:
    """Raise ValueError, with the reason, where operands are not such as a step takes.

    columns : block columns that it computes together
    """
    n_blocks, size, _ = values.shape
    for name, array in (("x", x), ("values", values), ("y", y)):
        if not array.is_contiguous:
            raise ValueError(f"{name} takes C order without gaps, got strides {array.strides}")
        if array.size >= MOST:
            raise ValueError(f"{name} takes less than {MOST} values, got {array.size}")
        if array.address % 16:
            raise ValueError(f"{name} begins at a multiple of 16 bytes, got {array.address:#x}")
    if n_blocks == 0:
        raise ValueError("values takes at least one block")
    if x.shape[1] % size:
        raise ValueError(f"x takes features in multiples of {size}, got {x.shape[1]}")
    if y.shape[1] % (columns * size):
        raise ValueError(f"y takes features in multiples of {columns * size}, got {y.shape[1]}")


def pairs(y: DeviceArray) -> DeviceArray:
    """The memory of y in C order, two neighbours of 16 bits at a time, as one axis of uint32."""
    return DeviceArray(y.address, (y.size // 2,), np.uint32, None, y.owner)
