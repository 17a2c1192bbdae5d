"""The registers of a thread, the instructions for each dtype, and copies in either order."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda

from numbsparse.device import SIMULATED, DeviceArray
from numbsparse.device.tensor_map import tensor_map
from numbsparse.kernels.ptx import (
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    pack_bfloat2,
    pack_half2,
    tma_load_2d,
    tma_load_2d_multicast,
)

MMA = {"float16": mma_m16n8k16_f16, "bfloat16": mma_m16n8k16_bf16}
PAIR = {"float16": pack_half2, "bfloat16": pack_bfloat2}


def registers(warps: int) -> dict[str, int]:
    """Options of `cuda.jit`: the registers of a thread, handed out to four warps at once."""
    if SIMULATED:
        return {}
    return {"max_registers": min(255, 65536 // (128 * -(-warps // 4)) // 8 * 8)}


def map_of(x: DeviceArray, rows: int, features: int, turned: bool) -> DeviceArray:
    """The map of x for boxes of so many rows and features; turned, of x (features, batch)."""
    box = (features, rows) if turned else (rows, features)
    return tensor_map(x, box, x.itemsize * box[1])


@cache
def load_for(turned: bool, cluster: int = 1) -> Any:
    """Ask for the box of such a map that begins at a feature and a row, for all of a cluster."""
    RANKS = (1 << cluster) - 1

    @cuda.jit(device=True)
    def load(shared, to, x_map, feature, row, bars, stage):
        column, line = (row, feature) if turned else (feature, row)
        if cluster == 1:
            tma_load_2d(shared, to, x_map, column, line, bars, stage)
        else:
            tma_load_2d_multicast(shared, to, x_map, column, line, bars, stage, RANKS)

    return load
